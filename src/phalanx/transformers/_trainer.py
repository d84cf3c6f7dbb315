"""ElasticTrainer: Hugging Face's training loop around the steps of an elastic job.

The loop iterates over steps and sees a world of one worker. The job is asked for the next step where the loop fetches
its next batch, so workers join and leave before any callback of that step. ``training_step`` computes this worker's
slots, each weighted by the items in its batch, and sums the gradients; a step that was dropped is computed again there.
Clipping and callbacks follow, and ``optimizer.step`` is the job's commit. A worker that took a step over runs its own
end of it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import ProgressCallback, Trainer
from transformers import trainer as trainer_module
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from phalanx.elastic import Callbacks, Job, Micro, Outcome, RunOptions, Step
from phalanx.elastic._rng import derive_seed, seed_everything
from phalanx.elastic.reduce._norm_blocks import clip
from phalanx.integrations.step_loader import LoaderPlan, StepLoader, check_options
from phalanx.protocol import ENV_GENERATION, ENV_WORKER_ID
from phalanx.transformers._refusals import NOT_HEALED, check_arguments, check_sharding
from phalanx.transformers._trainer_state import LoopState

REPORTING = "transformers.integrations"
"""Where the callbacks are that tell trackers (TensorBoard and others) what is logged."""
REPORTED_AGAIN = 4
"""How many entries of the log a new writer reports again: more than a step and the evaluation after it make."""
BEST_CHECKPOINT = 600.0
"""Seconds to wait for the writer's best checkpoint after the last step; it writes it while others may be ahead."""


class ElasticTrainer(Trainer):  # type: ignore[misc]  # an extra: mypy sees no types of it
    """``transformers.Trainer`` on workers that may die, leave or join; or in one process.

    >>> ElasticTrainer(model=model, args=args, train_dataset=data, num_slots=8).train()     # doctest: +SKIP

    ``per_device_train_batch_size`` is the batch size of one of ``num_slots`` slots, so a step has ``num_slots`` of
    them, for any number of workers. ``evaluate="everywhere"``: each worker evaluates on everything;
    ``"shared"``: evaluation batches are shared out, and give the loss alone.
    """

    def __init__(
        self,
        *args: Any,
        num_slots: int = 8,
        evaluate: Literal["everywhere", "shared"] = "everywhere",
        run: RunOptions = RunOptions(progress=False),  # noqa: B008  # a frozen value
        **kwargs: Any,
    ) -> None:
        check_options(num_slots, evaluate)
        check_sharding(kwargs.get("args", args[1] if len(args) > 1 else None))
        self.num_slots = num_slots
        self.evaluates = evaluate
        self.run = run
        self.job: Job | None = None
        self._loader: StepLoader | None = None
        self._loop: LoopState | None = None
        self._prepared: tuple[Any, Any] | None = None
        self._steps: Iterator[Step] | None = None
        self._step: Step | None = None
        self._micro: Micro | None = None
        self._items: Any = None
        self._saved_at = -1
        """The step of the last checkpoint, whoever wrote it."""
        self._is_owed = False
        """Whether this worker has come to be the writer since."""
        self._scale: float | None = None
        """What the gradients of this batch's step were scaled by before it: a smaller one after it is an overflow."""
        self.control: Any = None
        super().__init__(*args, **kwargs)
        self._set_writer(is_writer=_is_first())

    # -- who writes -------------------------------------------------------------------------------------------

    def _set_writer(self, *, is_writer: bool) -> None:
        """Have what the trainer does in its first process done here, or not."""
        place = self.args.distributed_state
        place.process_index = place.local_process_index = 0 if is_writer else 1
        self.state.is_world_process_zero = self.state.is_local_process_zero = is_writer

    def _follow_writer(self, _: str) -> None:
        assert self.job is not None, "it tells"
        self._set_writer(is_writer=self.job.is_writer)
        self._is_owed = self.job.is_writer
        for callback in self.callback_handler.callbacks if self.job.is_writer else ():
            if isinstance(callback, ProgressCallback) and callback.training_bar is None:
                callback.on_train_begin(self.args, self.state, self.control)
            if type(callback).__module__.startswith(REPORTING):
                self._report_again(callback)

    def _report_again(self, callback: Any) -> None:
        """Tell a tracker what the writer before may have died with: twice, rather than not at all."""
        for entry in self.state.log_history[-REPORTED_AGAIN:]:
            logs = {name: value for name, value in entry.items() if name != "step"}
            state = dataclasses.replace(self.state, global_step=entry["step"])
            callback.on_log(self.args, state, self.control, logs=logs, model=self.model)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save, if this worker writes.

        Which checkpoint is the best follows from the steps, alike on all workers: the disk may not have it yet.
        """
        best = self.state.best_model_checkpoint
        self._saved_at = self.state.global_step
        super()._save_checkpoint(model, trial)
        is_best = self.state.best_global_step == self.state.global_step
        self.state.best_model_checkpoint = str(self._checkpoint) if is_best else best

    @property
    def _checkpoint(self) -> Path:
        """Where the checkpoint of the current step is, or would be."""
        return Path(self._get_output_dir(trial=None)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def _save_in_place_of(self) -> None:
        """Save again what a writer that was lost meanwhile may not have finished: nobody has trained on since."""
        if self._is_owed and self._saved_at == self.state.global_step:
            best = self.state.best_model_checkpoint
            super()._save_checkpoint(self.model, None)
            self.state.best_model_checkpoint = best  # an evaluation since may have found another
        self._is_owed = False

    def _load_best_model(self) -> None:
        if self.state.best_global_step == self.state.global_step:
            return  # it is the one at hand
        best = Path(self.state.best_model_checkpoint)
        until = time.monotonic() + BEST_CHECKPOINT
        while not _is_whole(best):
            if time.monotonic() > until:
                raise FileNotFoundError(
                    f"worker {os.environ.get(ENV_WORKER_ID, '0')}: {best} is not there, or not whole, after "
                    f"{BEST_CHECKPOINT:g} s, and load_best_model_at_end needs it; give an output_dir that all nodes "
                    "share, or load the best checkpoint yourself after train()"
                )
            time.sleep(0.05)
        super()._load_best_model()

    # -- the beginning and the end ----------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        self._loader = StepLoader(LoaderPlan.of(super().get_train_dataloader()), self.num_slots, self._next_batch)
        return self._loader

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(super().get_total_train_batch_size(args)) * self.num_slots

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        """Begin the job here, since a newcomer learns from it where to begin."""
        check_arguments(self, evaluate=self.evaluates)
        super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial)
        self._prepared = super()._prepare_for_training(max_steps, self._loader, resume)
        self._begin()
        return divmod(int(self.state.global_step), num_update_steps_per_epoch)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        return self._prepared

    def _begin(self) -> None:
        assert self._loader is not None, "the trainer asks for it first"
        plan = self._loader.plan
        self._loop = LoopState(self)
        job = Job(
            self.model,
            self.optimizer.optimizer,
            plan.dataset,
            num_slots=self.num_slots,
            slot_batch_size=plan.slot_batch_size,
            seed=self.args.seed,
            scaler=self.accelerator.scaler,
            data=plan.data,
            run=self.run,
            callbacks=Callbacks(on_writer=self._follow_writer),
            loop_state={"trainer": self._loop},
        )
        self.optimizer.step = self._commit
        self.accelerator.backward = self._backward
        if self.state.global_step:
            job.continue_at(self.state.global_step)
        job.begin()
        self.job = job
        self._steps = job.steps(until_finish=True)
        self._set_writer(is_writer=job.is_writer)
        if job.is_writer and not self._loop.is_taken:
            print(NOT_HEALED, file=sys.stderr, flush=True)

    def _run_epoch(self, **options: Any) -> None:
        assert self.job is not None, "the job has begun"
        assert self._loop is not None, "the job has begun"
        self._loop.restore_counters()
        if self.job.is_finishing:  # it came after the last step
            self.control.should_training_stop = True
            return
        if options["steps_trained_in_current_epoch"] and options["resume_from_checkpoint"] is None:
            options["resume_from_checkpoint"] = ""  # a newcomer: it begins in mid-epoch, from no file
        with mock.patch.object(trainer_module, "skip_first_batches", lambda loader, num_batches: loader):
            super()._run_epoch(**options)

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Random numbers are the job's, by step and slot."""

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        assert self.job is not None, "the job has begun"
        assert self._loop is not None, "the job has begun"
        assert self._steps is not None, "the job has begun"
        self._loop.restore_counters()
        self.job.finish()
        assert next(self._steps, None) is None, "there is no step after the last one"
        self._save_in_place_of()
        return super()._finalize_training(*args, **kwargs)

    # -- one step ---------------------------------------------------------------------------------------------

    def _next_batch(self) -> dict[str, int]:
        scaler = self.accelerator.scaler
        self._scale = None if scaler is None else scaler.get_scale()
        return {"step": self._take_step().number}

    def _take_step(self) -> Step:
        assert self._steps is not None, "the job has begun"
        self._step = next(self._steps)
        self._save_in_place_of()
        return self._step

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        return [next(epoch_iterator)], None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute this worker's slots of the step and sum the gradients, as often as it takes."""
        while not self._compute(model):
            self._take_step()  # the same one: it was dropped
        loss = self._current.loss
        return torch.tensor(float("nan") if loss is None else loss, device=self.args.device)

    @property
    def _current(self) -> Step:
        assert self._step is not None, "it was asked for where the batch was fetched"
        return self._step

    def _compute(self, model: nn.Module) -> bool:
        """Compute this worker's slots and sum; return whether the step is reduced, or was taken over from another."""
        step = self._current
        for micro in step:
            self._micro, batch = micro, micro.batch
            self._items = self._get_num_items_in_batch([batch], self.args.device)
            self.current_gradient_accumulation_steps = 1
            self._count(micro)
            super().training_step(model, batch, self._items)
        self._micro = None
        return step.unscale() or step.outcome is Outcome.ADOPTED

    def _backward(self, loss: Tensor, **kwargs: Any) -> None:
        assert self._micro is not None, "a slot is computed"
        self._micro.backward(loss, None if self._items is None else float(self._items))

    def _count(self, micro: Micro) -> None:
        """Log what the trainer counts of a batch, and nothing else: logs are told to all workers."""
        flos = super().floating_point_ops(micro.batch)
        if flos:
            micro.log("flos", float(flos), weight=1.0)
        if self.args.include_num_input_tokens_seen != "no":
            seen, self.state.num_input_tokens_seen = self.state.num_input_tokens_seen, 0
            super()._track_num_input_tokens(micro.batch)
            micro.log("tokens", float(self.state.num_input_tokens_seen), weight=1.0)
            self.state.num_input_tokens_seen = seen

    def _total(self, name: str) -> float:
        """Return the sum over the slots of what each has logged."""
        job, step = self.job, self._current
        assert job is not None, "the job has begun"
        if name not in step.logs:
            return 0.0
        num_slots = self.num_slots
        if step.num_samples < num_slots * job.slot_batch_size:  # the end of an epoch: some may be empty
            sampler = job.schedule.sampler
            num_slots = sum(bool(len(sampler.indices(step.number, slot))) for slot in range(num_slots))
        return step.logs[name] * num_slots

    def floating_point_ops(self, inputs: Any) -> int:
        return round(self._total("flos"))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        self.state.num_input_tokens_seen += round(self._total("tokens"))

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._norm(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm(model, float("inf")) if grad_norm is None else grad_norm

    def _norm(self, model: nn.Module, limit: float) -> Tensor:
        step = self._current
        if step.outcome is not Outcome.ADOPTED:
            params = [param for param in model.parameters() if param.requires_grad]
            step.grad_norm = clip([param.grad for param in params], [param.numel() for param in params], limit)
        return torch.tensor(step.grad_norm)

    def _commit(self, *args: Any, **kwargs: Any) -> None:
        """Stand in the place of ``optimizer.step``."""
        while self._current.outcome is not Outcome.ADOPTED and not self._current.commit():
            self._take_step()  # it was found not finite and is computed again
            self.training_step(self.model_wrapped, None)
            if self.args.max_grad_norm > 0:
                self._clip_grad_norm(self.model_wrapped)
        if self._scale is not None:  # compared with that of the fetch: a step that was taken over may have overflowed
            self.optimizer._is_overflow = self.accelerator.scaler.get_scale() < self._scale

    # -- evaluation -------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As ``Trainer.evaluate``; random numbers in it are the same on every worker."""
        if self.job is None:
            return dict(super().evaluate(*args, **kwargs))
        seed_everything(derive_seed(self.args.seed, "evaluate", self.job.step))
        if self.evaluates == "everywhere" or self._steps is None:
            return dict(super().evaluate(*args, **kwargs))
        return self._evaluate_shared(*args, **kwargs)

    def _evaluate_shared(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the mean loss over a dataset, each worker computing some of the batches."""
        assert self.job is not None, "the job has begun"
        loader = self.get_eval_dataloader(eval_dataset)

        def score(batch: Any) -> dict[str, Any]:
            loss = self.prediction_step(self.model, batch, prediction_loss_only=True)[0]
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            return {"loss": loss}

        means = self.job.evaluate(
            loader.dataset, score, batch_size=self.args.eval_batch_size, collate_fn=loader.collate_fn
        )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint is there to its last file, which is the trainer's state."""
    return bool((checkpoint / trainer_module.TRAINER_STATE_NAME).exists())


def _is_first() -> bool:
    """Return whether this process was the first worker of all, as far as it can tell before the workers have met."""
    worker = os.environ.get(ENV_WORKER_ID)
    return worker is None or (os.environ.get(ENV_GENERATION, "0") == "0" and worker.endswith(".0"))
