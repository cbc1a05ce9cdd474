"""Copies the memory of a session into a fresh sandbox. x86-64 only; loaded only when a copy is asked for."""
