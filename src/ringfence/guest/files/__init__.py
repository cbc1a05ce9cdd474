"""File operations inside a sandbox, each done by a short-lived worker with the guest's own rights."""
