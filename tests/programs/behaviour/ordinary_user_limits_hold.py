count = '''
import os, signal
n = 1
while True:
    try: pid = os.fork()
    except OSError: break
    if pid == 0: signal.pause()
    n += 1
n
'''
for n in (1, 5): say(ringfence.run(count, policy=Policy(limits=Limits(processes=n))).value)
start = time.monotonic()
stubborn = "import os, signal as s, time\ns.signal(15, s.SIG_IGN)\nif os.fork() == 0: os.setsid()\ntime.sleep(60)"
r = ringfence.run(stubborn, timeout_s=0.5)
say(r.status, time.monotonic() - start < 15)
r = ringfence.run("while True: pass", policy=Policy(limits=Limits(cpu_time_s=0.6, timeout_s=20)))
say(r.status, r.reason)
r = ringfence.run("x = bytearray(200 << 20)", policy=Policy(limits=Limits(memory="64M")))
say(r.status in ("oom", "error"))
disk = '''
n = 0
f = open("f", "wb", buffering=0)
try:
    while True: n += f.write(b"x" * 4096)
except OSError as e: reason = e.strerror
(n, reason)
'''
say(ringfence.run(disk, policy=Policy(limits=Limits(disk="1M"))).value)
r = ringfence.run("print('x' * 5000)", policy=Policy(limits=Limits(output="1K")))
say(r.truncated, len(r.stdout) < 1200)
