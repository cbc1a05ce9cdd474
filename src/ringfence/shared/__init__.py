"""Code for both sides of the wall, from the standard library alone: the host and the guest import it."""
