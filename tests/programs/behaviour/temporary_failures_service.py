import os, sys, threading, time
from ringfence.backends.container import api as engine
engine._candidates = lambda *_: []
found = []
ask = lambda name: found.append(engine.find(name))
threads = [threading.Thread(target=ask, args=(name,)) for name in (None, "podman", None, "podman")]
for one in threads: one.start()
for one in threads: one.join()
if os.fork() == 0: time.sleep(30); os._exit(0)  # who has all our descriptors
print(len(found), len({one.socket for one in found}), engine._podman.service.process.pid, flush=True)
time.sleep(30)
