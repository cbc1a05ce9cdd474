import ringfence, threading, time
def work():
    global box, p
    box = ringfence.Sandbox().start()
    p = box.spawn(["sh", "-c", "echo up; sleep 600"])
    next(iter(p))
t = threading.Thread(target=work)
t.start(); t.join()
time.sleep(0.5)
print(box.run("1").value, p.running)
print("go")
time.sleep(60)
