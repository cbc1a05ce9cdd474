import os, signal, time
for n in range(1, 32):
    try: signal.signal(n, signal.SIG_IGN)
    except OSError: pass  # a signal that cannot be ignored
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in (0, 1, 2): os.close(fd)
        while True: time.sleep(1)
print("up", flush=True)
while True: time.sleep(1)
