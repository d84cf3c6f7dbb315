"""Communication contracts: how a check judges, what a breach says, and the textbook of each scheme."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm import DeviceMesh, Group, init_device_mesh, simulate
from phalanx.errors import RankFailed
from phalanx.tensor import Replicate, Shard, distribute_tensor
from phalanx.tensor.debug import (
    Allowance,
    CommContract,
    ContractBreach,
    ContractWarning,
    check_contract,
    comm_contract,
    contracts,
)
from phalanx.tensor.debug._contract import ContractCheck
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

ACTIVATION = 4 * 8 * 4  # rows, width, bytes of float32


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tensor_parallel(mesh: DeviceMesh):
    model = Net()
    parallelize_module(model, mesh, {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    x = torch.ones(4, 8, requires_grad=True)
    return model, lambda: model(x).sum().backward()


# ---- the check, without a model


def line(module: str = "", phase: str = "forward", collective: str = "all_reduce", count=1, nbytes=None) -> Allowance:
    return Allowance(module=module, phase=phase, collective=collective, count=count, nbytes=nbytes)  # type: ignore[arg-type]


PATHS = ("", "layers", "layers.0", "layers.0.up", "layers.1", "layers.1.up")


@pytest.mark.fast
def test_each_module_pays_for_itself_and_the_nearest_line_counts() -> None:
    check = ContractCheck(CommContract(line("layers.*", count=range(2)), line("layers.1.up"), line(count=2)), PATHS)
    assert check.charge("layers.0.up", "forward", "all_reduce", 8) is None
    assert check.charge("layers.1.up", "forward", "all_reduce", 8) is None, "its own"
    assert check.charge("layers.1", "forward", "all_reduce", 8) is None
    broken = check.charge("layers.0.up", "forward", "all_reduce", 8)
    assert broken == "it is number 2, the contract says: layers.*, forward: at most 1 all_reduce"
    assert check.charge("layers.0", "backward", "all_reduce", 8) == (
        "it is number 1, the contract says: no all_reduce in backward"
    )
    assert list(check.missing()) == [
        "the model: only 0 (0 B) all_reduce in forward, the contract says: the model, forward: 2 all_reduce"
    ]


@pytest.mark.fast
def test_bytes_are_limited_from_both_sides_and_kinds_have_one_name() -> None:
    contract = CommContract(line(collective="all_gather", count=range(1, 4), nbytes=range(100, 201)))
    check = ContractCheck(contract, PATHS)
    assert check.charge("", "forward", "all_gather_into_tensor", 60) is None
    assert next(check.missing()) == (
        "the model: only 1 (60 B) all_gather in forward, "
        "the contract says: the model, forward: 1 to 3 all_gather of 100 B to 200 B"
    )
    assert check.charge("", "forward", "all_gather", 60) is None
    assert not list(check.missing())
    assert check.charge("", "forward", "all_gather", 90) == (
        "with it there are 210 B, the contract says: the model, forward: 1 to 3 all_gather of 100 B to 200 B"
    )
    for kind in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        with pytest.raises(ValueError, match="expected its kind"):
            line(collective=kind)


@pytest.mark.fast
def test_contracts_add_up_and_multiply() -> None:
    twice = (CommContract(line(nbytes=10)) + CommContract(line(count=range(1, 3), nbytes=range(5, 8)))).times(2)
    assert str(twice) == (
        "the model, forward: 2 all_reduce of 20 B\nthe model, forward: 2 to 4 all_reduce of 10 B to 14 B"
    )
    assert str(contracts.no_communication()) == "no communication"
    with pytest.raises(ValueError, match="expected forward or backward"):
        line(phase="sideways")
    with pytest.raises(ValueError, match="not empty"):
        line(count=range(0))
    assert not line("*").covers(""), "a star is one name"
    with pytest.raises(ValueError, match=r"a line for 'layer.\*', but no module has such a path: layers, layers.0"):
        ContractCheck(CommContract(line("layer.*")), PATHS)


# ---- breaches


def test_a_breach_names_rank_module_operation_and_line() -> None:
    def with_a_gather(mesh: DeviceMesh):
        model, _ = tensor_parallel(mesh)

        def step() -> None:
            out = model(torch.ones(4, 8))
            distribute_tensor(out.detach(), mesh, [Shard(0)]).full_tensor()  # the line

        return model, step

    wanted = contracts.column_row_pair("layers.*", nbytes=ACTIVATION)
    with pytest.raises(ContractBreach) as raised:
        check_contract(with_a_gather, CommContract(wanted.lines[0]), mesh={"tp": 2})
    number = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line" in text)
    assert re.fullmatch(
        rf"rank \d: all_gather_into_tensor of \d+ B in forward of the model, by .*test_contracts.py:{number}: "
        rf"it is number 1, the contract says: no all_gather in forward",
        str(raised.value),
    ), str(raised.value)
    with pytest.raises(ContractBreach) as raised:
        check_contract(tensor_parallel, CommContract(wanted.lines[0]), mesh={"tp": 2})
    assert "all_reduce of 128 B in backward of layers.1.up, by linear at " in str(raised.value)
    with pytest.raises(ContractBreach, match="number 1, the contract says: no all_reduce in forward"):
        check_contract(tensor_parallel, contracts.no_communication(), mesh={"tp": 2})
    with pytest.raises(ContractBreach, match=r"there are 128 B, the contract says: layers.\*, forward: 1 .* of 127 B"):
        check_contract(tensor_parallel, contracts.column_row_pair("layers.*", nbytes=127), mesh={"tp": 2})


def test_what_is_promised_and_does_not_happen_is_a_breach() -> None:
    def alone(mesh: DeviceMesh):
        model = Net()
        return model, lambda: model(torch.ones(4, 8)).sum().backward()

    with pytest.raises(ContractBreach) as raised:
        check_contract(alone, contracts.column_row_pair("layers.*"), mesh={"tp": 2})
    said = str(raised.value).splitlines()
    assert len(said) == 4
    assert said[0].endswith(
        "layers.0: only 0 (0 B) all_reduce in forward, the contract says: layers.*, forward: 1 all_reduce"
    )


def test_a_run_can_be_warned_only_and_the_ledger_is_there_to_look_at() -> None:
    def main(group: Group) -> None:
        model, step = tensor_parallel(init_device_mesh("cpu", (2,)))
        with comm_contract(model, CommContract(), on_breach="warn"):
            step()
        with comm_contract(model, contracts.column_row_pair("layers.*").times(2)) as check:
            step()
            step()
        assert {key: spent.count for key, spent in check.spent.items()} == {
            (f"layers.{layer}", phase, "all_reduce"): 2 for layer in range(2) for phase in ("forward", "backward")
        }
        with comm_contract(model.layers[0], contracts.column_row_pair("", nbytes=ACTIVATION)):  # a part, in a whole
            model.layers[0](torch.ones(4, 8, requires_grad=True)).sum().backward()

    with pytest.warns(ContractWarning, match="no all_reduce in") as seen:
        simulate(2).run(main)
    assert len(seen) == 2 * 4
    with pytest.raises(ValueError, match="expected raise or warn"), comm_contract(Net(), CommContract(), on_breach="x"):  # type: ignore[arg-type]
        pass


def test_errors_of_the_program_stay_what_they_are() -> None:
    def broken(mesh: DeviceMesh):
        raise KeyError("build")

    with pytest.raises(RankFailed, match="KeyError"):
        check_contract(broken, CommContract(), world_size=2)
    for wrong in ({}, {"world_size": 3, "mesh": {"tp": 2}}):
        with pytest.raises(ValueError, match="expected one that fits the other"):
            check_contract(broken, CommContract(), **wrong)


# ---- the textbook


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_is_one_all_reduce_forward_and_one_backward_per_block(size: int) -> None:
    report = check_contract(
        tensor_parallel, contracts.column_row_pair("layers.*", nbytes=ACTIVATION), mesh={"tp": size}, steps=2
    )
    assert str(report).splitlines() == [
        f"layers.{layer}, {phase}: 1 (128 B) all_reduce" for phase in ("forward", "backward") for layer in range(2)
    ]


def sequence_parallel(mesh: DeviceMesh):
    model = Net()
    plan = {
        "layers.*.up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    x = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)]).requires_grad_()
    return model, lambda: model(x).to_local().sum().backward()


def test_sequence_parallel_gathers_and_reduce_scatters() -> None:
    check_contract(sequence_parallel, contracts.sequence_parallel_pair("layers.*", nbytes=ACTIVATION), mesh={"tp": 2})


def test_an_activation_that_the_model_itself_gathers_is_all_reduced_and_cut() -> None:
    def by_hand(mesh: DeviceMesh):
        model, _ = tensor_parallel(mesh)
        x = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)]).requires_grad_()
        return model.layers[0], lambda: model.layers[0](x.redistribute(placements=[Replicate()])).sum().backward()

    wanted = contracts.column_row_pair("", nbytes=ACTIVATION) + CommContract(line(collective="all_gather"))
    check_contract(by_hand, wanted, mesh={"tp": 2})


def test_loss_parallel_is_three_numbers_per_row() -> None:
    def build(mesh: DeviceMesh):
        torch.manual_seed(0)
        model = parallelize_module(nn.Linear(8, 10), mesh, ColwiseParallel(use_local_output=False))
        x, target = torch.ones(6, 8), torch.arange(6)

        def step() -> None:
            with loss_parallel():
                F.cross_entropy(model(x), target).backward()

        return model, step

    check_contract(build, contracts.loss_parallel(rows=6), mesh={"tp": 2})


@pytest.mark.fast
def test_the_contract_of_fully_sharded_units() -> None:
    assert str(contracts.fully_shard({"layers.*": 1000}, gradient_ratio=2, padding=24)).splitlines() == [
        "layers.*, forward: 1 all_gather of 1 kB to 1.02 kB",
        "layers.*, backward: 1 all_gather of 1 kB to 1.02 kB",
        "layers.*, backward: 1 reduce_scatter of 2 kB to 2.02 kB",
    ]
    assert len(contracts.fully_shard({"": 10}, reshard_after_forward=False).lines) == 2
