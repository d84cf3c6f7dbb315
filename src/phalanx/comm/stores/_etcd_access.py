"""Says how a client gets into an etcd cluster: encrypted or not, as which user, with which certificates.

Owns the reading of ``etcd://`` and ``etcds://`` addresses. A password never becomes part of an address that is shown.

``etcds://[user[:password]@]host:port[,host:port...][?ca=FILE&cert=FILE&key=FILE&password_file=FILE]``: TLS; the
servers' certificates are verified against ``ca`` (default: the authorities that the system trusts), ``cert`` and
``key`` are this client's own. ``etcd://`` is the same without encryption. ``follow=1``: members come and go, as in
a job's own cluster; the list is asked for again. Without a password in the address it is
read from ``password_file`` or from ``PHALANX_ETCD_PASSWORD``.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

ENV_PASSWORD = "PHALANX_ETCD_PASSWORD"
_FILES = ("ca", "cert", "key", "password_file")
_OPTIONS = (*_FILES, "follow")


@dataclass(frozen=True, kw_only=True)
class Access:
    """What a client shows and what it asks of the servers."""

    encrypted: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    follow: bool = False
    """Members come and go: the client is to ask who they are, now and then, and to believe the addresses they give."""

    @property
    def scheme(self) -> str:
        return "https" if self.encrypted else "http"

    def verification(self) -> ssl.SSLContext | bool:
        """Return what httpx is to check; nothing where nothing is encrypted (loading certificates takes 60 ms)."""
        if not self.encrypted:
            return False
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"cannot read the certificates in ca={self.ca!r}: {error}") from error
        if self.cert:
            try:
                context.load_cert_chain(self.cert, self.key or None)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(
                    f"cannot use the certificate cert={self.cert!r} with key={self.key!r}: {error}"
                ) from error
        return context


def parse_etcd_url(url: str, environ: Mapping[str, str] | None = None) -> tuple[list[str], Access]:
    """Return the endpoints and the access that an address stands for; ``ValueError`` says what is wrong with it.

    >>> parse_etcd_url("etcds://ann:pw@a:1,b:2?ca=/ca.pem", {})
    (['a:1', 'b:2'], Access(encrypted=True, ca='/ca.pem', cert='', key='', user='ann', follow=False))
    """
    env = os.environ if environ is None else environ
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown or parts.path.strip("/") or parts.fragment:
        shown = unknown[0] if unknown else parts.path or parts.fragment
        raise ValueError(
            f"etcd address: {shown!r} is not understood; expected {parts.scheme}://host:port[,host:port...] and "
            f"after a question mark any of {', '.join(_OPTIONS)}"
        )
    encrypted = parts.scheme == "etcds"
    if not encrypted and any(options.get(name) for name in ("ca", "cert", "key")):
        raise ValueError("etcd address: certificates need an encrypted connection; write etcds:// for etcd://")
    if not password and options.get("password_file"):
        password = _read_password(options["password_file"])
    return hosts.split(","), Access(
        encrypted=encrypted,
        ca=options.get("ca", ""),
        cert=options.get("cert", ""),
        key=options.get("key", ""),
        user=unquote(user),
        password=unquote(password) if login.partition(":")[2] else password or env.get(ENV_PASSWORD, ""),
        follow=options.get("follow", "") == "1",
    )


def etcd_url(endpoint: str, *, encrypted: bool, user: str = "", **files: str) -> str:
    """Return the address of a cluster from separate settings; ``endpoint`` may be an address already.

    >>> etcd_url("a:1,b:2", encrypted=True, user="ann", ca="/ca.pem", cert="")
    'etcds://ann@a:1,b:2?ca=%2Fca.pem'
    """
    given = {name: os.path.abspath(path) for name, path in files.items() if path}
    if "://" in endpoint:
        if given or user:
            raise ValueError(f"rendezvous endpoint {endpoint.split('?')[0]!r} is an address already; write "
                             f"{', '.join([*given, *(['user'] if user else [])])} into it")  # fmt: skip
        return endpoint
    login = f"{user}@" if user else ""
    query = f"?{urlencode(given)}" if given else ""
    return f"{'etcds' if encrypted else 'etcd'}://{login}{endpoint}{query}"


def _read_password(path: str) -> str:
    file = Path(path)
    try:
        mode, text = file.stat().st_mode, file.read_text()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot read the etcd password file {path!r}: {error}") from error
    if mode & 0o077:
        raise ValueError(f"etcd password file {path!r} is open to other users; run: chmod 600 {path}")
    return text.strip()
