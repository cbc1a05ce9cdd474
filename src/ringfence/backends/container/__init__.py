"""The container backend: Docker or Podman through the Engine API, hardened by default."""
