"""What a manager knows of its agents, without I/O to any sandbox: names, quotas, histories, the state directory."""
