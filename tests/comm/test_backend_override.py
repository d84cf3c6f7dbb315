"""Which backend an axis of a mesh has of its own: torch's forms, with torch's meaning and refusals."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from phalanx.comm import Group, init_device_mesh, simulate
from phalanx.comm.mesh._backend_override import Override, parse_overrides

NAMES = ("dp", "tp")


def _options(seconds: float, backend: str) -> Any:
    from torch._C._distributed_c10d import Backend

    return Backend.Options(backend, timeout=timedelta(seconds=seconds))


def outcome(call: Any) -> Any:
    try:
        return [tuple(one) for one in call()]
    except Exception as error:
        return type(error)


@pytest.mark.parametrize(
    "given",
    [{}, {0: "gloo"}, {"tp": "gloo"}, {"dp": "gloo", 1: "mpi"}, {"tp": ("gloo", None)}, {0: "gloo", "dp": "gloo"},
     {"pp": "gloo"}, {2: "gloo"}],
    ids=str,
)  # fmt: skip
def test_keys_mean_what_they_mean_to_torch(given: dict[Any, Any]) -> None:
    from torch.distributed.device_mesh import _normalize_backend_override

    theirs = outcome(lambda: _normalize_backend_override(dict(given), 2, NAMES))
    assert outcome(lambda: parse_overrides(given, 2, NAMES)) == theirs


def test_options_give_a_name_and_a_timeout() -> None:
    assert parse_overrides({0: _options(3, "gloo")}, 1, None) == [Override("gloo", 3.0)]
    assert parse_overrides([("mpi", _options(3, "gloo"))], 1, None) == [Override("mpi", 3.0)]
    assert parse_overrides(((None, None), (None, None)), 2, NAMES) == [Override(), Override()]
    with pytest.raises(ValueError, match="2 entries; expected one for each of 1 axes"):
        parse_overrides(["gloo", "gloo"], 1, None)


def test_other_options_are_refused_rather_than_dropped() -> None:
    from torch._C._distributed_c10d import Backend

    class Special(Backend.Options):
        """Such as NCCL's, with a stream priority."""

    with pytest.raises(ValueError, match="other options of a backend are not passed on"):
        parse_overrides({0: Special("gloo")}, 1, None)


def test_an_axis_with_a_timeout_of_its_own() -> None:
    def main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, backend_override={"tp": _options(7, "gloo")})
        assert mesh.get_group("tp").timeout == 7
        assert mesh.get_group("dp").timeout == group.timeout
        flat = mesh._flatten("all", backend_override=_options(9, "gloo"))
        assert flat.get_group().timeout == 9
        assert mesh.get_group("all") is flat.get_group()
        assert init_device_mesh("cpu", (4,)).get_group() is group

    simulate(4).run(main)
