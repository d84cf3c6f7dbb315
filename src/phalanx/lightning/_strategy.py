"""ElasticStrategy: Lightning's loop around the steps of an elastic job.

Lightning iterates over step numbers and sees a world of one worker. The job is asked for the next step where Lightning
fetches its next batch, so workers join and leave before any hook of that batch. ``optimizer_step`` computes this
worker's slots with Lightning's closure, sums the gradients, runs the hooks and the clipping, and commits; a step that
was dropped is computed again there, so no exception and no repeated batch passes through Lightning's loops. A worker
that took a step over runs its own end of that batch. Only hooks of ``Strategy`` are used, and the private names that
``phalanx.lightning`` lists.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import Tensor
from torch.utils.data import DataLoader

from phalanx._devices import of
from phalanx.elastic import Callbacks, Job, Micro, RunOptions, Step, write_once
from phalanx.elastic._rng import derive_seed, seed_everything
from phalanx.integrations.step_loader import LoaderPlan, SharedBatches, StepLoader, check_options
from phalanx.lightning import _log_writer, _refusals
from phalanx.lightning._checkpoint_files import CheckpointFiles
from phalanx.lightning._logged_values import SlotLog, recording, replay
from phalanx.lightning._trainer_state import TrainerState

_TRANSFER_HOOKS = ("transfer_batch_to_device", "on_after_batch_transfer")
_SLOT_HOOKS = (*_TRANSFER_HOOKS, "on_before_backward", "on_after_backward")


class ElasticStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # an extra: mypy sees no types of it
    """Trains on workers that may die, leave or join; under ``phalanx run --on-failure heal``, or in one process.

    >>> Trainer(strategy=ElasticStrategy(num_slots=8, seed=0), max_epochs=3)     # doctest: +SKIP

    The batch size of the training loader is that of one of ``num_slots`` slots, so a step has ``num_slots`` of them,
    for any number of workers. ``evaluate="everywhere"``: each worker validates on everything, with any metric;
    ``"shared"``: validation batches are shared out, and what ``validation_step`` logs has to be means over batches.
    """

    strategy_name = "phalanx"

    def __init__(
        self,
        num_slots: int = 8,
        seed: int = 0,
        evaluate: Literal["everywhere", "shared"] = "everywhere",
        run: RunOptions = RunOptions(progress=False),  # noqa: B008  # a frozen value
        **options: Any,
    ) -> None:
        check_options(num_slots, evaluate)
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if of("cuda").count() else "cpu"
        super().__init__(**{"device": device, **options})
        self.num_slots = num_slots
        self.seed = seed
        self.evaluate = evaluate
        self.run = run
        self.job: Job | None = None
        self._loader: StepLoader | None = None
        self._state: TrainerState | None = None
        self._steps: Iterator[Step] | None = None
        self._step: Step | None = None
        self._micro: Micro | None = None
        self._slot_log: SlotLog | None = None
        self._heard: frozenset[str] = frozenset()
        self._tails: list[_log_writer.LogTail] = []
        self.files = CheckpointFiles()
        self._num_broadcasts: dict[int, int] = {}

    # -- who writes -------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        return _log_writer.is_first() if self.job is None else self.job.is_writer

    @property
    def global_rank(self) -> int:
        """Return 0 where this worker writes, else 1."""
        return 0 if self.is_global_zero else 1

    @global_rank.setter
    def global_rank(self, rank: int) -> None:
        """Lightning sets it; the job decides."""

    def setup_environment(self) -> None:
        super().setup_environment()
        _log_writer.set_writer(self.is_global_zero)
        _log_writer.agree_on_versions(self._trainer.loggers)
        if not self._tails:
            self._tails = [_log_writer.LogTail(logger) for logger in self._trainer.loggers]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what the first worker said at this place: names of directories, which files are there."""
        if not isinstance(obj, (str, bool, int)):
            return obj
        step = -1 if self.job is None else self.job.step
        number = self._num_broadcasts[step] = self._num_broadcasts.get(step, -1) + 1
        said = write_once(f"lightning-{step}-{number}", str(obj))
        return said == "True" if isinstance(obj, bool) else type(obj)(said)

    def _follow_writer(self, _: str) -> None:
        assert self.job is not None, "it tells"
        _log_writer.set_writer(self.job.is_writer)
        if self.job.is_writer:
            self.files.inherit()
            for tail in self._tails:
                tail.take_over()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        def write(checkpoint: dict[str, Any]) -> None:
            super(ElasticStrategy, self).save_checkpoint(checkpoint, filepath, storage_options)

        if self._is_in_job:
            self.files.note_save(filepath, checkpoint, write, is_writer=self.is_global_zero)
        else:
            write(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        remove = partial(super().remove_checkpoint, filepath)
        if self._is_in_job:
            self.files.note_removal(filepath, remove, is_writer=self.is_global_zero)
        else:
            remove()

    @property
    def _is_in_job(self) -> bool:
        return self.job is not None and not self.job.is_finishing

    # -- the beginning and the end ----------------------------------------------------------------------------

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None, "Lightning connects it first"
        return self.lightning_module.trainer

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self._trainer
        if not trainer.training:
            is_shared = self.evaluate == "shared" and (trainer.validating or trainer.sanity_checking)
            return SharedBatches(dataloader) if is_shared and trainer.state.fn == "fit" else dataloader
        self._loader = StepLoader(LoaderPlan.of(dataloader), self.num_slots, self._next_number)
        return self._loader

    def setup_optimizers(self, trainer: Any) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:  # Lightning would have them optimized by hand, which a job cannot do either
            if "multiple optimizers" in str(error):
                raise _refusals.several_optimizers("several") from error
            raise

    def setup(self, trainer: Any) -> None:
        if trainer.training:
            _refusals.check_trainer(trainer, self.lightning_module)
        super().setup(trainer)
        if trainer.training:
            _refusals.check_optimizers(self.optimizers)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Begin the job where Lightning, after it has restored its checkpoint, is about to run its loops."""
        if (args or tuple(kwargs.values())) == ("run-stage",) and self._trainer.training:
            self._begin()

    def _begin(self) -> None:
        trainer = self._trainer
        trainer.fit_loop.setup_data()
        assert self._loader is not None, "Lightning has asked for it now"
        assert self.lightning_module is not None, "Lightning connects it first"
        self._state = TrainerState(trainer)
        plan = self._loader.plan
        job = Job(
            self.lightning_module,
            self.optimizers[0],
            plan.dataset,
            num_slots=self.num_slots,
            slot_batch_size=plan.slot_batch_size,
            seed=self.seed,
            scaler=getattr(self.precision_plugin, "scaler", None),
            data=plan.data,
            run=self.run,
            callbacks=Callbacks(on_writer=self._follow_writer),
            loop_state={"trainer": self._state},
        )
        self.files.answer_for(trainer)
        if trainer.global_step:
            job.continue_at(trainer.global_step)
        job.begin()
        self._slot_log = SlotLog(self.lightning_module, trainer._logger_connector)
        self.job = job
        self._steps = job.steps(until_finish=True)
        _log_writer.set_writer(job.is_writer)
        if job.is_writer and not self._state.is_taken:
            print(_refusals.NOT_HEALED, file=sys.stderr, flush=True)
        if job.is_finishing:  # it came after the last step: there is no batch, and what follows the fit runs
            trainer.should_stop = True
            self._finish()

    def on_train_start(self) -> None:
        assert self._state is not None, "the job has begun"
        self._state.go_on_at_next_batch()

    def on_train_end(self) -> None:
        self._finish()

    def _finish(self) -> None:
        assert self.job is not None, "the job has begun"
        assert self._steps is not None, "the job has begun"
        self.job.finish()
        assert next(self._steps, None) is None, "there is no step after the last one"
        self.files.settle(self._trainer)

    # -- one step ---------------------------------------------------------------------------------------------

    def _next_number(self) -> int:
        return self._take_step().number

    def _take_step(self) -> Step:
        assert self._steps is not None, "the job has begun"
        self._step = next(self._steps)
        self.files.settle(self._trainer)
        return self._step

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if not isinstance(closure, Closure):
            raise ValueError(
                f"strategy 'phalanx' does not take an optimizer_step that gives its own closure, a "
                f"{type(closure).__name__}: the job runs it once per slot. Pass on the one that Lightning gave"
            )
        zero_grad, closure._zero_grad_fn = closure._zero_grad_fn, None
        if zero_grad is not None:
            zero_grad()  # with its hooks, once per step; slots begin without gradients anyhow
        step = self._step
        assert step is not None, "it was asked for where the batch was fetched"
        while not self._attempt(step, optimizer, closure):
            step = self._take_step()  # the same one: it was dropped
        self.files.forget()
        assert self._slot_log is not None, "the job has begun"
        self._slot_log.replay(self._trainer._results, step.logs, step.num_samples)
        loss = torch.tensor(float("nan") if step.loss is None else step.loss, device=self.root_device)
        closure._result = ClosureResult(loss)
        return loss

    def _attempt(self, step: Step, optimizer: Any, closure: Closure) -> bool:
        """Compute this worker's part of a step and commit it; whether it is committed."""
        assert self._slot_log is not None, "the job has begun"
        self._heard = _heard_hooks(self._trainer)
        with self._slot_log.recording(self._trainer._results, step) as slots:
            for self._micro in slots:
                closure()
        self._micro = None
        if step.unscale():
            self.precision_plugin._after_closure(self.lightning_module, optimizer)
        return bool(step.commit())

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's on the batch of the slot; Lightning's own batch is the number of the step."""
        assert self._micro is not None, "a slot is computed"
        batch = self.precision_plugin.convert_input(self._micro.batch)
        is_moved_by_hooks = self._heard.intersection(_TRANSFER_HOOKS)
        moved = super().batch_to_device(batch) if is_moved_by_hooks else move_data_to_device(batch, self.root_device)
        return super().training_step(moved, *args[1:], **kwargs)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._trainer.training or isinstance(batch, DataLoader):
            return batch  # the number of a step, or a loader that validation_step shares out
        return super().batch_to_device(batch, device, dataloader_idx)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._micro is not None, "a slot is computed"
        if "on_before_backward" in self._heard:  # its hooks alone: the job scales
            Precision.pre_backward(self.precision_plugin, closure_loss, self.lightning_module)
        self._micro.backward(closure_loss)
        if (
            "on_after_backward" in self._heard
            or type(self.precision_plugin).post_backward is not Precision.post_backward
        ):
            return self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        return closure_loss.detach()

    # -- validation -------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Random numbers in a validation are the same on every worker."""
        if self.job is not None:
            seed_everything(derive_seed(self.seed, "validate", self.job.step))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's; of a loader that is shared out, on this worker's batches, and log the means of all."""
        loader: Any = args[0]
        if not isinstance(args[0], DataLoader):
            return super().validation_step(*args, **kwargs)
        if self._trainer.sanity_checking:
            return None
        assert self.job is not None, "the job has begun"
        results = self._trainer._results

        def score(batch: Any) -> dict[str, float]:
            found: dict[str, float] = {}
            with recording(results, batch, 1, lambda key, value, _: found.update({key: value})):
                moved = super(ElasticStrategy, self).batch_to_device(self.precision_plugin.convert_input(batch))
                super(ElasticStrategy, self).validation_step(moved, *args[1:], **kwargs)
            return found

        means = self.job.evaluate(loader.dataset, score, batch_size=loader.batch_size, collate_fn=loader.collate_fn)
        replay(results, means, len(loader.dataset))
        return None


def _heard_hooks(trainer: Any) -> frozenset[str]:
    """Return which hooks of a slot somebody has written: Lightning's way to call one costs more than its empty body."""
    owners = [(trainer.lightning_module, LightningModule), (trainer.datamodule, LightningDataModule)]
    owners += [(callback, Callback) for callback in trainer.callbacks]
    return frozenset(
        hook
        for hook in _SLOT_HOOKS
        for owner, parent in owners
        if owner is not None
        and hasattr(parent, hook)
        and getattr(getattr(owner, hook, None), "__func__", None) is not getattr(parent, hook)
    )


StrategyRegistry.register(ElasticStrategy.strategy_name, ElasticStrategy, description=ElasticStrategy.__name__)
