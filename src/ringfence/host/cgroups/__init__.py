"""Control groups of versions 1 and 2: which this process may use, and a group for each sandbox."""
