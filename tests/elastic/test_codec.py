"""State dicts survive the trip through JSON and tensors, exactly; what cannot travel is refused by name."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm import simulate
from phalanx.elastic import StateTypeError
from phalanx.elastic.checkpoint._state import digest
from phalanx.elastic.checkpoint._state_codec import decode, encode
from phalanx.elastic.checkpoint._stream import receive_state, send_state

pytestmark = pytest.mark.fast

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.booleans()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.lists(inner).map(tuple) | st.sets(st.integers()),
    max_leaves=20,
)


def round_trip(value):
    tree, tensors = encode(value)
    return decode(json.loads(json.dumps(tree)), tensors)


@given(values)
def test_nested_values_survive_exactly(value):
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


def test_tensors_arrays_and_odd_floats_survive():
    value = {
        "t": torch.arange(6.0).view(2, 3).t(),
        "scalar": torch.tensor(3, dtype=torch.int8),
        "array": np.arange(4, dtype=">i2"),
        "numbers": [math.inf, -0.0, np.float64(0.1), np.int64(7)],
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "$": "a key that looks like a tag",
    }
    back = round_trip(value)
    assert digest(back["t"]) == digest(value["t"])
    assert back["scalar"].dtype == torch.int8
    assert (back["array"] == value["array"]).all()
    assert back["array"].dtype == value["array"].dtype
    assert back["numbers"] == [math.inf, -0.0, 0.1, 7]
    assert math.copysign(1, back["numbers"][1]) == -1
    assert back["dtype"] == torch.bfloat16
    assert back["device"] == torch.device("cpu")
    assert back["$"] == value["$"]
    assert math.isnan(round_trip(math.nan))


def test_tied_tensors_travel_once_and_stay_tied():
    weight = torch.ones(3)
    tree, tensors = encode({"a": weight, "b": weight, "part": weight[1:]})
    assert len(tensors) == 2
    assert decode(tree, tensors)["a"] is decode(tree, tensors)["b"]


def test_what_cannot_travel_is_refused_with_its_path():
    with pytest.raises(StateTypeError, match=r"state.optimizer\[1\].hook is a builtins.function"):
        encode({"optimizer": [0, {"hook": lambda: 0}]})
    with pytest.raises(StateTypeError, match="sparse"):
        encode(torch.eye(2).to_sparse())


def test_unknown_records_are_refused():
    with pytest.raises(ValueError, match="unknown kind 'pickle'"):
        decode({"$": "pickle", "v": ""}, [])
    with pytest.raises(ValueError, match="unknown dtype 'load'"):
        decode({"$": "dtype", "v": "load"}, [])


def test_digests_depend_on_values_not_on_order():
    a = {"x": torch.ones(2), "y": [1, (2.0, None)]}
    b = {"y": [1, (2.0, None)], "x": torch.ones(2)}
    assert digest(a) == digest(b)
    assert digest(a) != digest({**a, "x": torch.ones(2, dtype=torch.float64)})
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


@pytest.mark.parametrize("block", [7, 1 << 24])
def test_a_state_is_streamed_between_two_workers(monkeypatch, block):
    monkeypatch.setattr("phalanx.elastic.checkpoint._stream.BLOCK", block)
    state = {
        "w": torch.randn(5, 3),
        "n": torch.arange(4),
        "empty": torch.empty(0),
        "step": 7,
        "half": torch.ones(3).bfloat16(),
    }

    def main(group):
        if group.rank == 1:
            return send_state(group, state, 2)
        if group.rank == 2:
            return digest(receive_state(group, 1))
        return "not needed"

    sent, got = simulate(3).run(main)[1:]
    assert got == digest(state)
    assert sent > 5 * 3 * 4 + 4 * 8 + 6
