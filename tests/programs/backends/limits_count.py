import json, os, time
told, n = {}, 0
makes = (lambda name: os.close(os.open(name, os.O_CREAT | os.O_WRONLY)), os.mkdir, lambda name: os.symlink("x", name))
try:
    while n < 200:
        makes[n % 3](f"f{n}"); n += 1
except OSError as error:
    told["names"] = [n, error.strerror]
fd, n = os.open("f0", os.O_WRONLY), 0
try:
    while n < 8 << 20:
        n += os.write(fd, b"x" * 65536)
except OSError as error:
    told["bytes"] = [n, error.strerror]
n = 0
try:
    while n < 100:
        if os.fork() == 0:
            time.sleep(30); os._exit(0)
        n += 1
except OSError as error:
    told["processes"] = [n + 1, error.strerror]
print(json.dumps(told))
