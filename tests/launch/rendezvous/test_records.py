"""Records survive the trip through JSON; signatures keep strangers out; parameters read as torch's users
know."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.stores import MemoryStore
from phalanx.comm.stores._signing import SignatureError, Signer, read_secret
from phalanx.launch.rendezvous import RendezvousParameters
from phalanx.launch.rendezvous._backends import describe_node, is_this_machine, split_endpoint
from phalanx.launch.rendezvous._interface import RendezvousInfo, RendezvousStoreInfo
from phalanx.protocol import LeaderRecord, MemberNode, Members, NodeRecord, RecordError

pytestmark = pytest.mark.fast

NODE = NodeRecord(id="a", ticket=3, host="h", addr="h.x", port=7, local_size=2, worker_ids=("w1", "w2"), topology="r1")


def test_records_survive_json() -> None:
    assert NodeRecord.from_json(NODE.to_json()) == NODE
    record = Members(4, (MemberNode.of(NODE),))
    assert Members.from_json(record.to_json()) == record
    leader = LeaderRecord("a", 3, 1, 2)
    assert LeaderRecord.from_json(leader.to_json()) == leader


@pytest.mark.parametrize("kind", [NodeRecord, Members, LeaderRecord])
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"surprise":1}', b"null"])
def test_a_malformed_record_is_refused(kind: type[NodeRecord], data: bytes) -> None:
    with pytest.raises(RecordError):
        kind.from_json(data)


def test_global_ranks_follow_from_the_record() -> None:
    other = NodeRecord(id="b", ticket=4, host="h2", addr="h2.x", port=8, local_size=3)
    nodes = Members(5, (MemberNode.of(NODE), MemberNode.of(other))).node_infos
    assert [(n.base_rank, n.local_size) for n in nodes] == [(0, 2), (2, 3)]
    assert nodes[0].worker_ids == ("w1", "w2")
    assert nodes[1].worker_ids == ("b.5.0", "b.5.1", "b.5.2")


def test_ranks_within_a_role_count_only_nodes_of_that_role() -> None:
    """Roles as torchrun means them: nodes of one job may run different ones."""
    sizes = [("read", 2), ("train", 3), ("read", 1), ("train", 4)]
    seats = tuple(
        MemberNode.of(replace(NODE, id=str(n), local_size=size, worker_ids=(), role=role))
        for n, (role, size) in enumerate(sizes)
    )
    nodes = Members.from_json(Members(0, seats).to_json()).node_infos
    where = RendezvousStoreInfo(master_addr="h", master_port=1)
    places = [
        RendezvousInfo(
            store=MemoryStore(), rank=n, world_size=4, generation=0, nodes=nodes, bootstrap_store_info=where
        ).role_place()
        for n in range(4)
    ]
    assert places == [(0, 3), (0, 7), (2, 3), (3, 7)]


@given(st.binary(max_size=50).map(lambda data: json.dumps(data.hex()).encode()), st.text(max_size=20))
def test_what_is_sealed_opens_and_every_changed_byte_is_noticed(record: bytes, key: str) -> None:
    signer = Signer("job", b"secret")
    sealed = signer.seal(key, record)
    assert signer.open(key, sealed) == record
    assert json.loads(sealed)["v"] == 1
    for place in range(len(sealed)):
        changed = sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :]
        with pytest.raises(RecordError):
            signer.open(key, changed)


def test_a_signature_holds_for_one_key_job_and_secret() -> None:
    sealed = Signer("job", b"secret").seal("k", b"1")
    for signer, key in [
        (Signer("job", b"secret"), "other"),
        (Signer("other", b"secret"), "k"),
        (Signer("job", b"guess"), "k"),
    ]:
        with pytest.raises(SignatureError, match="another secret or was changed"):
            signer.open(key, sealed)


def test_signed_and_unsigned_do_not_mix() -> None:
    with pytest.raises(SignatureError, match="PHALANX_JOB_SECRET"):
        Signer("job").open("k", Signer("job", b"s").seal("k", b"1"))
    with pytest.raises(SignatureError, match="not signed"):
        Signer("job", b"s").open("k", Signer("job").seal("k", b"1"))
    with pytest.raises(RecordError, match="not one of this release"):
        Signer("job", b"s").open("k", b'{"v":2,"record":1}')


def test_the_secret_comes_from_the_environment_or_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hush\n")
    file.chmod(0o600)
    assert read_secret({}) is None
    assert read_secret({"PHALANX_JOB_SECRET": "x"}) == b"x"
    assert read_secret({"PHALANX_JOB_SECRET_FILE": str(file)}) == b"hush"
    assert read_secret({"PHALANX_JOB_SECRET": "x"}, str(file)) == b"hush"
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_secret({}, str(file))
    with pytest.raises(ValueError, match="cannot read"):
        read_secret({}, str(tmp_path / "none"))


def test_parameters() -> None:
    params = RendezvousParameters("c10d", "h:1", "id", 1, 2, "addr", flag="No", number="7", other=None)
    assert (params.get("number"), params.get("missing", 5)) == ("7", 5)
    assert (params.get_as_bool("flag"), params.get_as_bool("missing", True)) == (False, True)
    assert (params.get_as_int("number"), params.get_as_int("missing")) == (7, None)
    assert params.local_addr == "addr"
    for wrong in (lambda: params.get_as_bool("number"), lambda: params.get_as_int("flag")):
        with pytest.raises(ValueError, match="expected"):
            wrong()


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 2), (-1, 4)])
def test_impossible_numbers_of_nodes_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        RendezvousParameters("c10d", "", "id", low, high)


def test_endpoints() -> None:
    assert split_endpoint("", 5) == ("localhost", 5)
    assert split_endpoint("n:0", 5) == ("n", 0)
    assert split_endpoint("::1", 5) == ("::1", 5)
    for wrong in ("n:x", ":80", "n:99999"):
        with pytest.raises(ValueError, match="expected host"):
            split_endpoint(wrong, 5)


def test_a_nodes_address_is_its_fqdn_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "node7.cluster.example")
    told = RendezvousParameters("c10d", "e:1", "j", 1, 2, local_addr="10.0.0.7")
    assert describe_node(RendezvousParameters("c10d", "e:1", "j", 1, 2)).addr == "node7.cluster.example"
    assert describe_node(told).addr == "10.0.0.7"


def test_only_own_addresses_are_this_machine() -> None:
    assert is_this_machine("127.0.0.1")
    assert is_this_machine("localhost")
    assert not is_this_machine("192.0.2.1")  # reserved for documentation
