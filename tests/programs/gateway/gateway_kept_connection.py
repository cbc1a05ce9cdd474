import socket
def ask(address, *requests):
    sock = socket.create_connection(address); sock.settimeout(10)
    for request in requests:
        sock.sendall(request.encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            more = sock.recv(65536)
            if not more: break
            answer += more
        print(answer[9:12].decode() or "closed", end=" ")
    print()
name, proxy = ("web.test", port), ("127.0.0.1", 3128)
ok = "GET /big HTTP/1.1\r\nHost: web.test:%d\r\n" % port
head = "HEAD /x HTTP/1.1\r\nHost: web.test:%d\r\n\r\n" % port
ask(name, head, head, head.replace("web", "evil"))
ask(proxy, head.replace("/x", "http://web.test:%d/x" % port), head.replace("/x", "http://evil.test/x"))
ask(proxy, head.replace("/x", "http://web.test:%d/x" % port).replace("Host: web", "Host: evil"))
ask(name, head.replace("/x", "http://evil.test/x"))
ask(proxy, head.replace("/x", "https://web.test/x"))
ask(proxy, head)
for extra in ("Host: web.test\r\n", "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", "A: b\r\n c\r\n",
              "A: b\nC: d\r\n", "Content-Length: 1\r\nContent-Length: 2\r\n", "A : b\r\n",
              "Content-Length: +1\r\n"):
    ask(name, ok + extra + "\r\n")
