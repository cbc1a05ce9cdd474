"""Frames between host and guestd, and the parsers of what guestd and file workers send."""
