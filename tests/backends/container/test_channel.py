"""The socket by which guestd connects: a peer without the key is refused, and a guest finds no socket there later."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator

import pytest

from ringfence import Limits, Policy, Sandbox
from ringfence.backends import Container
from ringfence.backends.container import channel as door

WITHIN_S = 30.0


@pytest.fixture
def way() -> Iterator[door.Door]:
    made = door.Door()
    yield made
    made.close()


def path(way: door.Door) -> str:
    return f"{way.mounts()[0]['Source']}/{way.env['RINGFENCE_DOOR'].rpartition('/')[2]}"


def came(way: door.Door, *words: bytes) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(path(way))
    for word in words:
        client.sendall(word)
    return client


def test_who_says_the_key_is_let_in_and_who_says_another_is_sent_away(way: door.Door) -> None:
    key = way.env["RINGFENCE_KEY"].encode()
    impostors = [came(way, b"x" * len(key))]
    opened: list[socket.socket | None] = []
    waiting = threading.Thread(target=lambda: opened.append(way.wait(time.monotonic() + WITHIN_S, os.getuid())))
    waiting.start()
    assert impostors[0].recv(1) == b""
    impostors.append(came(way, key[:5]))
    impostors[1].shutdown(socket.SHUT_WR)
    assert impostors[1].recv(1) == b""
    with came(way, key[:7]) as guestd:
        time.sleep(0.1)  # the rest comes later, and is waited for
        guestd.sendall(key[7:])
        waiting.join()
        (channel,) = opened
        assert channel is not None
        with channel:
            channel.sendall(b"welcome")
            assert guestd.recv(7) == b"welcome"
    for impostor in impostors:
        impostor.close()


def test_another_user_is_sent_away_though_he_knows_the_key(way: door.Door) -> None:
    with came(way, way.env["RINGFENCE_KEY"].encode()) as client:
        assert way.wait(time.monotonic() + 1.0, os.getuid() + 1) is None
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_a_wait_for_nobody_is_given_up_from_another_thread(way: door.Door) -> None:
    threading.Timer(0.1, way.give_up).start()
    begun = time.monotonic()
    assert way.wait(begun + WITHIN_S, None) is None
    assert time.monotonic() - begun < WITHIN_S / 2


def test_it_is_for_its_owner_alone_and_nothing_of_it_stays() -> None:
    way = door.Door()
    folder = os.path.dirname(path(way))
    assert stat.S_IMODE(os.stat(os.path.dirname(folder)).st_mode) == 0o700
    way.close()
    assert not os.path.exists(folder)


LOOKS = """
import os
print(os.listdir('/.ringfence-door'), [name for name in os.environ if name.startswith('RINGFENCE')])
try:
    open('/proc/1/environ').read()
except PermissionError:
    print('refused')
"""


def test_a_guest_finds_an_empty_folder_and_no_key(contained: Container) -> None:
    with Sandbox(backend=contained) as box:
        assert box.exec(["python3", "-c", LOOKS]).stdout.splitlines() == ["[] []", "refused"]


def test_megabytes_both_ways_at_once_arrive_whole(contained: Container) -> None:
    """Podman's attached stream does not carry this."""
    much = os.urandom(1 << 20) * 24
    with Sandbox(backend=contained, policy=Policy(limits=Limits(output="32M"))) as box:
        result = box.exec(["cat"], stdin=much)
    assert (result.status, result.stdout_bytes == much) == ("ok", True)


def test_containers_of_a_runtime_with_a_kernel_of_its_own_have_no_door() -> None:
    told = {name: door.leads_into(name) for name in ("runc", "crun", "/usr/bin/crun", "runsc", "kata-runtime", "")}
    assert told == {"runc": True, "crun": True, "/usr/bin/crun": True, "runsc": False, "kata-runtime": False, "": False}
    others = ("runsc-kvm", "io.containerd.kata.v2", "io.containerd.runc.v2", "nvidia", "")
    assert {name: (door.leads_into(name), door.has_own_kernel(name)) for name in others} == {
        "runsc-kvm": (False, True),
        "io.containerd.kata.v2": (False, True),
        "io.containerd.runc.v2": (True, False),
        "nvidia": (False, False),
        "": (False, False),
    }
