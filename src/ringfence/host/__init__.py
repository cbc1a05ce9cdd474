"""What this machine gives every backend: cgroups, uids, state directories, mounts, programs."""
