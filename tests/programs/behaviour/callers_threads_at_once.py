import threading, ringfence
from ringfence.backends import linux
from ringfence.backends.process import pool
together = threading.Barrier(4)
def begin():
    together.wait()
    assert ringfence.run("1").value == "1"
threads = [threading.Thread(target=begin) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
[kept] = pool._pools.values()
print(len(linux._kept.plans), len(kept._templates._of_view), len(kept._shelves))
