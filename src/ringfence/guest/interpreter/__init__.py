"""Interpreters that run a guest's code: a single piece, or the pieces of a session in order."""
