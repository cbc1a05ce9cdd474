"""The checks, a module for each part of the surface. Each module ends with `CHECKS`, the table of its checks."""
