"""Policy and host facts become a plan: plain data that a short loop applies."""
