"""Adapters that make a sandbox usable from other projects. Each module needs the extra of its name."""
