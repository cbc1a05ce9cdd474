"""Libraries that agents' programs use work under the default policy, with the caller's own packages."""

from __future__ import annotations

import ringfence
from programs import read_program
from ringfence import Limits, Policy
from ringfence.backends import Backend


def ok(code: str, backend: Backend | None = None, policy: Policy | None = None) -> str:
    result = ringfence.run(code, backend=backend or "process", policy=policy or Policy())
    assert result.status == "ok", result.render()
    return result.stdout


def test_numpy_computes_and_sees_one_cpu(backend: Backend) -> None:
    code = """
import os, numpy as np
a = np.random.rand(300, 300)
print(np.allclose(a @ np.linalg.inv(a), np.eye(300), atol=1e-3), len(os.sched_getaffinity(0)), os.cpu_count() >= 1)
print(len(os.listdir("/proc/self/task")))
"""
    assert ok(code, backend) == "True 1 True\n1\n"


def test_more_cpus_are_visible_when_the_policy_pays_for_them() -> None:
    import os

    code = "import os\nprint(len(os.sched_getaffinity(0)))"
    expected = min(2, len(os.sched_getaffinity(0)))
    assert ok(code, policy=Policy(limits=Limits(cpus=2))) == f"{expected}\n"
    assert ok(code, policy=Policy(limits=Limits(cpus=1.5))) == f"{expected}\n"
    assert ok(code, policy=Policy(limits=Limits(cpus=0.5))) == "1\n"


def test_pandas_reads_groups_and_writes() -> None:
    code = """
import pandas as pd
df = pd.DataFrame({"k": ["a", "b", "a"], "v": [1, 2, 3]})
df.to_csv("out.csv", index=False)
print(pd.read_csv("out.csv").groupby("k").v.sum().to_dict())
"""
    assert ok(code) == "{'a': 4, 'b': 2}\n"


def test_matplotlib_draws_without_a_screen() -> None:
    code = """
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
plt.plot([1, 4, 9]); plt.savefig("p.png")
print(open("p.png", "rb").read(4))
"""
    assert ok(code) == "b'\\x89PNG'\n"


def test_sqlite_keeps_tables_in_memory_and_in_files() -> None:
    code = """
import sqlite3
for name in (":memory:", "/workspace/a.db"):
    c = sqlite3.connect(name)
    c.execute("pragma journal_mode=wal")
    c.execute("create table t(x)"); c.executemany("insert into t values (?)", [(i,) for i in range(100)]); c.commit()
    print(c.execute("select sum(x) from t").fetchone())
"""
    assert ok(code) == "(4950,)\n(4950,)\n"


def test_asyncio_runs_tasks_subprocesses_and_local_servers() -> None:
    code = read_program("behaviour/libraries_asyncio.py")
    assert ok(code) == "b'HELLO\\n'\nb'hi\\n'\n[0, 1, 2]\n"


def test_threads_locks_queues_and_shared_memory_work() -> None:
    code = """
import queue, threading
from multiprocessing import shared_memory, Lock, Value
q = queue.Queue()
ts = [threading.Thread(target=lambda i=i: q.put(i)) for i in range(50)]
[t.start() for t in ts]; [t.join() for t in ts]
s = shared_memory.SharedMemory(create=True, size=1 << 20); s.buf[0] = 7; v = s.buf[0]; s.close(); s.unlink()
n = Value("i", 3)
with n: n.value += 1
print(sorted(q.queue) == list(range(50)), v, n.value)
"""
    assert ok(code) == "True 7 4\n"


def test_subprocesses_with_pipes_shells_and_timeouts_work() -> None:
    code = """
import subprocess
print(subprocess.check_output("printf '%s\\n' b a | sort", shell=True, text=True).split())
try:
    subprocess.run(["sleep", "9"], timeout=0.1)
except subprocess.TimeoutExpired:
    print("timeout")
p = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(p.communicate(b"x" * 200_000)[0].count(b"x"))
"""
    assert ok(code) == "['a', 'b']\ntimeout\n200000\n"


def test_temporary_files_compression_and_archives_work() -> None:
    code = """
import bz2, gzip, io, lzma, tarfile, tempfile, zipfile, zlib
for m in (bz2, gzip, lzma, zlib): assert m.decompress(m.compress(b"x" * 999)) == b"x" * 999
with tempfile.TemporaryDirectory() as d, tempfile.NamedTemporaryFile() as f, tempfile.TemporaryFile() as g:
    f.write(b"a"); g.write(b"b"); print(d.startswith("/tmp/"))
z = zipfile.ZipFile("a.zip", "w"); z.writestr("n", "text"); z.close()
print(zipfile.ZipFile("a.zip").read("n"))
"""
    assert ok(code) == "True\nb'text'\n"


def test_time_zones_locales_names_and_hashes_work() -> None:
    code = """
import datetime, getpass, hashlib, locale, os, platform, pwd, socket, ssl, zoneinfo
print(zoneinfo.ZoneInfo("Europe/Berlin").utcoffset(datetime.datetime(2024, 7, 1)))
print(getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name, locale.getpreferredencoding(), platform.system())
print(socket.gethostname(), hashlib.scrypt(b"a", salt=b"b", n=2, r=1, p=1).hex()[:4] != "", ssl.OPENSSL_VERSION != "")
"""
    assert ok(code).lower() == "2:00:00\nuser user utf-8 linux\nringfence true true\n"


def test_signals_timers_and_event_descriptors_work() -> None:
    code = """
import os, select, signal, threading
got = []
signal.signal(signal.SIGALRM, lambda *a: got.append("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.02); signal.pause()
fd = os.eventfd(1); print(os.eventfd_read(fd), got)
r, w = os.pipe(); e = select.epoll(); e.register(r); e.close()
os.write(w, b"x"); print(select.select([r], [], [], 1)[0] == [r])
"""
    assert ok(code) == "1 ['alarm']\nTrue\n"


def test_memory_maps_ctypes_and_resource_numbers_work() -> None:
    code = """
import ctypes, mmap, resource
m = mmap.mmap(-1, 1 << 20); m[:3] = b"abc"
open("f", "wb").write(b"file"); h = open("f", "r+b"); f = mmap.mmap(h.fileno(), 0)
print(m[:3], f[:], ctypes.CDLL(None).abs(-3), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    assert ok(code) == "b'abc' b'file' 3 1024\n"


def test_there_is_no_network_and_names_do_not_resolve() -> None:
    code = """
import socket
for what in (lambda: socket.create_connection(("192.0.2.1", 80), 2), lambda: socket.getaddrinfo("example.com", 80)):
    try: what(); print("reached")
    except OSError as e: print(type(e).__name__)
"""
    lines = ok(code).split()
    assert "reached" not in lines
    assert len(lines) == 2
