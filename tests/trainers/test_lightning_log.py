"""What a slot logs again takes a short way past Lightning's checks: it must say what the long way says."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from phalanx.lightning._logged_values import SlotLog

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore")]


class Module(pl.LightningModule):
    """Its values are logged in Lightning's own way the first time, in ours after that."""


class Overridden(Module):
    """Its ``log`` is the user's, so every call goes through it."""

    def log(self, name, value, *args, **options):
        super().log(name, value, *args, **options)


class Slots:
    """Slots of steps without a job: ``entries`` has what each was told."""

    def __init__(self, module: pl.LightningModule) -> None:
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.state.fn, trainer.training = "fit", True
        module._trainer, module._current_fx_name = trainer, "training_step"
        self.module, self.results = module, trainer._results
        self.slot_log = SlotLog(module, trainer._logger_connector)
        self.entries: list[tuple] = []
        self.num_long = 0

    @contextmanager
    def step(self, count=1):
        """Give ``count`` slots of one step, and count the calls that went Lightning's way."""
        micro = SimpleNamespace(batch=[0], num_samples=4, log=lambda *entry: self.entries.append(entry))
        with self.slot_log.recording(self.results, [micro] * count) as slots:
            take = self.results.log

            def counted(*args, **options):
                self.num_long += 1
                take(*args, **options)

            self.results.log = counted
            yield slots


def told(module) -> tuple[list[tuple], int]:
    slots = Slots(module)
    for number in range(3):
        with slots.step(2) as found:
            for _ in found:
                value = torch.tensor(number + 0.1, requires_grad=True)
                module.log("loss", value * 1, on_step=True, on_epoch=True, prog_bar=True)
                module.log("sized", value * 2, batch_size=number + 1)
                module.log("float", 0.1 * number)
                module.log("place", value, True)
                module.log_dict({"a": value, "b": torch.tensor([number])})
                if number:
                    module.log("late", value)
    return slots.entries, slots.num_long


def test_the_short_way_tells_what_the_long_way_tells():
    (short, num_short), (long, num_long) = told(Module()), told(Overridden())
    assert short == long
    assert num_long == len(long)
    assert num_short == 18, "six times 'float' and 'place', which are no tensor and no keyword; the others once each"


def test_a_value_logged_elsewhere_meanwhile_sends_the_next_one_the_long_way():
    """In an epoch's first batch Lightning resets what a hook had logged before, when another one comes."""
    module = Module()
    slots = Slots(module)
    for _ in range(3):
        with slots.step() as found:
            for _ in found:
                module.log("loss", torch.ones(()))
        slots.module.trainer._logger_connector._current_fx = "on_train_batch_end"
    assert slots.num_long == 3


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [(torch.ones(3), {}, "loss"), (torch.ones(()), {"reduce_fx": "max"}, "expected the mean")],
)
def test_what_is_refused_is_refused_after_it_was_logged_rightly(value, options, message):
    module = Module()
    slots = Slots(module)
    with slots.step() as found:
        for _ in found:
            module.log("loss", torch.ones(()))
            with pytest.raises(ValueError, match=message):
                module.log("loss", value, **options)
    assert "log" not in vars(module)
    assert "log" not in vars(slots.results)


def test_means_are_replayed_as_lightning_logs_them_and_changed_arguments_refused():
    module = Module()
    slots = Slots(module)
    with slots.step() as found:
        for _ in found:
            module.log("loss", torch.ones(()), on_step=True, on_epoch=True)
    ((key, _, _),) = slots.entries
    for mean in (1.0, 2.0, 6.0):
        slots.slot_log.replay(slots.results, {key: mean}, 4)
    metric = slots.results["training_step.loss"]
    assert float(metric.compute()) == 3.0
    assert float(metric._forward_cache) == 6.0
    with slots.step() as found:
        for _ in found:
            module.log("loss", torch.ones(()), on_step=False, on_epoch=True)
    with pytest.raises(Exception, match="twice"):
        slots.slot_log.replay(slots.results, {slots.entries[-1][0]: 1.0}, 4)
