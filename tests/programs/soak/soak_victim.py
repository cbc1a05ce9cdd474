import sys
import ringfence
policy = ringfence.Policy(limits=ringfence.Limits(processes=30))
print("go", flush=True)
mode = int(sys.argv[1]) % 4
while True:
    if mode == 0: ringfence.run("import os\nos.fork()\nprint(1)")
    elif mode == 1: ringfence.run("import time\ntime.sleep(0.05)", policy=policy)
    elif mode == 2:
        with ringfence.Sandbox() as box:
            box.files.write("f", b"x" * 100_000)
            box.spawn(["sh", "-c", "setsid sleep 600 & setsid sleep 600 & sleep 600"])
            box.exec(["cat", "f"])
    else:
        boxes = [ringfence.Sandbox().start() for _ in range(3)]
        for box in boxes: box.close()
