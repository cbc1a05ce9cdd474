"""Code that the host and the guest's side both import, from the standard library alone."""
