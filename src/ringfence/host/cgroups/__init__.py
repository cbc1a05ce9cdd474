"""Control groups of versions 1 and 2: find the ones we may use, make one for a sandbox, read it, kill it."""
