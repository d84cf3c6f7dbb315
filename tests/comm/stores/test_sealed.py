"""The signed view of a job's store: what is written is verified, what a stranger writes is as good as absent."""

from __future__ import annotations

import logging
import threading

import pytest

from phalanx.comm.stores import Change, MemoryStore, job_store
from phalanx.comm.stores._complaints import BURST, PER_KEY, Complaints
from phalanx.comm.stores._sealed import SealedStore
from phalanx.comm.stores._signing import SignatureError, Signer
from phalanx.errors import StoreTimeout
from phalanx.protocol import job_prefix

pytestmark = pytest.mark.fast

FORGERIES = {
    "unsigned": lambda key: b'{"v":1}',
    "in a plain envelope": lambda key: Signer("job").seal(key, b'{"v":1}'),
    "with another secret": lambda key: Signer("job", b"guessed").seal(key, b'{"v":1}'),
    "of another job": lambda key: Signer("other", b"secret").seal(key, b'{"v":1}'),
    "moved from another key": lambda key: Signer("job", b"secret").seal(key + "x", b'{"v":1}'),
    "changed": lambda key: Signer("job", b"secret").seal(key, b'{"v":1}').replace(b'"v":1}', b'"v":2}'),
}


@pytest.fixture
def raw() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def sealed(raw: MemoryStore) -> SealedStore:
    return SealedStore(raw, Signer("job", b"secret"))


def test_every_kind_of_access_signs_and_verifies(raw: MemoryStore, sealed: SealedStore) -> None:
    watch = sealed.watch("gen/")
    sealed.set("gen/0/a", b"1")
    assert sealed.compare_and_set("gen/0/b", None, b"2")
    assert not sealed.compare_and_set("gen/0/b", None, b"3")
    assert sealed.compare_and_set("gen/0/b", b"2", b"3")
    assert sealed.get("gen/0/a") == b"1"
    assert sealed.get_many(["gen/0/b", "gen/0/none"]) == [b"3", None]
    assert sealed.items("gen/") == {"gen/0/a": b"1", "gen/0/b": b"3"}
    assert sealed.wait(["gen/0/a"], 1) == [b"1"]
    assert sealed.namespace("gen").get("0/a") == b"1"
    assert sealed.clone().get("gen/0/a") == b"1"
    assert watch.wait(1) == [Change("gen/0/a", b"1"), Change("gen/0/b", b"2"), Change("gen/0/b", b"3")]
    assert all(b'"mac"' in value for value in raw.items().values())
    assert sealed.add("rdzv/bells") == 1
    assert sealed.get("rdzv/bells") == b"1"
    assert b'"mac"' in (raw.get("rdzv/bells") or b"")


@pytest.mark.parametrize("how", FORGERIES)
def test_a_forged_record_is_refused_logged_once_and_replaced(
    raw: MemoryStore, sealed: SealedStore, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = "gen/0/members"
    watch = sealed.watch("gen/")
    raw.set(key, FORGERIES[how](key))
    with caplog.at_level(logging.WARNING):
        assert sealed.get(key) is None
        assert sealed.get_many([key]) == [None]
        assert sealed.items("gen/") == {}
        assert watch.wait(0) == []
        with pytest.raises(StoreTimeout):
            sealed.wait([key], 0.01)
    refused = [record.getMessage() for record in caplog.records if "refused a record" in record.getMessage()]
    assert len(refused) == 1, refused
    assert repr(key) in refused[0]
    assert sealed.compare_and_set(key, None, b"right")
    assert sealed.get(key) == b"right"


def test_a_waiter_is_not_woken_by_a_forgery_but_by_the_real_record(raw: MemoryStore, sealed: SealedStore) -> None:
    raw.set("gen/1/members", b"forged")
    found: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: found.append(sealed.clone().wait(["gen/1/members"], 30)))
    thread.start()
    sealed.set("gen/1/members", b"real")
    thread.join()
    assert found == [[b"real"]]


def test_without_a_secret_values_pass_and_signed_ones_say_what_is_missing(
    raw: MemoryStore, sealed: SealedStore
) -> None:
    plain = SealedStore(raw, Signer("job"))
    plain.set("wish/a", b"4")
    assert raw.get("wish/a") == b"4"
    assert plain.get("wish/a") == b"4"
    sealed.set("wish/b", b"4")
    with pytest.raises(SignatureError, match="set PHALANX_JOB_SECRET"):
        plain.get("wish/b")


def test_the_job_store_takes_the_secret_from_the_environment(raw: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_JOB_SECRET", "secret")
    job_store(raw, "job").set("wish/a", b"4")
    assert b'"mac"' in (raw.namespace(job_prefix("job")).get("wish/a") or b"")
    assert job_store(raw, "job").get("wish/a") == b"4"
    assert job_store(raw, "other").get("wish/a") is None


@pytest.mark.parametrize("secret", [None, b"secret"], ids=["plain", "signed"])
@pytest.mark.parametrize("garbage", [b"garbage", b"", b"\xff\xfe", b"9" * 5000, b"1e9", b"-", b'{"v":1}'])
def test_a_counter_that_holds_no_number_is_named_and_begins_again(
    raw: MemoryStore, secret: bytes | None, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = SealedStore(raw, Signer("job", secret))
    assert [store.add("rdzv/bells"), store.add("rdzv/bells", 4)] == [1, 5]
    raw.set("rdzv/bells", garbage)
    with caplog.at_level(logging.WARNING):
        assert store.count("rdzv/bells") == 0
    assert "'rdzv/bells'" in caplog.text
    assert [store.add("rdzv/bells"), store.count("rdzv/bells")] == [1, 1]


def test_a_signed_counter_takes_no_number_of_a_stranger_and_loses_no_addition(
    raw: MemoryStore, sealed: SealedStore
) -> None:
    raw.set("n", b"999999")
    threads = [threading.Thread(target=lambda: [sealed.clone().add("n") for _ in range(20)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sealed.count("n") == 160


def test_what_process_groups_exchange_is_signed_too(raw: MemoryStore, sealed: SealedStore) -> None:
    ours, strangers = sealed.namespace("group").as_c10d(), raw.namespace("group").as_c10d()
    ours.set("rank0", b"\x00address")
    assert ours.get("rank0") == b"\x00address"
    assert strangers.get("rank0") != b"\x00address"
    assert [ours.add("n", 1), ours.add("n", 2)] == [1, 3]
    strangers.set("rank1", b"\x00another address")
    assert not ours.check(["rank1"])


def test_complaints_are_few_however_much_a_stranger_writes(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    complaints = Complaints(logging.getLogger("strangers"), clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            complaints.say("a", f"a {number}")
            complaints.say(f"b{number}", f"b {number}")
        assert len(caplog.records) == BURST
        now[0] = PER_KEY
        complaints.say("a", "a again")
    assert [record.getMessage() for record in caplog.records[BURST:]] == [
        "1950 more values that no worker or agent wrote were refused",
        "a again",
    ]
