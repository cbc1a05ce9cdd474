import os, time, ringfence
from ringfence.backends.process import pool
ringfence.run("1")
one = next(iter(pool._pools.values()))
with next(iter(one._templates._of_view.values()))._lock:  # as the thread that makes spares does
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    for _ in range(300):
        if os.waitpid(pid, os.WNOHANG)[0]:
            print("ended")
            break
        time.sleep(0.01)
    else:
        os.kill(pid, 9)
        print("hung")
