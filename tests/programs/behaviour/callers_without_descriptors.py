import errno, os, resource, ringfence
from ringfence.backends.process import pool
def held(): pool.close_all(); return len(os.listdir("/proc/self/fd"))
ringfence.run("1")
before = held()
resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
said = set()
for free in range(1, 12):
    taken = []
    try:
        while True: taken.append(os.dup(0))
    except OSError: pass  # the table is full, as intended
    for _ in range(free): os.close(taken.pop())
    try: said.add(ringfence.run("1").backend)
    except OSError as error: said.add(errno.errorcode[error.errno])
    for fd in taken: os.close(fd)
print(said - {"process"}, held() - before, ringfence.run("6 * 7").value)
