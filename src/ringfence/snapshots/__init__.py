"""Snapshots of a sandbox's files: take, keep, compare, restore, export."""
