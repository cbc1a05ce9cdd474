"""Hypothesis strategies for valid policies."""

from __future__ import annotations

from hypothesis import strategies as st

from ringfence.policy import Limits, Mount, Network, Policy, Rule
from ringfence.policy.hosts import parse_pattern
from ringfence.policy.model import mount_path
from ringfence.policy.secrets import deferred

LABEL = st.from_regex(r"[a-z]([a-z0-9]{0,6}[a-z])?", fullmatch=True)
NAME = st.builds("{}.{}".format, LABEL, LABEL).filter(lambda name: not name.endswith("localhost"))
HOST = st.builds("{}{}{}".format, st.sampled_from(["", "*."]), NAME, st.sampled_from(["", ":443", ":8443"]))
SIZE = st.integers(min_value=1, max_value=1 << 40)
SECONDS = st.one_of(st.integers(1, 10**6), st.floats(0.001, 10**6, allow_nan=False))
COUNT = st.integers(1, 10**5)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
PART = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=8).filter(
    lambda part: part not in (".", "..")
)
VARIABLE = st.from_regex(r"[A-Za-z_.-][A-Za-z0-9_. -]{0,8}", fullmatch=True)
SECRET_NAME = st.from_regex(r"S[A-Z0-9_]{0,8}", fullmatch=True)

limits = st.builds(
    Limits,
    timeout_s=SECONDS,
    cpu_time_s=SECONDS,
    cpus=st.floats(0.01, 64),
    memory=SIZE,
    processes=COUNT,
    open_files=COUNT,
    disk=SIZE,
    disk_files=COUNT,
    output=SIZE,
    lifetime_s=SECONDS,
    idle_s=SECONDS,
    on_idle=st.sampled_from(["close", "pause"]),
)
rules = st.builds(
    Rule,
    st.builds("r.{}".format, NAME),
    methods=st.lists(st.sampled_from(["GET", "HEAD", "POST"]), unique=True),
    paths=st.lists(st.sampled_from(["/", "/v1/", "/a%20b"]), unique=True),
)
networks = st.builds(
    Network,
    allow=st.one_of(st.just("public"), st.lists(HOST, unique=True, max_size=4)),
    rules=st.lists(rules, unique_by=lambda rule: rule.host, max_size=2),
    deny=st.lists(HOST, unique=True, max_size=3),
    ports=st.lists(st.integers(1, 65535), unique=True, min_size=1, max_size=3),
    private=st.lists(st.sampled_from(["10.0.0.0/8", "192.168.1.0/24", "fd12::/16"]), unique=True),
    connections=st.integers(1, 1000),
    upload=SIZE,
    download=SIZE,
)
mounts = st.builds(
    Mount,
    st.builds("/srv/{}/{}".format, PART, PART),
    target=st.one_of(st.none(), st.builds("/mnt/{}".format, PART)),
    mode=st.sampled_from(["ro", "rw", "copy"]),
    hide=st.lists(PART, unique=True, max_size=2),
    protect=st.lists(PART, unique=True, max_size=2),
    credentials=st.booleans(),
)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Draw a policy whose secrets could be written to a file."""
    network = draw(networks)
    denied = [parse_pattern(entry) for entry in network.deny]
    hosts = [] if network.allow == "public" else list(network.allow)
    hosts = [host for host in hosts if not any(entry.covers(parse_pattern(host)) for entry in denied)]
    names = draw(st.lists(SECRET_NAME, unique=True, max_size=2)) if hosts else []
    secrets = [deferred(name, hosts=[draw(st.sampled_from(hosts))], from_env=name) for name in names]
    env = draw(st.dictionaries(VARIABLE, TEXT, max_size=3))
    return Policy(
        limits=draw(limits),
        network=network,
        mounts=draw(st.lists(mounts, unique_by=mount_path, max_size=3)),
        commands=draw(st.one_of(st.just("any"), st.just(["git", "python3"]))),
        env={name: value for name, value in env.items() if name not in names},
        secrets=secrets,
        isolation=draw(st.sampled_from(["runtime", "shared-kernel", "own-kernel"])),
        strict=draw(st.booleans()),
    )
