import socket
names = ["127.1", "0x7f.1", "2130706433", "017700000001", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[::1%lo]",
         "evil.test\0.web.test", "web.test@evil.test", "web.test.evil.test", "a_b.web.test", "w\u00e9b.test"]
for name in names:
    sock = socket.create_connection(("127.0.0.1", 3128))
    sock.sendall(b"CONNECT " + name.encode() + b":%d HTTP/1.1\r\n\r\n" % port)
    first = sock.recv(100)[9:12].decode()
    sock = socket.create_connection(("127.0.0.1", 3128))
    plain = name.strip("[]").encode()
    sock.sendall(b"\5\1\0"); sock.recv(2)
    sock.sendall(b"\5\1\0\3" + bytes([len(plain)]) + plain + port.to_bytes(2, "big"))
    print(first, sock.recv(2)[1:].hex(), end="; ")
