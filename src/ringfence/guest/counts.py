"""Numbers that both sides of a sandbox count with."""

# Processes of the sandbox that are ours and count against RLIMIT_NPROC: PID 1, spawner.
OURS = 2
# What the spawner may start beyond the guest's limit, so that a guest at its limit can still be served (F07).
RESERVE = 5
# A sandbox nobody has asked anything for so long is a spare: it may do ahead what a run will need.
QUIET_S = 0.005
