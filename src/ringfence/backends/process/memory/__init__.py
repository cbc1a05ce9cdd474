"""Copies of a running sandbox's memory in other sandboxes."""
