"""The gateway's side of the one channel through which a guestd relays connections."""
