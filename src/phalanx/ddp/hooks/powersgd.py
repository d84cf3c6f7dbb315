"""Sends gradients as products of thin matrices: PowerSGD (Vogels et al., 2019, arXiv:1905.13727).

A gradient matrix M (n x m) is approximated by P Qᵀ with r columns each. One power iteration per step, shared by all
ranks: P = mean(M Q), orthonormalised; Q = mean(Mᵀ P); M ≈ P Qᵀ. Q is kept for the next step (warm start), and what
the approximation lost is added to the next gradient (error feedback). For the first ``start_powerSGD_iter`` steps
gradients are reduced in full.

Phases of ``powerSGD_hook`` per bucket: 1. tensors that are not worth it are packed and averaged as they are; 2. all P
in one all-reduce; 3. all Q in one all-reduce; 4. the products are written over the gradients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from phalanx.ddp.buckets._bucket import GradBucket
from phalanx.ddp.buckets._local_tensors import local_part
from phalanx.ddp.hooks._future import LazyFuture, finished
from phalanx.ddp.hooks._hook_group import resolve
from phalanx.ddp.hooks.default import mean_over

logger = logging.getLogger(__name__)


class PowerSGDState:
    """Settings, and what is remembered between steps. A pickled one leaves its group out: the current one is used.

    To resume, give each rank its own state back before the first step: buckets then start in the order they had, so
    training goes on as if it had not stopped. What is remembered of a bucket is dropped once it holds other parameters.

    >>> state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)   # doctest: +SKIP
    >>> ddp.register_comm_hook(state, powerSGD_hook)                                         # doctest: +SKIP

    ``matrix_approximation_rank`` is r. A tensor is compressed if that makes it ``min_compression_rate`` times smaller.
    ``orthogonalization_epsilon`` guards against columns of zeros. ``batch_tensors_with_same_shape`` multiplies
    tensors of one shape together.
    """

    _REMEMBERED: ClassVar[tuple[str, ...]] = ("error_dict", "p_memory_dict", "q_memory_dict")

    def __init__(
        self,
        process_group: Any,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(
                f"start_powerSGD_iter={start_powerSGD_iter}; expected at least 2 with error feedback or warm start, "
                "since buckets are cut anew after the first step"
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        # Draws the seeds of new Q matrices; seeded equally on all ranks, so that all draw the same.
        self.rng = np.random.RandomState(random_seed)
        self.error_dict: dict[int, Tensor] = {}
        self.p_memory_dict: dict[int, Tensor] = {}
        self.q_memory_dict: dict[int, Tensor] = {}
        self.layouts: dict[int, tuple[int, ...]] = {}
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.next_stats_report = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "process_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.process_group = None

    @property
    def bucket_order(self) -> list[int]:
        """Parameters in the order of the buckets that are remembered; empty before compression began."""
        return [member for index in sorted(self.layouts) for member in self.layouts[index]]

    def recall(self, bucket: GradBucket) -> int:
        """Return the key of what is remembered of this bucket. Memory of other parameters is dropped, never
        misapplied."""
        index, members = bucket.index(), bucket.members()
        if self.layouts.get(index, members) != members:
            logger.info("PowerSGD forgets what it knew of bucket %d: its parameters changed", index)
            for name in self._REMEMBERED:
                getattr(self, name).pop(index, None)
        self.layouts[index] = members
        return index

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count steps: the last bucket ends one."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                logger.info("PowerSGD starts after %d steps", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, elements before, elements after), summed over all steps so far."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0, before, after)

    def count(self, before: int, after: int) -> None:
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after

    def report(self, bucket: GradBucket) -> None:
        if bucket.is_last() and self.iter >= self.next_stats_report:
            logger.info(
                "PowerSGD step %d: compression rate %.2f (%d to %d elements)",
                self.iter,
                *self.compression_stats(),
            )
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    def add_error(self, index: int, tensor: Tensor) -> Tensor | None:
        """Add what the last step lost; returns a copy of the sum, to see later what this step loses."""
        if not self.use_error_feedback:
            return None
        error = self.error_dict.get(index)
        if error is not None and error.shape == tensor.shape:  # another shape: buckets were cut anew since
            tensor.add_(error)
        return tensor.clone()

    def keep_error(self, index: int, wanted: Tensor | None, got: Tensor) -> None:
        if wanted is not None:
            self.error_dict[index] = wanted.sub_(got)
        if not self.warm_start:
            self.p_memory_dict.pop(index, None)
            self.q_memory_dict.pop(index, None)

    def memory(self, index: int, p_size: int, q_size: int, like: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Flat P and Q of a bucket, and whether Q is new and must be drawn."""
        p, q = self.p_memory_dict.get(index), self.q_memory_dict.get(index)
        if p is not None and q is not None and (p.numel(), q.numel()) == (p_size, q_size) and p.dtype == like.dtype:
            return p, q, False
        p, q = like.new_empty(p_size), like.new_empty(q_size)
        self.p_memory_dict[index], self.q_memory_dict[index] = p, q
        return p, q, True

    def draw(self, matrices: Sequence[Tensor]) -> None:
        """Fill with numbers that are the same on all ranks and differ from step to step."""
        generator = torch.Generator().manual_seed(int(self.rng.randint(1_000_000_000)))
        for matrix in matrices:
            matrix.copy_(torch.randn(*matrix.shape, dtype=matrix.dtype, generator=generator))


def orthogonalize(matrices: Tensor, epsilon: float = 0) -> None:
    """Orthonormalise the columns of a batch of matrices (batch x n x r), in place.

    Gram-Schmidt for few columns and for half precision, which QR does not know; otherwise QR.
    """
    num_columns = matrices.shape[2]
    if num_columns > 2 and matrices.dtype not in (torch.float16, torch.bfloat16):
        matrices.copy_(torch.linalg.qr(matrices).Q)
        return
    for index in range(num_columns):
        column = matrices[:, :, index : index + 1]
        column /= torch.norm(column, dim=1, keepdim=True) + epsilon
        if index + 1 < num_columns:
            rest = matrices[:, :, index + 1 :]
            rest -= torch.sum(column * rest, dim=1, keepdim=True) * column


@dataclass(frozen=True)
class _Thin:
    """A batch of gradient matrices (batch x n x m) with its P (batch x n x r) and Q (batch x m x r)."""

    matrices: Tensor
    originals: list[Tensor]
    p: Tensor
    q: Tensor


def _worth_compressing(n: int, m: int, rank: int, rate: float) -> bool:
    return (n + m) * rank * rate < n * m


def _batches(matrices: list[Tensor], same_shape_together: bool) -> list[tuple[Tensor, list[Tensor]]]:
    """Matrices in the order of their shapes' first appearance; stacked if asked for."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    batches = []
    for group in by_shape.values():
        if same_shape_together and len(group) > 1:
            batches.append((torch.stack(group), group))
        else:
            batches.extend((matrix.unsqueeze(0), []) for matrix in group)
    return batches


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Compress tensor by tensor; see the module's text."""
    group, buffer = resolve(state.process_group), bucket.buffer()
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return mean_over(group, buffer)
    index = state.recall(bucket)
    wanted = state.add_error(index, buffer)

    def rank_of(n: int, m: int) -> int:
        return min(n, m, state.matrix_approximation_rank)

    to_compress: list[Tensor] = []
    others: list[Tensor] = []
    params = [local_part(param) for param in bucket.parameters()]
    # Parts of the buffer as they lie in memory: rows are what the parameter's first dimension counts.
    for param, piece in zip(params, torch.split(buffer, [param.numel() for param in params]), strict=True):
        matrix = piece.view(param.shape[0] if param.dim() and param.numel() else 1, -1)
        n, m = matrix.shape
        compress = _worth_compressing(n, m, rank_of(n, m), state.min_compression_rate)
        state.count(n * m, (n + m) * rank_of(n, m) if compress else n * m)
        (to_compress if compress else others).append(matrix)
    state.report(bucket)
    batches = _batches(to_compress, state.batch_tensors_with_same_shape)
    shapes = [(len(stack), *stack.shape[1:], rank_of(*stack.shape[1:])) for stack, _ in batches]
    p_sizes = [count * n * r for count, n, m, r in shapes]
    q_sizes = [count * m * r for count, n, m, r in shapes]
    all_p, all_q, is_new = state.memory(index, sum(p_sizes), sum(q_sizes), buffer)
    thin = [
        _Thin(stack, originals, p.view(count, n, r), q.view(count, m, r))
        for (stack, originals), (count, n, m, r), p, q in zip(
            batches, shapes, torch.split(all_p, p_sizes), torch.split(all_q, q_sizes), strict=True
        )
    ]
    if is_new:
        state.draw([part.q for part in thin])
    for part in thin:
        orthogonalize(part.q, state.orthogonalization_epsilon)
        torch.bmm(part.matrices, part.q, out=part.p)
    packed = torch.cat([other.reshape(-1) for other in others]) if others else buffer.new_empty(0)
    work = group.all_reduce(packed, async_op=True)

    def finish() -> Tensor:
        work.wait()
        packed.div_(group.size)
        for other, value in zip(others, torch.split(packed, [other.numel() for other in others]), strict=True):
            other.copy_(value.view_as(other))
        group.all_reduce(all_p)  # not divided: orthonormalising forgets the length
        for part in thin:
            orthogonalize(part.p, state.orthogonalization_epsilon)
            torch.bmm(part.matrices.transpose(1, 2), part.p, out=part.q)
        group.all_reduce(all_q)
        all_q.div_(group.size)
        for part in thin:
            torch.bmm(part.p, part.q.transpose(1, 2), out=part.matrices)
            for original, matrix in zip(part.originals, part.matrices, strict=False):
                original.copy_(matrix)
        state.keep_error(index, wanted, buffer)
        state.maybe_increase_iter(bucket)
        return buffer

    return LazyFuture(finish)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Compress the whole bucket as one square matrix (padded with zeros): faster, much coarser."""
    group, buffer = resolve(state.process_group), bucket.buffer()
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return mean_over(group, buffer)
    side = math.ceil(math.sqrt(buffer.numel()))
    if not side:
        state.maybe_increase_iter(bucket)
        return finished(buffer)
    rank = min(side, state.matrix_approximation_rank)
    state.count(buffer.numel(), 2 * side * rank)
    state.report(bucket)
    padded = torch.nn.functional.pad(buffer, (0, side * side - buffer.numel()))
    index = state.recall(bucket)
    wanted = state.add_error(index, padded)
    matrix = padded.view(1, side, side)
    flat_p, flat_q, is_new = state.memory(index, side * rank, side * rank, buffer)
    p, q = flat_p.view(1, side, rank), flat_q.view(1, side, rank)
    if is_new:
        state.draw([q[0]])
    orthogonalize(q, state.orthogonalization_epsilon)
    torch.bmm(matrix, q, out=p)
    work = group.all_reduce(flat_p, async_op=True)

    def finish() -> Tensor:
        work.wait()
        orthogonalize(p, state.orthogonalization_epsilon)
        torch.bmm(matrix.transpose(1, 2), p, out=q)
        group.all_reduce(flat_q)
        flat_q.div_(group.size)
        torch.bmm(p, q.transpose(1, 2), out=matrix)
        state.keep_error(index, wanted, padded)
        state.maybe_increase_iter(bucket)
        return buffer.copy_(padded[: buffer.numel()])

    return LazyFuture(finish)
