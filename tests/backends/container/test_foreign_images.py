"""Foreign images and containers in the same engine that have Ringfence's names or labels."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends import Container
from ringfence.backends.container import api as engines
from ringfence.backends.container import sweep
from ringfence.host import process_id

Import = Callable[[bytes, list[str], str], str]


@pytest.fixture
def api(contained: Container) -> Any:
    return engines.find(contained.engine, contained.socket).api


@pytest.fixture
def imported(api: Any) -> Iterator[Import]:
    """Return a function that imports a foreign image with given settings under a name, and returns the image's id."""
    made: list[str] = []

    def make(data: bytes, says: list[str], name: str) -> str:
        said = api.import_image_from_data(data, repository="stranger", tag="1", changes=says)
        identity = str(json.loads(str(said).strip().rpartition("\n")[2])["status"])
        made.append(identity)
        api.tag(identity, *name.split(":"), force=True)
        return identity

    yield make
    for identity in made:
        api.remove_image(identity, force=True)


def a_root() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        entry = tarfile.TarInfo("data")
        entry.type, entry.mode = tarfile.DIRTYPE, 0o777
        tar.addfile(entry)
    return file.getvalue()


def test_a_container_whose_image_has_our_label_is_not_removed_by_a_start(
    contained: Container, api: Any, imported: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has the labels of its image: an image could have had the containers of every user removed."""
    dead = f"1-1-{process_id.pid_namespace()}"
    assert process_id.is_dead(dead)
    identity = imported(a_root(), [f"LABEL ringfence.owner={dead}", "VOLUME /data"], "stranger:2")
    mine = api.create_container(identity, command=["/it"], name="of-somebody-else")["Id"]
    old = api.create_container(identity, command=["/it"], name="ringfence-1-0badcafe")["Id"]
    monkeypatch.setattr(sweep, "_swept", set())
    try:
        with Sandbox(backend=contained):
            left = [one["Id"] for one in api.containers(all=True) if one["Id"] in (mine, old)]
        assert left == [mine]
    finally:
        sweep.remove(engines.find(contained.engine, contained.socket), mine)


def test_an_image_that_was_loaded_under_the_name_of_ours_is_not_used(
    contained: Container, api: Any, imported: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image's variables would be guestd's, LD_PRELOAD among them, and its volume a disk without a limit."""
    engine = engines.find(contained.engine, contained.socket)
    roots: list[bytes] = []
    tar = sweep._tar  # a stranger that reads the source can make the same

    def noted(made: Any) -> bytes:
        roots.append(tar(made))
        return roots[-1]

    monkeypatch.setattr(sweep, "_tar", noted)
    monkeypatch.setattr(sweep, "_known", {})
    with Sandbox(backend=contained):
        (genuine,) = sweep._known.values()  # what it was made of
    name = f"ringfence-skeleton:{hashlib.sha256(roots[-1]).hexdigest()[:24]}"
    says = ["ENV LD_PRELOAD=/evil.so", "VOLUME /srv"]
    for data, words in ((roots[-1], says), (a_root(), [])):
        assert imported(data, words, name) != genuine
        sweep.forget(engine)
        with Sandbox(backend=contained) as box:
            (running,) = (one for one in api.containers() if "ringfence.owner" in (one.get("Labels") or {}))
            found = api.inspect_container(running["Id"])
            assert [word for word in found["Config"]["Env"] if "LD_PRELOAD" in word] == []
            assert "/srv" not in [mount["Destination"] for mount in found["Mounts"]]
            assert box.run("6 * 7").value == "42"
