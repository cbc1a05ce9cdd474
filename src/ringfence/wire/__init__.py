"""Frames between host and guestd. The only parser of bytes that come from a sandbox."""
