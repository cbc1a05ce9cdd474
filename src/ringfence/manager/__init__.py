"""The records that a SandboxManager keeps of each agent: its quota, its history, its workspace, its state on disk."""
