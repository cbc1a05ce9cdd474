"""The checks, a module for each part of the surface. Each ends with `CHECKS`, the table of its own."""
