import os, signal, threading, time, ringfence
stop = False
def reap():
    while not stop:
        try: os.wait()
        except ChildProcessError: time.sleep(0.001)
t = threading.Thread(target=reap); t.start()
print([ringfence.run(f"{n}").value for n in range(5)])
from ringfence.backends.process import pool
one = next(iter(pool._pools.values()))
os.kill(one._templates._zygote.pid, signal.SIGKILL)
print([ringfence.run(f"{n}").value for n in range(5)])
with ringfence.Sandbox() as box: print(box.exec(["sh", "-c", "exit 4"]).exit_code)
pool.close_all()
stop = True
t.join(10)
