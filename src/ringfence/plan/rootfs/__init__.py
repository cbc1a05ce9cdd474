"""Which files a sandbox sees: the host's or an image's, mounts, what is hidden and what is protected."""
