import socket, sys, threading
from ringfence import Network, Policy, Rule, Sandbox
from ringfence.gateway.service import service
listener = socket.create_server(("127.0.0.1", 0)); port = listener.getsockname()[1]
def serve():
    while True:
        connection = listener.accept()[0]
        connection.sendall(b"hello " + connection.recv(100)); connection.close()
threading.Thread(target=serve, daemon=True).start()
service().resolver.lookup = lambda name, port: ["127.0.0.1"]
network = Network(allow=["web.test"], rules=[Rule(f"tcp.test:{port}", protocol="tcp")], private=["127.0.0.0/8"])
code = f'''
import socket, urllib.request
sock = socket.create_connection(("tcp.test", {port})); sock.send(b"you"); print(sock.recv(100))
try: urllib.request.urlopen("https://evil.test")
except OSError as error: print(error)
try: socket.create_connection(("evil.test", 443))
except OSError as error: print(error.__class__.__name__)
'''
with Sandbox(policy=Policy(network=network)) as box:
    result = box.run(code)
    print(result.stdout, [(d.target, d.code) for d in result.denials], result.stderr)
