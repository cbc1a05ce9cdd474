"""Build a sandbox's processes and walls: the zygote, the monitor, the forker, PID 1 and the spawner."""
