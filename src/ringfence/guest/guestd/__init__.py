"""guestd, our process inside a sandbox: it starts the guest's programs and relays between them and the host."""
