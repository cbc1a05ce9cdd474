"""Knows which host paths hold credentials, sockets of services or other accounts' files, so that no mount shows them.

Paths are known by name and place, trees are not read: a project's own `.env` is not found here (`hide` is for that).
"""

from __future__ import annotations

import os
import stat

from ringfence.shared.paths import is_within
from ringfence.values import Struct, final

# Paths below a home directory that hold what a person would not paste into a chat.
_IN_HOME = (
    (".ssh", "SSH keys"),
    (".gnupg", "GnuPG keys"),
    (".aws", "AWS credentials"),
    (".azure", "Azure credentials"),
    (".oci", "Oracle Cloud credentials"),
    (".config/gcloud", "Google Cloud credentials"),
    (".kube", "Kubernetes credentials"),
    (".docker", "registry credentials"),
    (".config/containers/auth.json", "registry credentials"),
    (".config/gh", "GitHub tokens"),
    (".config/glab-cli", "GitLab tokens"),
    (".config/hub", "GitHub tokens"),
    (".netrc", "passwords"),
    (".git-credentials", "git passwords"),
    (".config/git/credentials", "git passwords"),
    (".npmrc", "npm tokens"),
    (".pypirc", "PyPI tokens"),
    (".cargo/credentials", "crates tokens"),
    (".cargo/credentials.toml", "crates tokens"),
    (".gem/credentials", "gem tokens"),
    (".m2/settings.xml", "Maven passwords"),
    (".terraform.d/credentials.tfrc.json", "Terraform tokens"),
    (".vault-token", "a Vault token"),
    (".pgpass", "database passwords"),
    (".my.cnf", "database passwords"),
    (".password-store", "passwords"),
    (".local/share/keyrings", "a keyring"),
    (".local/share/kwalletd", "a keyring"),
    (".config/1Password", "passwords"),
    (".config/Bitwarden", "passwords"),
    (".claude/.credentials.json", "an agent's tokens"),
    (".claude.json", "an agent's tokens"),
    (".codex/auth.json", "an agent's tokens"),
    (".huggingface", "Hugging Face tokens"),
    (".cache/huggingface/token", "a Hugging Face token"),
    (".mozilla", "a browser profile"),
    (".thunderbird", "a mail profile"),
    (".config/google-chrome", "a browser profile"),
    (".config/chromium", "a browser profile"),
    (".config/BraveSoftware", "a browser profile"),
    (".config/microsoft-edge", "a browser profile"),
    ("snap/firefox", "a browser profile"),
)

_ON_HOST = (
    ("/etc/shadow", "password hashes"),
    ("/etc/gshadow", "password hashes"),
    ("/etc/sudoers", "sudo rules"),
    ("/etc/sudoers.d", "sudo rules"),
    ("/etc/ssh", "the host's SSH keys"),
    ("/etc/ssl/private", "private keys"),
    ("/etc/pki/tls/private", "private keys"),
    ("/etc/letsencrypt", "private keys"),
    ("/etc/wireguard", "private keys"),
    ("/etc/krb5.keytab", "Kerberos keys"),
    ("/etc/kubernetes", "Kubernetes credentials"),
    ("/etc/rancher", "Kubernetes credentials"),
    ("/etc/NetworkManager/system-connections", "network passwords"),
    ("/run/secrets", "secrets of a container"),
    ("/var/run/secrets", "secrets of a container"),
    ("/var/lib/docker", "containers of the host"),
    ("/var/lib/containerd", "containers of the host"),
    ("/var/lib/containers", "containers of the host"),
    ("/var/lib/kubelet", "secrets of pods"),
)
_SOCKET_PLACES = ("/run", "/tmp", "/var/tmp")  # of every service and user; a user's own folder below /tmp is fine
_SOCKET_FREE = "/run/media"  # where desktops mount removable disks
_KEY_FILES = ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk")
_KEY_ENDINGS = (".pem", ".key", ".p8", ".ppk")  # only when the text says so: most .pem files are certificates
_KEY_MARKS = (b"PRIVATE KEY-----", b"PuTTY-User-Key-File")
_SCANNED = 256


@final
class Holding(Struct):
    """A path that no guest should get, and what is there."""

    path: str
    what: str


def holds_credentials(path: str, home: str) -> str | None:
    """Return why `path` must not be shown, in words that follow its name; None where no credentials are known.

    `path` is real and absolute.
    """
    found = holdings(path, home)
    if not found:
        return None
    first = found[0]
    if is_within(path, first.path):
        return f"holds {first.what}"
    names = ", ".join(sorted({os.path.relpath(one.path, path) for one in found})[:6])
    return f"holds {first.what} (found: {names})"


def holdings(path: str, home: str) -> tuple[Holding, ...]:
    """Return the credentials and sockets that exist at, above or below `path`.

    Calls stat for about 50 paths for each home below.
    """
    places = [Holding(place, what) for place, what in _ON_HOST]
    for directory in homes(home):
        if is_within(path, directory) or is_within(directory, path):
            places += [Holding(f"{directory}/{name}", what) for name, what in _IN_HOME]
    found = [place for place in places if _touches(path, place.path)]
    return (*found, *_key_file(path), *_sockets(path))


def homes(home: str) -> tuple[str, ...]:
    """Return every home directory that can be named: the caller's, root's, and all below /home."""
    try:
        others = [f"/home/{name}" for name in sorted(os.listdir("/home"))[:_SCANNED]]
    except OSError:
        others = []
    named = [os.path.normpath(home), os.path.realpath(home), "/root", *others]
    return tuple(dict.fromkeys(path for path in named if path not in ("/", "//")))


def contains_home(path: str, home: str) -> str | None:
    """Return the home directory that `path` is or contains; None when there is none."""
    return next((one for one in homes(home) if is_within(one, path) and os.path.isdir(one)), None)


def _touches(path: str, place: str) -> bool:
    """Return whether `path` is in `place` by name, or contains `place`, which exists.

    A place that is a link also counts where the link leads.
    """
    if is_within(path, place):
        return True
    if is_within(place, path):
        return os.path.lexists(place)
    return os.path.islink(place) and is_within(path, os.path.realpath(place))


def _key_file(path: str) -> tuple[Holding, ...]:
    name = os.path.basename(path)
    if name in _KEY_FILES and os.path.isfile(path):
        return (Holding(path, "a private key"),)
    if name.endswith(_KEY_ENDINGS) and os.path.isfile(path):
        try:
            with open(path, "rb") as file:
                head = file.read(4096)
        except OSError:
            return ()
        if any(mark in head for mark in _KEY_MARKS):
            return (Holding(path, "a private key"),)
    return ()


def _sockets(path: str) -> tuple[Holding, ...]:
    if path in _SOCKET_PLACES or (is_within(path, "/run") and not is_within(path, _SOCKET_FREE)):
        return (Holding(path, "sockets and files of other programs"),)
    if is_within("/run", path):
        return (Holding("/run", "sockets of the host's services"),)
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            return (Holding(path, "a socket"),)
    except OSError:
        return ()
    found = {one.path: one for one in (*_bound_below(path), *_first_entries(path))}
    return tuple(found[name] for name in sorted(found))


def _first_entries(path: str) -> list[Holding]:
    """Return the sockets and named pipes among the first entries of a folder.

    A read-only mount does not help against either: a guest that may open one connects and writes all the same.
    """
    found: list[Holding] = []
    try:
        with os.scandir(path) as entries:
            for count, entry in enumerate(entries):
                if count >= _SCANNED:
                    break
                if entry.is_symlink() or entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
                    continue  # known from the listing, without stat
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                    found.append(Holding(entry.path, "a socket" if stat.S_ISSOCK(mode) else "a named pipe"))
    except OSError:
        return found
    return found


def _bound_below(path: str) -> list[Holding]:
    """Return the sockets that are bound at any depth below `path`, from the kernel's list; no folder is read.

    The list lacks sockets bound by a relative name or in another network namespace.
    """
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
            names = {line.rstrip("\n").split(None, 7)[-1] for line in file}
    except OSError:
        return []
    split = [os.path.split(name) for name in names if name.startswith("/")]
    real_folder = {folder: os.path.realpath(folder) for folder, _ in split}  # once for all sockets of a folder
    real = (os.path.join(real_folder[folder], name) for folder, name in split)
    return [Holding(name, "a socket") for name in real if is_within(name, path) and _is_socket(name)]


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False
