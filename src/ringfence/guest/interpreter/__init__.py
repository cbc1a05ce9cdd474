"""Run a guest's code: one piece of it, or the pieces of a session one after the other."""
