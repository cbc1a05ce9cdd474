"""What every backend shares in which another program (Docker, Podman, runsc) makes the walls."""
