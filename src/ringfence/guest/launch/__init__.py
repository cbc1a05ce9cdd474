"""Build a sandbox's processes: the zygote, the monitor, the forker, PID 1 and the spawner."""
