import os, ringfence
box = ringfence.Sandbox().start()
ringfence.run("1")
os.closerange(3, 4096)
try: print("sandbox", box.run("1").status)
except (ringfence.RingfenceError, OSError) as e: print("sandbox", "error")
values = []
for _ in range(4):
    try: values.append(ringfence.run("1").value)
    except (ringfence.RingfenceError, OSError) as e: values.append(type(e).__name__)
print(values[-1], flush=True)
os._exit(0)
