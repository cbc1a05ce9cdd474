"""Owners: sources of mounts stay below a ceiling's, with links followed; each waiting sandbox is given out once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import Mount, Policy, PolicyError
from ringfence.manager.owner import Sources, WarmShelf


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("project/sub", "project/hidden/deep", "private"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "project"


def shown(*mounts: Mount) -> Policy:
    return Policy(mounts=mounts)


@pytest.mark.parametrize(
    ("leads_to", "key"),
    [("../private", "source"), ("hidden", "hide"), ("hidden/deep", "hide"), ("..", "source"), ("sub", None)],
)
def test_a_link_is_what_it_leads_to(project: Path, leads_to: str, key: str | None) -> None:
    sources = Sources(shown(Mount(project, "/p", "rw", hide=["hidden"])))
    (project / "link").symlink_to(leads_to)
    request = shown(Mount(project / "link", "/q"))
    if key is None:
        sources.check(request)
        return
    with pytest.raises(PolicyError) as caught:
        sources.check(request)
    assert (caught.value.key, caught.value.code) == (f"mounts[0].{key}", "mount-leads-out")
    assert str(project / "link") in str(caught.value)


def test_a_link_on_the_way_is_followed_too_and_modes_hold(project: Path) -> None:
    sources = Sources(shown(Mount(project, "/p", "rw"), Mount(project.parent / "private", "/r")))
    (project / "link").symlink_to("..")
    sources.check(shown(Mount(project / "link/private", "/q")))
    with pytest.raises(PolicyError, match="rw is more than ro"):
        sources.check(shown(Mount(project / "link/private", "/q", "rw")))


def test_a_ceiling_behind_a_link_is_compared_as_where_it_leads(project: Path) -> None:
    (project.parent / "current").symlink_to("project")
    sources = Sources(shown(Mount(project.parent / "current", "/p")))
    sources.check(shown(Mount(project.parent / "current/sub", "/q"), Mount(project / "sub", "/r")))


def test_a_source_of_the_ceiling_that_a_guest_replaced_is_refused(project: Path) -> None:
    ceiling = shown(Mount(project, "/p", "rw"), Mount(project / "sub", "/s", "rw"))
    sources = Sources(ceiling)
    sources.check(ceiling)
    (project / "sub").rmdir()
    (project / "sub").symlink_to("../private")
    with pytest.raises(PolicyError, match=r"mounts\[1\].source"):
        sources.check(ceiling)


def test_a_ceiling_above_holds_as_well(project: Path) -> None:
    above = Sources(shown(Mount(project, "/p", "rw")))
    (project / "link").symlink_to("../private")
    request = shown(Mount(project / "link", "/q"))
    with pytest.raises(PolicyError, match="is not shown"):
        Sources(request, above).check(request)


def test_one_that_is_taken_while_others_are_looked_at_does_not_come_back() -> None:
    shelf: WarmShelf[str] = WarmShelf()
    for one in ("a", "b", "c"):
        shelf.put(one)
    taken = []

    def is_over(one: str) -> bool:
        if one == "a":
            taken.append(shelf.take())
        return one in ("b", "c")

    shelf.drop(is_over)
    assert (taken, list(shelf), len(shelf)) == (["c"], ["a"], 1)
    assert (shelf.take(), shelf.take()) == ("a", None)
