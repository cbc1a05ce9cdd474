"""A user-space kernel: `runsc`, directly on an OCI bundle, without a daemon."""
