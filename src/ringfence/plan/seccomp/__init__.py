"""The system call filter: a table, its compiler, and the compiled programs."""
