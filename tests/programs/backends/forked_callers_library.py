import os, sys, time
import ringfence
from ringfence.backends import Container, Gvisor
box = ringfence.Sandbox(backend={backend}).start()
kept = box.spawn(["sleep", "600"])
wall = box._box._wall
print(wall._process.pid if hasattr(wall, "_process") else wall.pid, flush=True)
if os.fork() == 0:
    try:
        box.exec(["true"])
    except ringfence.SandboxClosedError:
        print("not mine", flush=True)
    with ringfence.Sandbox(backend={backend}) as own:
        print(own.exec(["echo", "own"]).stdout.strip(), flush=True)
    print("child", os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
