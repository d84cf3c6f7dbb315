"""etcd with TLS, client certificates and users: addresses, and a real server that demands them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.comm.stores.conftest import etcd_program, held_ports

from phalanx.comm.stores import connect
from phalanx.comm.stores._etcd_access import Access, etcd_url, parse_etcd_url
from phalanx.errors import StoreError, StoreLost


@pytest.mark.fast
@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("etcds://a:1?cafile=/x", "'cafile' is not understood"),
        ("etcds://a:1/path", "'/path' is not understood"),
        ("etcd://a:1?ca=/x", "write etcds://"),
        ("etcds://a@b:1?password_file=/none", "cannot read the etcd password file"),
    ],
)
def test_a_wrong_address_says_what_is_wrong(url: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_etcd_url(url, {})


@pytest.mark.fast
def test_passwords_come_from_three_places_and_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("from a file\n")
    file.chmod(0o600)
    assert parse_etcd_url("etcds://u:p%40w@a:1", {})[1].password == "p@w"
    assert parse_etcd_url(f"etcds://u@a:1?password_file={file}", {})[1].password == "from a file"
    assert parse_etcd_url("etcds://u@a:1", {"PHALANX_ETCD_PASSWORD": "env"})[1].password == "env"
    assert "p@w" not in repr(parse_etcd_url("etcds://u:p%40w@a:1", {}))
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        parse_etcd_url(f"etcds://u@a:1?password_file={file}", {})
    with pytest.raises(ValueError, match="cannot read the certificates"):
        Access(encrypted=True, ca=str(tmp_path / "none")).verification()
    url = etcd_url("a:1,b:2", encrypted=True, user="u", ca="/ca.pem", cert="/c.pem", key="/k.pem")
    assert parse_etcd_url(url, {}) == (
        ["a:1", "b:2"],
        Access(encrypted=True, ca="/ca.pem", cert="/c.pem", key="/k.pem", user="u"),
    )
    with pytest.raises(ValueError, match="is an address already"):
        etcd_url("etcds://a:1", encrypted=False, ca="/ca.pem")


def make_certificates(folder: Path) -> None:
    """An authority, a server's certificate for 127.0.0.1 and a client's; and an authority that nobody trusts."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for name in ("ca", "other"):
        openssl("req", "-x509", *new, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    # etcd's gateway is a client of its own server, with the server's certificate.
    server = "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
    client = "extendedKeyUsage=clientAuth\n"
    for name, extensions in (("server", server), ("client", client), ("named", client)):
        (folder / f"{name}.ext").write_text(extensions)
        openssl(
            "req",
            *new,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/{'O' if name == 'client' else 'CN'}={name}",
        )
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-extfile", f"{name}.ext",
        )  # fmt: skip


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """An etcd server that speaks TLS only and wants client certificates: its port, and the folder of certificates."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with: install the openssl package")
    folder = tmp_path_factory.mktemp("guarded")
    make_certificates(folder)
    with held_ports(2) as (port, peer_port):
        client, peer = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
        options = {
            "name": "n", "data-dir": str(folder / "data"), "listen-client-urls": client,
            "advertise-client-urls": client, "listen-peer-urls": peer, "initial-advertise-peer-urls": peer,
            "initial-cluster": f"n={peer}", "log-level": "panic", "cert-file": str(folder / "server.pem"),
            "key-file": str(folder / "server.key"), "trusted-ca-file": str(folder / "ca.pem"),
            "auth-token-ttl": "2",
        }  # fmt: skip
        flags = ["--client-cert-auth", "--unsafe-no-fsync", "--socket-reuse-port"]
        command = [etcd_program(), *flags, *(f"--{key}={value}" for key, value in options.items())]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield port, folder
        finally:
            process.kill()
            process.wait()


def test_tls_client_certificates_and_users(guarded: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    port, folder = guarded
    place = f"127.0.0.1:{port}"
    certificates = f"cert={folder}/client.pem&key={folder}/client.key"
    trusted = f"ca={folder}/ca.pem&{certificates}"
    with connect(f"etcds://{place}?{trusted}", timeout=60) as store:
        assert store.address == f"etcds://{place}"
        assert store.add("joined") == 1
        with store.watch() as watch, store.clone() as another:
            another.set("key", b"value")
            assert [change.value for change in watch.wait(30)] == [b"value"]
        for path, body in (
            ("/v3/auth/role/add", {"name": "root"}),
            ("/v3/auth/user/add", {"name": "root", "password": "hush"}),
            ("/v3/auth/user/grant", {"user": "root", "role": "root"}),
            ("/v3/auth/enable", {}),
        ):
            store._gateway.call(path, body)  # type: ignore[attr-defined]  # an administrator's, not a client's
    with pytest.raises(StoreLost, match=r"is not trusted.*ca=FILE"):
        connect(f"etcds://{place}?ca={folder}/other.pem&{certificates}", timeout=60)
    with pytest.raises(StoreLost):
        connect(f"etcds://{place}?ca={folder}/ca.pem", timeout=0.5)  # shows no certificate
    with pytest.raises(StoreError):
        connect(f"etcds://{place}?{trusted}", timeout=5)  # says no name
    named = f"cert={folder}/named.pem&key={folder}/named.key"
    with pytest.raises(StoreError, match="certificates without a common name"):
        connect(f"etcds://root:hush@{place}?ca={folder}/ca.pem&{named}", timeout=5)
    with pytest.raises(StoreError, match=r"refused user 'root'.*check user and password"):
        connect(f"etcds://root:wrong@{place}?{trusted}", timeout=5)
    monkeypatch.setenv("PHALANX_ETCD_PASSWORD", "hush")
    with connect(f"etcds://root@{place}?{trusted}", timeout=60) as store:
        assert store.add("joined") == 2
        lease = store.lease(60)
        with store.watch() as watch:
            store.set("leased", b"1", lease=lease)
            assert [change.key for change in watch.wait(30)] == ["leased"]
            store._gateway._token = "run out.1"  # type: ignore[attr-defined]
            assert lease.refresh()
            assert store.compare_and_set("leased", b"1", b"2")
            assert [change.value for change in watch.wait(30)] == [b"2"]
        assert os.environ["PHALANX_ETCD_PASSWORD"] not in store.address
