"""Copy a running sandbox's memory into another sandbox."""
