"""A copy of a sandbox has the files and the memory of the original's sessions, and no tie to the original."""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from pathlib import Path

import pytest

import weaker
from accounts import OrdinaryUser
from programs import read_program
from ringfence import (
    Limits,
    Network,
    Policy,
    Sandbox,
    SandboxManager,
    Secret,
    Snapshot,
    SnapshotError,
    UnsupportedError,
)
from ringfence.backends.process.memory import capture as image
from ringfence.backends.process.memory.capture import MemoryImage
from ringfence.gateway.registration import Registration
from ringfence.gateway.types import Target
from ringfence.snapshots.model import sessions_of

ROOM = Policy(limits=Limits(memory="512M"))


def scans_pages() -> bool:
    release = os.uname().release.split(".")
    return (int(release[0]), int(release[1].partition("-")[0])) >= (6, 7)


def pid_of(box: Sandbox, name: str = "python") -> int:
    inbox = box.session(name)._inbox
    assert inbox is not None
    return inbox.pid


@weaker.needs_cgroup
def test_a_sandbox_that_was_paused_because_it_was_idle_is_copied_with_its_memory() -> None:
    """A session that cgroup v1 had frozen never stopped for the copy: fork() hung, and the session was killed."""
    with Sandbox(policy=Policy(limits=Limits(idle_s=0.3, on_idle="pause")), backend="process") as box:
        box.run("x = 1").check()
        while box.state != "paused":
            time.sleep(0.01)
        with box.fork() as copy:
            assert (copy.run("x").value, box.run("x + 1").value) == ("1", "2")


@pytest.mark.parametrize(
    ("name", "most", "code", "why"),
    [
        ("_MOST_RUNS", 5, "x = 1", "its memory is in more than 5 pieces"),
        ("_MOST_PATHS", 40, "held = [open(f'{n}' * 30, 'w') for n in range(3)]", "the paths of its open files"),
    ],
)
def test_a_session_of_more_pieces_or_names_than_are_kept_is_not_copied(
    name: str, most: int, code: str, why: str, box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, name, most)
    box.run(f"{code}\nx = 1").check()
    with pytest.raises(UnsupportedError, match=why):
        box.fork()
    assert box.run("x").value == "1"


def test_variables_imports_functions_and_files_are_in_the_copy(box: Sandbox) -> None:
    box.run(
        "import json, decimal, sqlite3\nx = {'a': [1, 2]}\ndef f(n): return n + len(x['a'])\n"
        "db = sqlite3.connect(':memory:'); db.execute('create table t (a)'); db.execute('insert into t values (7)')\n"
        "big = bytearray(20 << 20); big[-1] = 9"
    ).check()
    box.files.write("d/f.txt", "hello")
    with box.fork() as copy:
        assert copy.id != box.id
        code = "x['a'].append(3)\n(f(1), json.dumps(x), db.execute('select a from t').fetchall(), big[-1], len(big))"
        assert copy.run(code).value == "(4, '{\"a\": [1, 2, 3]}', [(7,)], 9, 20971520)"
        assert copy.files.read_text("d/f.txt") == "hello"
        copy.files.write("d/f.txt", "changed")
        copy.run("big[-1] = 1; import csv, threading; t = threading.Thread(target=print); t.start(); t.join()").check()
        assert (
            copy.run("import subprocess; subprocess.run(['echo', 'hi'], capture_output=True).stdout").value
            == "b'hi\\n'"
        )
        assert copy.exec(["cat", "d/f.txt"]).stdout == "changed"
    assert box.run("(f(1), big[-1])").value == "(3, 9)"
    assert box.files.read_text("d/f.txt") == "hello"


RANDOM = """
import json
values = random.random(), ssl.RAND_bytes(8), numpy.random.random(), uuid.uuid4(), secrets.token_hex(), tempfile.mktemp()
print(json.dumps([repr(value) for value in values]))
"""


WIPED = read_program("behaviour/forking_wiped.py")


def test_what_a_fork_wipes_is_wiped_in_a_copy_and_in_the_copys_own_children(box: Sandbox) -> None:
    box.run(WIPED).check()
    look = "(state[:4], plain[:4], seen_by_a_child(state), seen_by_a_child(plain))"
    empty = r"b'\x00\x00\x00\x00'"
    with box.fork() as copy, copy.fork() as of_the_copy:
        for one in (copy, of_the_copy):
            assert one.run(look).value == f"({empty}, b'kept', {empty}, b'kept')"
            assert one.run(f"state[:4] = b'anew'\n{look}").value == f"(b'anew', b'kept', {empty}, b'kept')"
    assert box.run(look).value == f"(b'seed', b'kept', {empty}, b'kept')"


def test_randomness_is_not_copied() -> None:
    with Sandbox(policy=ROOM) as box:
        box.run("import random, ssl, uuid, tempfile, secrets, numpy\nrandom.seed(7); numpy.random.seed(7)").check()
        with box.fork() as one, box.fork() as two:
            drawn = [json.loads(each.run(RANDOM).stdout) for each in (box, one, two)]
    assert [len(set(values)) for values in zip(*drawn, strict=True)] == [3] * 6


def test_no_copy_has_a_process_number_that_its_memory_had_before(box: Sandbox) -> None:
    """K05: OpenSSL notices a copy only by a new pid, also the OpenSSL in a wheel, which Ringfence cannot seed."""
    number = "import os; os.getpid()"
    seen = [box.run(number).value]
    with box.fork() as first:
        seen.append(first.run(number).value)
        with first.fork() as second, first.fork() as beside:
            seen.append(second.run(number).value)
            assert beside.run(number).value not in seen[:2]
            with second.fork() as third:
                seen.append(third.run(number).value)
    assert len(set(seen)) == 4


def test_neither_sees_nor_reaches_the_other(box: Sandbox) -> None:
    box.run("import os, signal\nsecret = 'original'").check()
    with box.fork() as copy:
        copy.run("secret = 'copy'").check()
        reach = """
import os, signal
found = []
for name in os.listdir('/proc'):
    if name.isdigit() and int(name) not in (1, os.getpid()):
        found.append(open(f'/proc/{name}/comm').read().strip())
for pid in range(2, 400):
    if pid != os.getpid():
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
sorted(set(found))
"""
        assert copy.run(reach).value in ("[]", "['rf-spawner']")
        assert box.run("secret").value == "'original'"
        assert box.run(reach).value in ("[]", "['rf-spawner']")
        assert copy.run("secret").value == "'copy'"
        inner, outer = (Path(f"/proc/{pid_of(each)}/ns") for each in (box, copy))
        names = ("pid", "mnt", "net", "ipc", "uts", "user") if os.geteuid() == 0 else ("pid", "mnt", "net")
        assert all(os.readlink(inner / name) != os.readlink(outer / name) for name in names)


def test_each_outlives_the_other() -> None:
    first = Sandbox().start()
    first.run("x = 1").check()
    second = first.fork()
    third = second.fork()
    second.close()
    assert (first.run("x").value, third.run("x").value) == ("1", "1")
    first.close()
    assert third.run("x + 1").value == "2"
    third.close()


def test_a_copy_can_make_no_namespaces(box: Sandbox) -> None:
    """The whole posture of a copy is compared with the golden file in attacks/test_posture."""
    box.run("1").check()
    with box.fork() as copy, copy.fork() as second:
        for each in (copy, second):
            call = "import ctypes; ctypes.CDLL(None, use_errno=True).unshare(0x10000000), ctypes.get_errno()"
            assert each.run(call).value == box.run(call).value == "(-1, 1)"


def test_fifty_generations(box: Sandbox) -> None:
    box.run("line = [0]").check()
    current, older = box.fork(), []
    for number in range(1, 50):
        current.run(f"line.append({number})").check()
        older.append(current)
        current = current.fork()
        if len(older) > 2:
            older.pop(0).close()
    assert current.run("line").value == str(list(range(50)))
    for each in (*older, current):
        each.close()
    assert box.run("line").value == "[0]"


def test_open_files_below_the_workspace_go_along_with_their_positions(box: Sandbox) -> None:
    box.run(
        "f = open('log', 'w+'); f.write('abc'); f.flush(); r = open('log'); r.read(1)\n"
        "import os; os.mkdir('d'); os.chdir('d')"
    ).check()
    with box.fork() as copy:
        assert (
            copy.run("f.write('d'); f.flush(); (r.read(), os.getcwd(), os.umask(0o22))").value
            == "('bcd', '/workspace/d', 18)"
        )
    assert box.files.read_text("log") == "abc"


def test_open_files_are_closed_on_exec_in_a_copy_as_in_the_original(box: Sandbox) -> None:
    """A copy opens descriptor 5 first, in the right place; the other descriptors are moved to their numbers."""
    box.run(
        "import os\nfiles = [open(name, 'w') for name in 'abcd']\nos.set_inheritable(files[1].fileno(), True)"
    ).check()
    look = "[(each.fileno(), os.get_inheritable(each.fileno())) for each in files]"
    box.run("files[2].close(); files.pop(2)").check()
    expected = "[(5, False), (6, True), (8, False)]"
    with box.fork() as copy:
        assert copy.run(look).value == box.run(look).value == expected


def test_signal_handlers_go_along(box: Sandbox) -> None:
    box.run("import signal, os\nseen = []\nsignal.signal(signal.SIGUSR1, lambda *a: seen.append(1))").check()
    with box.fork() as copy:
        assert copy.run("os.kill(os.getpid(), signal.SIGUSR1)\nseen").value == "[1]"
        with copy.session().spawn("import time; time.sleep(60)") as cell:
            time.sleep(0.2)
            assert copy.session().interrupt()
            assert cell.wait().state_kept
    assert box.run("seen").value == "[]"


NO_STACK = read_program("behaviour/forking_no_stack.py")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "2 threads"),
        ("import mmap\nm = mmap.mmap(-1, 4096)", "shares writable memory"),
        ("import socket\ns = socket.socket()", "socket:"),
        ("import os\np = os.pipe()", "pipe:"),
        ("import os\nf = open('/tmp/x', 'w')", "/tmp/x open as descriptor"),
        ("import os\nf = open('gone', 'w'); os.unlink('gone')", "a deleted file"),
        ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 100)", "a timer runs in it"),
        (NO_STACK, "its stack is not where"),
    ],
    ids=["threads", "memory", "socket", "pipe", "tmp", "deleted", "timer", "stack"],
)
def test_what_a_copy_could_not_have_is_refused_by_name_and_the_session_goes_on(
    box: Sandbox, code: str, why: str
) -> None:
    box.run(f"x = 1\n{code}").check()
    with pytest.raises(UnsupportedError, match=why):
        box.fork()
    assert box.run("x").value == "1"
    with box.fork(memory=False) as copy:
        assert copy.run("'x' in globals()").value == "False"


def test_a_running_cell_is_not_copied(box: Sandbox) -> None:
    with box.session().spawn("import time; time.sleep(60)"):
        time.sleep(0.1)
        with pytest.raises(UnsupportedError, match="a cell runs in it"):
            box.fork()


def test_a_snapshot_with_memory_makes_many_copies_and_takes_back(box: Sandbox) -> None:
    box.run("x = [1]").check()
    box.files.write("f", "one")
    snapshot = box.snapshot(memory=True)
    assert snapshot.memory
    box.run("x.append(2); open('f', 'w').write('two')").check()
    for _ in range(3):
        with Sandbox(snapshot=snapshot) as copy:
            assert copy.run("(x, open('f').read())").value == "([1], 'one')"
    box.rollback(snapshot)
    assert box.run("(x, open('f').read())").value == "([1], 'one')"
    with pytest.raises(SnapshotError, match="holds memory"):
        snapshot.export("x")
    snapshot.delete()
    with pytest.raises(SnapshotError, match="was deleted"):
        box.rollback(snapshot)


def test_several_sessions_are_copied_and_the_tools_stay() -> None:
    with Sandbox(tools={"double": lambda n: 2 * n}) as box:
        box.session("a").run("x = 1").check()
        box.session("b").run("x = 2").check()
        with box.fork() as copy:
            assert [s.name for s in copy.sessions()] == ["a", "b"]
            assert [copy.session(n).run("double(x)").value for n in ("a", "b")] == ["2", "4"]


def test_a_sandbox_that_has_run_nothing_is_copied_too(box: Sandbox) -> None:
    box.files.write("f", "x")
    with box.fork() as copy:
        assert copy.files.read("f") == b"x"


def test_a_copy_of_a_killed_session_starts_anew(box: Sandbox) -> None:
    box.run("x = 1").check()
    os.kill(pid_of(box), signal.SIGKILL)
    time.sleep(0.1)
    with box.fork() as copy:
        assert copy.run("'x' in globals()").value == "False"


@pytest.mark.parametrize("memory", [True, False])
def test_a_copy_has_the_rules_that_hold_now(memory: bool) -> None:
    with Sandbox(policy=Policy(network=Network(allow=["a.test"]))) as box:
        box.run("1").check()
        box.network.set(Network())
        with box.fork(memory=memory) as twin:
            code = "import socket\ntry: socket.getaddrinfo('a.test', 443)\nexcept OSError as error: print('refused')"
            assert twin.run(code).check().stdout == "refused\n"
            assert [denial.target for denial in twin.denials()] == ["a.test"]


def with_token(value: str = "sk-of-this-sandbox") -> Policy:
    return Policy(network=Network(allow=["a.test"]), secrets=[Secret("TOKEN", value, hosts=["a.test"])])


def knows_its_placeholder(copy: Sandbox) -> bool:
    """Return whether the gateway of a copy knows the placeholder in the copy's memory."""
    assert copy._box is not None
    assert copy._box.outlet is not None
    return copy.run("print(token)").stdout.strip() == copy._box.outlet.env["TOKEN"]


def test_a_copy_has_the_placeholders_that_its_memory_holds_however_it_was_made() -> None:
    policy = with_token()
    with Sandbox(policy=policy) as box, SandboxManager(policy=policy) as manager, manager.sandbox() as owned:
        for original in (box, owned):
            original.run("import os; token = os.environ['TOKEN']").check()
        start = box.snapshot(memory=True)
        with box.fork() as one, owned.fork() as two, Sandbox(policy=policy, snapshot=start) as three:
            assert [knows_its_placeholder(copy) for copy in (one, two, three)] == [True] * 3
            with pytest.raises(SnapshotError) as caught:
                owned.rollback(start)
            assert (caught.value.code, knows_its_placeholder(owned)) == ("snapshot-secrets", True)
            box.rollback(start)
            assert knows_its_placeholder(box)
        start.delete()


def test_a_copy_under_a_secret_of_another_value_never_sends_the_originals() -> None:
    """Two policies are equal whatever the values of their secrets."""
    with Sandbox(policy=with_token()) as box:
        box.run("import os; token = os.environ['TOKEN']").check()
        start = box.snapshot(memory=True)
        with Sandbox(policy=with_token("sk-of-somebody-else"), snapshot=start) as copy:
            assert copy._box is not None
            registration = copy._box.outlet
            assert isinstance(registration, Registration)
            asked = [(b"authorization", registration.env["TOKEN"].encode())]
            sent = registration.vault.swap(Target("a.test", 443, None), "/", asked, verified=True)
            assert (knows_its_placeholder(copy), sent) == (True, ("/", [(b"authorization", b"sk-of-somebody-else")]))
        start.delete()


def test_an_ordinary_user_forks_too(ordinary_user: OrdinaryUser) -> None:
    code = """
import warnings; warnings.simplefilter("ignore")
from ringfence import Sandbox
with Sandbox() as box:
    box.run("import json; x = [1]; y = bytearray(5 << 20)").check()
    with box.fork() as copy, copy.fork() as second:
        second.run("x.append(2)").check()
        print(box.run("x").value, copy.run("(x, len(y))").value, second.run("x").value)
"""
    done = ordinary_user.run(code)
    assert (done.stdout, done.returncode) == ("[1] ([1], 5242880) [1, 2]\n", 0), done.stderr


def test_a_copy_reaches_what_the_policy_allows() -> None:
    policy = Policy(network=Network(allow=["nowhere.invalid"]))
    with Sandbox(policy=policy) as box:
        box.run("x = 1").check()
        with box.fork() as copy:
            assert copy.run("x").value == "1"


SMALL = Policy(limits=Limits(memory="128M", disk="16M"))  # with /dev/shm 224 MiB in all


def held_bytes(snapshot: Snapshot) -> int:
    """Return the bytes of the host's memory that the images of a snapshot take."""
    return sum(os.fstat(each.memory.fd).st_blocks * 512 for each in sessions_of(snapshot))


@pytest.mark.skipif(not scans_pages(), reason="before Linux 6.7 pages of zeros cannot be told from others")
def test_pages_that_were_only_read_are_not_in_an_image() -> None:
    with Sandbox(policy=SMALL) as box:
        box.run(
            "import mmap\nsize = 512 << 20\n"
            "m = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)\n"
            "sum(m[at] for at in range(0, size, 4096))"
        ).check()
        made = box.snapshot(memory=True)
        assert made.size_bytes < 64 << 20
        with Sandbox(policy=SMALL, snapshot=made) as copy:
            assert copy.run("sum(m[at] for at in range(0, size, 1 << 20))").value == "0"
        made.delete()


def test_zeros_take_no_room_in_an_image(box: Sandbox) -> None:
    box.run("import mmap\nm = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)").check()
    box.run("for at in range(0, len(m), 1 << 20): m[at:at + (1 << 20)] = bytes(1 << 20)\nm[40 << 20] = 7").check()
    made = box.snapshot(memory=True)
    assert made.size_bytes > 64 << 20 > held_bytes(made)
    box.rollback(made)
    assert box.run("(m[40 << 20], m[:] == bytes(40 << 20) + b'\\7' + bytes((24 << 20) - 1))").value == "(7, True)"
    made.delete()


def test_a_guests_file_in_memory_is_not_taken_for_ours_by_its_name() -> None:
    with Sandbox(policy=SMALL) as box:
        box.run(
            "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
            "fd = os.memfd_create('ringfence-memory'); os.ftruncate(fd, 8 << 20)\n"
            "for _ in range(8): libc.mmap(None, ctypes.c_size_t(8 << 20), 1, 2, fd, ctypes.c_long(0))\n"
            "os.close(fd)"
        ).check()
        with pytest.raises(UnsupportedError, match="it maps a file in memory"):
            box.snapshot(memory=True)
        assert box.run("1").value == "1"


@weaker.needs_cgroup
def test_an_image_is_no_larger_than_the_sandboxs_limit() -> None:
    """Pages that a copy has not written to count in no limit: copies of copies, each with new memory, would grow."""
    with Sandbox(policy=SMALL) as box:
        box.run("x = b'x' * (110 << 20)").check()
        with box.fork() as copy:
            copy.run("y = b'x' * (110 << 20)").check()
            with pytest.raises(UnsupportedError, match="more than the sandbox's limits leave") as refused:
                copy.fork()
            assert refused.value.code == "fork"
            copy.run("del x").check()
            with copy.fork() as second:
                assert second.run("len(y)").value == str(110 << 20)


@weaker.needs_cgroup
def test_the_images_of_all_sessions_are_in_one_limit() -> None:
    with Sandbox(policy=SMALL) as box:
        for name in ("a", "b"):
            box.session(name).run("import random\nx = random.randbytes(60 << 20)").check()
        with box.fork() as copy:
            for name in ("a", "b"):
                copy.session(name).run("y = random.randbytes(55 << 20)").check()
            with pytest.raises(UnsupportedError, match="session b cannot be copied: its memory is more than"):
                copy.fork()


GIVES_BACK = read_program("behaviour/forking_gives_back.py")


def test_what_the_original_gave_back_is_not_the_zygotes_in_a_copy(box: Sandbox) -> None:
    """A page of the zygote's that the session gave back: zeros, as what calloc hands out may be."""
    assert box.run(GIVES_BACK).value == "True"
    empty = "ctypes.string_at(page, 4096) == bytes(4096)"
    with box.fork() as copy:
        assert copy.run(empty).value == box.run(empty).value == "True"


def test_an_interrupt_on_its_way_through_a_copy_stays_an_interrupt() -> None:
    image = MemoryImage(None)
    image.view = mmap.mmap(-1, 4096)
    with memoryview(image.view):  # as the traceback of what interrupted holds it
        image.close()
    assert image.view is None
