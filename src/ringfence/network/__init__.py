"""The only way out of a sandbox: names, rules, the resolver inside, and the gateway that dials for it."""
