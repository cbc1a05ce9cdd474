"""Agents' ids: what is one, and the folder that keeps what an agent owns."""

from __future__ import annotations

from ringfence.errors import PolicyError

_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789._-")
_MOST = 64
_PREFIX = "agent-"


def check_agent(agent: object) -> str:
    """Raises PolicyError for what is no id."""
    if not isinstance(agent, str):
        raise TypeError(f"an agent's id is a str, not {type(agent).__name__}")
    if not 0 < len(agent) <= _MOST or not _LETTERS.issuperset(agent):
        shown = repr(agent if len(agent) <= _MOST else agent[:_MOST] + "…")
        fix = f"1 to {_MOST} of a-z, 0-9, `.`, `_` and `-`"
        raise PolicyError(f"{shown} is no agent's id", key="agent", code="agent-id", fix=fix)
    return agent


def folder_of(agent: str) -> str:
    """One name of a directory. `.` and `..` are ids as any other: what stands before makes them harmless."""
    return _PREFIX + check_agent(agent)


def agent_of(folder: str) -> str | None:
    """The agent that a folder belongs to; None when it is none of ours."""
    agent = folder.removeprefix(_PREFIX)
    if agent == folder or not 0 < len(agent) <= _MOST or not _LETTERS.issuperset(agent):
        return None
    return agent
