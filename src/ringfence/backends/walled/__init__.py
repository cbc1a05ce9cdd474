"""What boxes have in common whose wall is somebody else's: containers, gVisor, virtual machines."""
