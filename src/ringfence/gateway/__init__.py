"""The only way from a sandbox to a network: it checks each name, address and request, dials, counts and logs."""
