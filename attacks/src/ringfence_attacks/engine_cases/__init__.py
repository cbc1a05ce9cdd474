"""Attacks on sandboxes whose wall is an engine's: what each wall is made of, and cases for it."""
