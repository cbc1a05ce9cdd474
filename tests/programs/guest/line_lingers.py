import array, socket, struct, time
listener = socket.create_server(("127.0.0.1", 0))
lingers = socket.create_connection(listener.getsockname())
lingers.setblocking(False)
try:
    while True:
        lingers.send(bytes(65536))
except BlockingIOError:
    lingers.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 10))
for fd in found:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lingers.fileno()]))
    socket.socket(fileno=os.dup(fd)).sendmsg([b"x"], [rights])
lingers.close()
print("sent", flush=True)
time.sleep(20)
