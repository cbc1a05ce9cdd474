"""The gVisor backend: a user-space kernel, `runsc` on an OCI bundle, without a daemon."""
