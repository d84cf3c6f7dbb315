"""Fills tensors of any layout from files that we or others wrote; each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from phalanx.shard.checkpoint._checkpoint import Readable, read_into
from phalanx.shard.checkpoint._saved import open_saved, prefix_of
from phalanx.shard.exchange._groups import as_group
from phalanx.storage import RemotePath


def load(
    path: str | Path | RemotePath,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    verify: bool | Literal["full"] = True,
    process_group: Any = None,
    secret: bytes | None = None,
) -> None:
    """Fill the tensors of ``state`` in place from a checkpoint saved under any layout and any number of ranks.

    ``path`` may also be what another tool wrote: a safetensors file, or a folder with ``model.safetensors`` or several
    files and an index, a folder of ``torch.distributed.checkpoint``, a file of ``torch.save`` (tensors only) or a
    folder with ``pytorch_model.bin``. Each rank reads only what it holds. Where all tensors of ``state`` stand below
    one key (``model``, say), it is found by itself.

    Without ``strict``, tensors that the checkpoint does not have stay as they are. No collective, except that with
    ``process_group`` the ranks wait for one another at the end. ``verify`` and ``secret``: see ``Checkpoint``.

    >>> load("checkpoints/step-100", model.state_dict())        # doctest: +SKIP

    Raises:
        CheckpointError: the checkpoint is missing, torn or damaged; the message names file and tensor.
        KeyError: a tensor is not in it. ValueError: one has another size.
    """
    fill_state(open_saved(path, verify=verify, secret=secret), state, strict=strict)
    if process_group is not None:
        as_group(process_group).barrier()


def fill_state(saved: Readable, state: Mapping[str, Any], *, strict: bool) -> None:
    """Fill the tensors of ``state`` in place with those of a reader."""
    known = set(saved.names())
    prefix = prefix_of(known, list(state))
    for name, target in state.items():
        if prefix + name in known or strict:
            read_into(saved, prefix + name, target)
