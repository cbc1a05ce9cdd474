import array, os, socket, time
null, held = os.open("/dev/null", 0), []
for count in (250, 1):
    try:
        while True:
            held += socket.socketpair()
            for _ in range(60):
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * count))]
                held[-1].sendmsg([b"x"], rights, socket.MSG_DONTWAIT)
    except OSError: pass  # the sandbox is full, as intended
print("full", flush=True)
time.sleep(60)
