"""A certificate authority for each sandbox, whose key lives in this process alone: in no file, not inside (H07).

The guest is shown the public certificate. Leaves are made when a host is intercepted for the first time, and kept.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ringfence.policy.hosts import is_address

if TYPE_CHECKING:
    from collections.abc import Sequence


_SKEW = timedelta(days=1)  # clocks of guests in a virtual machine may lag
_VALID = timedelta(days=30)  # a sandbox that lives longer makes new leaves
_RENEW = timedelta(days=1)
_MOST_LEAVES = 256  # a wildcard lets the guest choose names
_LONGEST_COMMON_NAME = 64  # of X.509


class Authority:
    """Signs for the hosts that one sandbox's gateway intercepts. repr and pickling give nothing away."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())  # shared by all leaves: they end in the same process
        self._certificate = self._sign_itself()
        self._leaves: dict[tuple[str, tuple[str, ...]], tuple[datetime, ssl.SSLContext]] = {}

    def __repr__(self) -> str:
        return "Authority(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an authority's key stays in its process")

    @property
    def certificate(self) -> bytes:
        """Return the public certificate, PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def server(self, name: str, alpn: Sequence[str]) -> ssl.SSLContext:
        """Return a TLS context for the guest's side: a leaf for the canonical `name`, and the protocols `alpn`."""
        key = (name, tuple(alpn))
        now = datetime.now(UTC)
        made = self._leaves.pop(key, None)
        if made is None or made[0] < now:
            while len(self._leaves) >= _MOST_LEAVES:
                del self._leaves[next(iter(self._leaves))]
            made = (now + _VALID - _RENEW, self._make_context(name, alpn, now))
        self._leaves[key] = made  # last again, as the leaf that is unused longest is dropped first
        return made[1]

    def _make_context(self, name: str, alpn: Sequence[str], now: datetime) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # it costs a signature, and older OpenSSL lets a client ask
        context.set_alpn_protocols(list(alpn))
        _load(context, self._leaf(name, now), self._leaf_key)
        return context

    def _leaf(self, name: str, now: datetime) -> x509.Certificate:
        common = [x509.NameAttribute(NameOID.COMMON_NAME, name)] if len(name) <= _LONGEST_COMMON_NAME else []
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name(common))
            .issuer_name(self._certificate.subject)
            .public_key(self._leaf_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + _VALID)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([_alternative(name)]), critical=not common)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(_key_id(self._leaf_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        return builder.sign(self._key, hashes.SHA256())

    def _sign_itself(self) -> x509.Certificate:
        now = datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Ringfence sandbox {os.urandom(4).hex()}")])
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + timedelta(days=3650))  # ends with the sandbox: its key is nowhere else
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(_key_id(self._key), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256())


def trust_bundle(authority: Authority, host_bundle: bytes) -> bytes:
    """Return what the guest trusts, PEM: the host's roots and the sandbox's own."""
    return host_bundle.rstrip(b"\n") + b"\n" + authority.certificate if host_bundle else authority.certificate


def java_trust_store(authority: Authority, host_bundle: bytes) -> bytes:
    """Return what the guest trusts as a PKCS #12 store, with Java's usual password: it holds no secret."""
    from cryptography.hazmat.primitives.serialization import pkcs12

    own = x509.load_pem_x509_certificate(authority.certificate)
    entries = [
        pkcs12.PKCS12Certificate(certificate, f"root-{number}".encode())
        for number, certificate in enumerate((own, *_roots(host_bundle)))
    ]
    weakest = serialization.PrivateFormat.PKCS12.encryption_builder().kdf_rounds(1).build(b"changeit")
    return pkcs12.serialize_java_truststore(entries, weakest)


@lru_cache(maxsize=1)
def _roots(bundle: bytes) -> tuple[x509.Certificate, ...]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some old roots have odd serial numbers, which the host may judge
        return tuple(x509.load_pem_x509_certificates(bundle)) if bundle else ()


@lru_cache(maxsize=1)
def host_bundle() -> bytes:
    """Return the host's own trusted roots, PEM, read once; empty on a host without such a file."""
    paths = ssl.get_default_verify_paths()
    for path in (paths.cafile, *_BUNDLES):
        if path and os.path.isfile(path):
            with open(path, "rb") as file:
                return file.read()
    return b""


_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)


def _alternative(name: str) -> x509.GeneralName:
    if not is_address(name):
        return x509.DNSName(name)
    from ipaddress import ip_address

    return x509.IPAddress(ip_address(name.strip("[]")))


def _key_id(key: ec.EllipticCurvePrivateKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key.public_key())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _load(context: ssl.SSLContext, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Load a leaf and its key. Python reads keys only from files; this one is in memory, without a name."""
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    descriptor = os.memfd_create("ringfence-leaf", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
