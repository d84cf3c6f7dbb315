"""What every worker knows of the checkpoints, which the writer alone writes: which there are, and which are due.

Lightning asks every worker for a checkpoint, and only the writer writes. If it dies before it has, nobody would: so the
others keep a copy of what was to be written in the step under way, since callbacks may put averages in the place of
the weights meanwhile. The one that writes from then on writes it where the next step begins, or the job ends. The next
commit forgets it: whoever wrote was there, and had written. While they copy, the writer writes.

Whether a name is taken is asked of the disk once, by the first worker to need it, and is then what the job has done to
that file: Lightning asks the writer alone, and the others would go on with other names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from phalanx.elastic import write_once

UNSAVED = ("current_score", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""What a ModelCheckpoint goes by and does not save."""


class CheckpointFiles:
    def __init__(self) -> None:
        self._due: dict[str, Callable[[], None]] = {}
        self._is_owed = False
        """Whether this worker has come to be the writer since."""
        self._is_there: dict[str, bool] = {}
        """Which files the job has written, or found, and which it has removed, or not found."""

    def note_save(self, path: Any, checkpoint: Any, write: Callable[[Any], None], *, is_writer: bool) -> None:
        self._is_there[str(path)] = True
        if is_writer:
            write(checkpoint)
            return
        copy = copy_of(checkpoint)
        self._keep(str(path), lambda: write(copy))

    def note_removal(self, path: Any, remove: Callable[[], None], *, is_writer: bool) -> None:
        self._is_there[str(path)] = False
        if is_writer:
            remove()
        else:
            self._keep(str(path), remove)

    def _keep(self, path: str, deed: Callable[[], None]) -> None:
        self._due.pop(path, None)  # the last deed to a file counts, and is done after the others
        self._due[path] = deed

    def forget(self) -> None:
        self._due.clear()

    def inherit(self) -> None:
        """This worker writes from now on."""
        self._is_owed = True

    def settle(self, trainer: Any) -> None:
        """Do what the writer before may not have done; once."""
        if not self._is_owed:
            return
        self._is_owed = False
        for deed in self._due.values():
            deed()
        self._due.clear()
        for callback in _model_checkpoints(trainer):
            saved, link = callback._last_checkpoint_saved, callback.last_model_path
            if callback.save_last == "link" and callback.save_top_k and saved and link:
                callback._link_checkpoint(trainer, saved, link)

    def answer_for(self, trainer: Any) -> None:
        """Have the callbacks of this trainer ask here whether a file is there."""
        for callback in _model_checkpoints(trainer):
            callback.file_exists = partial(self._exists, callback._fs)

    def _exists(self, fs: Any, filepath: Any, trainer: Any) -> bool:
        path = str(filepath)
        if path not in self._is_there:
            self._is_there[path] = write_once(f"lightning-file-{path}", str(bool(fs.exists(path)))) == "True"
        return self._is_there[path]

    # -- what a newcomer takes over ---------------------------------------------------------------------------

    def state_of(self, trainer: Any) -> dict[str, Any]:
        callbacks = _model_checkpoints(trainer)
        return {
            "is_there": dict(self._is_there),
            "unsaved": [{name: getattr(callback, name) for name in UNSAVED} for callback in callbacks],
        }

    def take(self, state: dict[str, Any], trainer: Any) -> None:
        self._is_there.update(state["is_there"])
        for callback, values in zip(_model_checkpoints(trainer), state["unsaved"], strict=True):
            for name, value in values.items():
                setattr(callback, name, value)


def _model_checkpoints(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def copy_of(checkpoint: Any) -> Any:
    """Return a copy, with its tensors in the memory of the host."""
    return deepcopy(checkpoint, {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in _tensors(checkpoint)})


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
