"""Everything that runs on the guest's side of the wire: zygote, guestd, spawner, file worker. Standard library only."""
