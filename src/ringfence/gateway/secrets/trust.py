"""The files and variables by which programs inside a sandbox accept its own certificate authority.

The guest may change the files. That harms only the guest, as the server's certificate is checked outside. This module
needs no package; `ca`, which signs, needs `cryptography`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfence.errors import Missing, UnsupportedError
from ringfence.host import import_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.gateway.secrets.ca import Authority
    from ringfence.policy.model import Network
    from ringfence.policy.secrets import Secret

BUNDLE = "/tmp/.ringfence/ca-bundle.pem"  # inside
JAVA_STORE = "/tmp/.ringfence/ca-bundle.p12"
WGET_SETTINGS = "/tmp/.ringfence/wgetrc"
_PACKAGES = ("cryptography", "h11", "h2")
# Each variable replaces the roots of a program or library: the file must hold the host's roots too.
_BUNDLE_VARIABLES = (
    "SSL_CERT_FILE",  # OpenSSL, Python's ssl, Go, Ruby, uv
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "AWS_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "DENO_CERT",
    "CARGO_HTTP_CAINFO",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "HTTPLIB2_CA_CERTS",
    "NIX_SSL_CERT_FILE",
)
_JAVA_OPTIONS = (
    f"-Djavax.net.ssl.trustStore={JAVA_STORE} -Djavax.net.ssl.trustStoreType=PKCS12 "
    "-Djavax.net.ssl.trustStorePassword=changeit"
)


def is_needed(network: Network, secrets: tuple[Secret, ...]) -> bool:
    """Return whether some host's TLS will be read."""
    rules = network.rules
    return bool(secrets) or any(rule.protocol == "tls" and (rule.methods or rule.paths) for rule in rules)


def check_packages() -> None:
    """Raise UnsupportedError when a package that reads TLS and HTTP is not installed on the host."""
    missing = [name for name in _PACKAGES if not import_path.is_installed(name)]
    if missing:
        raise UnsupportedError(
            f"secrets, methods and paths make the gateway read requests: {', '.join(missing)} is not installed",
            code="network-packages",
            missing=[Missing("process", name, "pip install 'ringfence-sandbox[network]'") for name in missing],
        )


def environment() -> dict[str, str]:
    """Return variables for the guest; the policy's own come before them."""
    return {**dict.fromkeys(_BUNDLE_VARIABLES, BUNDLE), "JAVA_TOOL_OPTIONS": _JAVA_OPTIONS, "WGETRC": WGET_SETTINGS}


def files(authority: Authority) -> Mapping[str, bytes]:
    """Return the files by their path inside."""
    from ringfence.gateway.secrets.ca import host_bundle, java_trust_store, trust_bundle

    bundle = host_bundle()
    return {
        BUNDLE: trust_bundle(authority, bundle),
        JAVA_STORE: java_trust_store(authority, bundle),
        WGET_SETTINGS: f"ca_certificate = {BUNDLE}\n".encode(),
    }
