"""Makes the certificates of a job's own etcd from the job's secret, so that nobody has to hand any out.

Owns the files: ``ca.pem``, ``server.pem`` and ``client.pem`` with their keys, in a folder of one node. The authority's
key is computed from the secret and the job's id: every node that knows the secret makes the same authority, and signs
its own certificates with it; a stranger cannot. The authority's key itself is never written.

A server's certificate is a client's as well: etcd's gateway and its members are clients of one another. The client's
has no name in it, which etcd would check against the address that a connection comes from.
Needs ``cryptography`` (extra ``etcd``).
"""

from __future__ import annotations

import datetime
import hmac
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding

_BEGIN = datetime.datetime(2020, 1, 1)
_END = datetime.datetime(2120, 1, 1)
"""The files are gone with the job: dates would only fail on machines whose clocks are wrong."""


@dataclass(frozen=True, kw_only=True)
class CertificateFiles:
    """Where the certificates of a node are."""

    ca: str
    server: str
    server_key: str
    client: str
    client_key: str


def write_certificates(folder: Path, secret: bytes, job: str, names: Sequence[str]) -> CertificateFiles:
    """Make a node's certificates; ``names`` are the addresses and host names by which others reach it."""
    from cryptography import x509  # optional: only a job with an etcd of its own needs it
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # optional, as above
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # optional, as above

    seed = hmac.digest(secret, b"phalanx etcd authority\0" + job.encode(), "sha256")
    authority = Ed25519PrivateKey.from_private_bytes(seed)
    issuer = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "phalanx job authority")])

    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())

    def sign(key: Ed25519PrivateKey, subject: x509.Name, *extensions: x509.ExtensionType) -> bytes:
        # The authority's own certificate has the same bytes on every node, down to its number.
        number = 1 if subject == issuer else x509.random_serial_number()
        made = x509.CertificateBuilder(issuer, subject, key.public_key(), number, _BEGIN, _END)
        identity = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        for extension in (*extensions, identity, *([] if subject == issuer else [signed_by])):
            made = made.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return made.sign(authority, None).public_bytes(_pem())

    leaf = x509.BasicConstraints(ca=False, path_length=None)
    uses = {
        "server": [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
        "client": [ExtendedKeyUsageOID.CLIENT_AUTH],
    }
    signs = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    _write(folder / "ca.pem", sign(authority, issuer, x509.BasicConstraints(ca=True, path_length=0), signs))
    for name, use in uses.items():
        key = Ed25519PrivateKey.generate()
        subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, f"phalanx job {name}")])
        known = [x509.SubjectAlternativeName(_alternatives(names))] if name == "server" else []
        _write(folder / f"{name}.pem", sign(key, subject, leaf, x509.ExtendedKeyUsage(use), *known))
        _write(folder / f"{name}.key", _private_bytes(key))
    return CertificateFiles(
        ca=str(folder / "ca.pem"),
        server=str(folder / "server.pem"),
        server_key=str(folder / "server.key"),
        client=str(folder / "client.pem"),
        client_key=str(folder / "client.key"),
    )


def _alternatives(names: Sequence[str]) -> list[x509.GeneralName]:
    from cryptography import x509  # optional, see write_certificates

    found: dict[str, x509.GeneralName] = {}
    for name in (*names, "localhost", "127.0.0.1", "::1"):
        try:
            found[name] = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            found[name] = x509.DNSName(name)
    return list(found.values())


def _pem() -> Encoding:
    from cryptography.hazmat.primitives.serialization import Encoding  # optional, see write_certificates

    return Encoding.PEM


def _private_bytes(key: Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization  # optional, see write_certificates

    return key.private_bytes(_pem(), serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write(path: Path, data: bytes) -> None:
    """Write a file that nobody else can read, not even for a moment."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(number, "wb") as file:
        file.write(data)
