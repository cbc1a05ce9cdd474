"""Move files between the host and a sandbox."""
