import ctypes, os, sys, threading, time
def work():
    print("up", flush=True)
    while True: time.sleep(0.1)
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    sys.stdout = open(os.devnull, "w")
threading.Thread(target=work).start()
time.sleep(0.1)
ctypes.CDLL(None).syscall(60, 0)  # exit, of the first thread alone
