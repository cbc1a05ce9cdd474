import socket, sys, json
from concurrent.futures import ThreadPoolExecutor
def ask(asked):
    at, data = asked
    sock = socket.create_connection(tuple(at)); sock.settimeout(20)
    sock.sendall(data.encode())
    answer = b""
    try:
        while more := sock.recv(65536): answer += more
    except OSError as error: answer += error.__class__.__name__.encode()
    return answer.decode()
print(json.dumps(list(ThreadPoolExecutor(12).map(ask, json.loads(sys.stdin.readline())))))
