import socket, struct
def ask(name, kind, tcp=False):
    data = struct.pack("!6H", 7, 256, 1, 0, 0, 0)
    data += b"".join(bytes([len(x)]) + x.encode() for x in name.split(".")) + b"\0" + struct.pack("!2H", kind, 1)
    if tcp:
        sock = socket.create_connection(("127.0.0.1", 53)); sock.settimeout(3)
        sock.sendall(len(data).to_bytes(2, "big") + data); answer = sock.recv(4096)[2:]
    else:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); sock.settimeout(3)
        sock.sendto(data, ("127.0.0.1", 53)); answer = sock.recv(4096)
    return answer[3] & 15, struct.unpack_from("!H", answer, 6)[0]
secret = "a" * 60 + "." + "b" * 60
print([ask("web.test", 1), ask("WEB.test", 1, True), ask("web.test", 28), ask("web.test", 65), ask("web.test", 16)])
print([ask(secret + ".evil.test", 16), ask(secret + ".web.test", 1), ask("evil.test", 1, True)])
print(ask("1.0.0.127.in-addr.arpa", 12))
for server in ("8.8.8.8", "198.18.0.1"):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try: sock.connect((server, 53)); sock.send(b"x"); sock.settimeout(1); print(sock.recv(1))
    except OSError as error: print("unreachable" if error.errno in (101, 113) else error.errno)
print(socket.getaddrinfo("web.test", 443, 0, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)[0][4][0][:7])
