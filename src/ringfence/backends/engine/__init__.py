"""Code shared by the backends in which an engine isolates: Docker, Podman or runsc, programs that are not ours."""
