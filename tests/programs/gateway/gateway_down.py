import socket, sys
socks = [socket.create_connection(("many.test", port)) for _ in range(200)]
for sock in socks: sock.send(b"x")
place = socks[0].getpeername()
print(sum(len(sock.recv(1)) for sock in socks), flush=True)
sys.stdin.readline()
ended = 0
for sock in socks:
    try: sock.send(b"y"); ended += not sock.recv(1)
    except OSError: ended += 1
print(ended, flush=True)
sock = socket.create_connection(place, timeout=30)
sock.send(b"z"); print("waiting", flush=True); print(sock.recv(1), flush=True)
