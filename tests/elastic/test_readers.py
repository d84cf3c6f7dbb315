"""Saves, states, lines and records of a job that others have written: read whole, or refused as documented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_training import make_job, train
from hypothesis import given
from hypothesis import strategies as st

from junk import changed, junk, long, quick, raw, torn
from phalanx.elastic import RunOptions, SaveError, Saves
from phalanx.elastic.audit import check
from phalanx.elastic.checkpoint._save_folder import find_save, write_save
from phalanx.elastic.checkpoint._saves import _hash, check_save
from phalanx.elastic.checkpoint._state_codec import decode, encode
from phalanx.elastic.checkpoint._stream import parse_header
from phalanx.events._writer import parse_lines
from phalanx.watch._hub import Hub
from phalanx.watch._page_file import page_html
from phalanx.watch._prometheus import exposition
from phalanx.watch._report import with_details

TENSORS = [torch.arange(4.0), torch.ones(2, dtype=torch.int64)]
STATE = {
    "a": TENSORS[0], "b": (TENSORS[1], {1: "x"}, {"y"}), "c": b"bytes", "d": torch.float32, "e": torch.device("cpu"),
    "f": torch.ones(3).numpy(), "g": [None, True, 1.5, float("inf")],
}  # fmt: skip


def seal(body) -> bytes:
    text = json.dumps(body)
    return json.dumps({"checksum": _hash(text.encode()), "body": text}).encode()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, bytes]]:
    """A good save, an older one, and the bytes of the newer one's files."""
    folder = tmp_path_factory.mktemp("saves")
    tree, tensors = encode(STATE)
    for step in (1, 2):
        path = write_save(folder, step, tree, tensors, keep=2)
    return folder, path, {name.name: name.read_bytes() for name in path.iterdir()}


def fuzz_saves(given_settings):
    @given_settings
    @given(st.data())
    def test(saved, data) -> None:
        folder, path, good = saved
        body = json.loads(json.loads(good["state.json"])["body"])
        state = data.draw(st.one_of(changed(body).map(seal), junk.map(seal), raw, torn(good["state.json"])))
        tensors = data.draw(st.one_of(st.just(good["tensors.safetensors"]), torn(good["tensors.safetensors"]), raw))
        if data.draw(st.booleans()) and tensors != good["tensors.safetensors"]:
            state = seal({**body, "files": [{**body["files"][0], "checksum": _hash(tensors)}]})  # crafted: it fits
        (path / "state.json").write_bytes(state)
        (path / "tensors.safetensors").write_bytes(tensors)
        try:
            save = check_save(path)
        except SaveError:
            found, problems = find_save(folder)
            assert (found.step, len(problems)) == (1, 1), "the one before is used"
        else:
            save.state()  # what is readable can be read

    return test


test_a_save_is_read_or_the_one_before_it_is_used = pytest.mark.fast(fuzz_saves(quick))
test_a_save_is_read_or_the_one_before_it_is_used_many_times = pytest.mark.soak(fuzz_saves(long))


def fuzz_codec(given_settings):
    @given_settings
    @given(st.one_of(changed(encode(STATE)[0]), junk))
    def test(tree) -> None:
        try:
            decode(tree, TENSORS)
        except ValueError:
            pass

    return test


test_a_state_is_decoded_or_refused = pytest.mark.fast(fuzz_codec(quick))
test_a_state_is_decoded_or_refused_many_times = pytest.mark.soak(fuzz_codec(long))


@pytest.mark.fast
@pytest.mark.parametrize(
    "tree",
    [
        {"$": "tensor", "i": -1}, {"$": "tensor", "i": True}, {"$": "tensor"}, {"$": "dict", "v": [1]},
        {"$": "set", "v": [[]]},
        {"$": "array", "dtype": "O", "shape": [1], "v": "AAAAAAAAAAA="}, {"$": "device", "v": "nowhere"},
        {"$": "dtype", "v": ["float32"]}, {"$": "bytes", "v": 7}, {"$": []},
    ],
)  # fmt: skip
def test_what_encode_cannot_have_made_is_refused(tree) -> None:
    with pytest.raises(ValueError):
        decode(tree, TENSORS)


@pytest.mark.fast
@quick
@given(
    st.one_of(
        raw,
        changed({"tree": {"a": 1}, "tensors": [["float32", [2, 3]]]}).map(lambda v: json.dumps(v).encode()),
    )
)
def test_a_header_is_read_or_refused(data) -> None:
    try:
        parse_header(data)
    except ValueError:
        pass


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The lines that a job writes: its audit and its events."""
    folder = tmp_path_factory.mktemp("logs")
    saves = Saves(directory=folder / "saves", every=2)
    train(make_job(length=40, saves=saves, run=RunOptions(progress=False, log_dir=folder)), max_steps=2)
    return {
        kind: [json.loads(line) for line in next(folder.glob(f"{kind}-*")).read_bytes().splitlines()]
        for kind in ("audit", "events")
    }


def fuzz_lines(given_settings):
    @given_settings
    @given(st.data())
    def test(logs, data) -> None:
        records = data.draw(st.one_of(changed(logs["audit"], most=6), st.lists(junk, max_size=5)))
        check(records if isinstance(records, list) else [])
        events = data.draw(st.one_of(changed(logs["events"], most=6), st.lists(junk, max_size=5)))
        hub = Hub()
        for event in events if isinstance(events, list) else []:
            hub.add_record(event)
        assert page_html(hub.read(with_details)).count("<script") == 2
        assert exposition(hub.view, 1e9).endswith("\n")
        parse_lines(data.draw(raw) + b"\n" + data.draw(raw))

    return test


test_any_lines_can_be_audited_and_shown = pytest.mark.fast(fuzz_lines(quick))
test_any_lines_can_be_audited_and_shown_many_times = pytest.mark.soak(fuzz_lines(long))
