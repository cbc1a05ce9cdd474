"""Everything that runs on the far side of the wire: zygote, guestd, spawner, file worker. Standard library only."""
