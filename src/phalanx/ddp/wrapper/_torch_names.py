"""Methods under the names that PyTorch's trainers call although they are private there.

A mixin of the wrapper. Where a name is about torch's own machinery (graph walks, sinks), docs/parity.md says what
does its work here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from phalanx import comm
from phalanx._torch_faults import check_fused_tensors
from phalanx.ddp.hooks import optimizer_overlap
from phalanx.ddp.hooks._builtin import builtin_hook
from phalanx.ddp.hooks._signature import check_comm_hook
from phalanx.ddp.wrapper import _values as values
from phalanx.ddp.wrapper._buffers import (
    BROADCAST_BYTES,
    BufferCommHookLocation,
    BufferHook,
    broadcast_coalesced,
    named_buffers,
    sync_module_states,
)
from phalanx.ddp.wrapper._logging import logging_data

if TYPE_CHECKING:
    from phalanx.ddp.reducer._reducer import Reducer
    from phalanx.ddp.wrapper._wrapper import DistributedDataParallel


class TorchNames:
    """See the module's text. Expects the attributes of ``DistributedDataParallel``."""

    _active_ddp_module: ClassVar[Any] = None
    broadcast_bucket_size = BROADCAST_BYTES
    use_side_stream_for_tensor_copies = False
    _divide_by_initial_world_size = True
    _has_sink_clone = True

    if TYPE_CHECKING:
        module: nn.Module
        buffer_hook: BufferHook | None
        reducer: Reducer | None
        _reducers: list[Reducer]

    # ---- inputs and outputs -----------------------------------------------------------------------------------

    def scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self: Any, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self: Any, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Inputs on the device, each in a tuple of one as if scattered to one device."""
        device = torch.device(self.device_type, device_id)
        moved, moved_kwargs = values.move_to(device, (inputs, kwargs))
        return (moved,), (moved_kwargs,)

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Say which wrapper is running its forward (compilers ask); nests."""
        previous, TorchNames._active_ddp_module = TorchNames._active_ddp_module, self
        try:
            yield
        finally:
            TorchNames._active_ddp_module = previous

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return TorchNames._active_ddp_module

    # ---- parameters -------------------------------------------------------------------------------------------

    def _build_params_for_reducer(self: Any) -> tuple[list[nn.Parameter], list[bool]]:
        """The parameters that take part, and which of them have sparse gradients."""
        members = self._scanner.members
        return [m.param for m in members], [m.sparse for m in members]

    def _build_debug_param_to_name_mapping(self: Any, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        names = {id(param): name for name, param in self.module.named_parameters()}
        unknown = [index for index, param in enumerate(parameters) if id(param) not in names]
        if unknown:
            self._log_and_throw(ValueError, f"parameters {unknown} are not in the module")
        return {index: names[id(param)] for index, param in enumerate(parameters)}

    def _get_parameters(self: Any, m: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        for part in m.modules() if recurse else [m]:
            yield from part.parameters(recurse=False)

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, param in module.named_parameters():
            if not getattr(param, "_ddp_ignored", False):
                yield (name, param) if named_params else param

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Names (as in ``named_parameters`` and ``named_buffers``) that a wrapper of ``module`` leaves alone."""
        ignored = list(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]  # modules take any attribute
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in ignored:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]  # the mark that torch's own tools read

    # ---- buffers ----------------------------------------------------------------------------------------------

    @property
    def broadcast_buffers(self: Any) -> bool:
        return bool(self.forward_sync_buffers)

    @broadcast_buffers.setter
    def broadcast_buffers(self: Any, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def named_module_buffers(self: Any) -> dict[str, Tensor]:
        return named_buffers(self.module, self.parameters_to_ignore)

    @property
    def modules_buffers(self) -> list[Tensor]:
        return list(self.named_module_buffers.values())

    def _assign_modules_buffers(self) -> None:
        """Nothing to do: buffers are looked up by name each time."""

    def will_sync_module_buffers(self: Any) -> bool:
        if not (self.require_forward_param_sync and self.forward_sync_buffers):
            return False
        return next(iter(self.module.buffers()), None) is not None and bool(self.modules_buffers)

    def _check_sync_bufs_pre_fwd(self: Any) -> bool:
        before = self.buffer_hook is None or self.buffer_hook.location is BufferCommHookLocation.PRE_FORWARD
        return before and self.will_sync_module_buffers()

    def _check_sync_bufs_post_fwd(self: Any) -> bool:
        after = (
            self.buffer_hook is not None and self.buffer_hook.location is BufferCommHookLocation.POST_FORWARD
        )
        return after and self.will_sync_module_buffers()

    def _register_buffer_comm_hook(
        self: Any,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: BufferCommHookLocation = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, {name: buffer})`` synchronise buffers instead of the broadcast from rank 0.

        Futures that it returns (one or a list) are awaited at the end of backward.
        """
        if not callable(hook):
            raise AssertionError(f"a buffer hook must be callable, got {type(hook).__name__}")
        location = BufferCommHookLocation[comm_hook_location.name]  # torch's enum has the same names
        self.buffer_hook = BufferHook(hook, state, location)

    def _sync_buffers(self: Any) -> None:
        with torch.no_grad():
            src = self._find_common_rank(self._distributed_rank, True) if self._join_config.enable else 0
            self._sync_module_buffers(src)

    def _sync_module_buffers(self: Any, authoritative_rank: int) -> None:
        if self.buffer_hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        futures = self.buffer_hook.hook(self.buffer_hook.state, self.named_module_buffers)
        if futures is not None:
            waiting = list(futures) if isinstance(futures, list | tuple) else [futures]
            self._reducers[0].exchange.await_after_backward(waiting)

    def _default_broadcast_coalesced(
        self: Any,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        tensors = self.modules_buffers if bufs is None else bufs
        self._distributed_broadcast_coalesced(
            tensors, bucket_size or self.broadcast_bucket_size, authoritative_rank
        )

    def _distributed_broadcast_coalesced(
        self: Any, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_coalesced(self.group, tensors, authoritative_rank, buffer_size)

    # ---- join -------------------------------------------------------------------------------------------------

    @property
    def _distributed_rank(self: Any) -> int:
        return int(self.group.rank)

    def _divide_by_active(self: Any, active: int) -> None:
        for reducer in self._reducers:
            reducer.exchange.divisor = self.group.size if self._divide_by_initial_world_size else active

    def _find_common_rank(self: Any, input_rank: int, rank_cond: bool) -> int:
        """The highest rank for which ``rank_cond`` holds, agreed by all."""
        rank = torch.tensor([input_rank if rank_cond else -1], device=self.device)
        self.group.all_reduce(rank, "max")
        if rank.item() < 0:
            self._log_and_throw(ValueError, "no rank satisfies the condition")
        return int(rank.item())

    def _check_global_requires_backward_grad_sync(self: Any, is_joined_rank: bool) -> bool:
        """Whether the active ranks synchronise in this iteration; a joined rank asks, active ranks answer."""
        answer = torch.full((1,), float(not is_joined_rank and self._will_sync()), device=self.device)
        self.group.all_reduce(answer)
        return bool(answer.item())

    def _check_and_sync_module_buffers(self: Any) -> None:
        if self._check_sync_bufs_pre_fwd():
            self._sync_module_buffers(self._find_common_rank(self._distributed_rank, False))

    def _sync_final_model(self: Any, is_last_joiner: bool) -> None:
        src = self._find_common_rank(self._distributed_rank, is_last_joiner)
        buffers = self.forward_sync_buffers
        sync_module_states(self.group, self.module, self.parameters_to_ignore, src=src, buffers=buffers)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Take part in a backward pass of the other ranks with nothing to add."""
        for reducer in self._reducers:
            reducer.mirror_pass()

    def _match_unused_params_allreduce(self) -> None:
        """Nothing to do: what was used rides in the buckets."""

    # ---- hooks and optimizers ---------------------------------------------------------------------------------

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        check_comm_hook(hook)

    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        """Register one of the built-in hooks by torch's enum value (or its name): ALLREDUCE or FP16_COMPRESS."""
        self.register_comm_hook(self.group, builtin_hook(comm_hook_type))

    def _register_fused_optim(
        self: Any,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Iterable[nn.Parameter] | None = None,
        **kwargs: Any,
    ) -> None:
        """Update each parameter as soon as its gradient is reduced, within backward, with ``optim(..., *args)``."""
        given = None if optim_params is None else list(optim_params)
        hook = optimizer_overlap.fused_optimizer_hook(optim, given, args, kwargs)
        if kwargs.get("fused") and issubclass(optim, torch.optim.SGD):  # here, not in the first backward
            check_fused_tensors(self.module.parameters() if given is None else given, "_register_fused_optim")
        self.register_comm_hook(self.group, hook)

    def _lazy_init(self: Any) -> None:
        """Before the first forward: take over optimizers that were set to run in backward."""
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    def _setup_in_backward_optimizers(self: Any) -> None:
        params = [member.param for member in self._scanner.members]
        if optimizer_overlap.take_over(params):
            self.register_comm_hook(self.group, optimizer_overlap.in_backward_hook)
            self.reducer.after_pass.append(lambda: optimizer_overlap.clear_gradients(params))

    # ---- reducer ----------------------------------------------------------------------------------------------

    def _set_static_graph(self: Any) -> None:
        """Accepted for trainers that call it: nothing depends on the graph being static."""
        self.static_graph = True

    def _set_sparse_metadata(self: Any, global_unique_ids: dict[str, Tensor]) -> None:
        """Rows that any rank touches, by parameter name: then only their values travel."""
        self.reducer.exchange.sparse.set_metadata(global_unique_ids)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accepted: outputs are never cloned here."""
        self._has_sink_clone = val

    def _remove_autograd_hooks(self) -> None:
        for reducer in self._reducers:
            reducer.stop()

    def _check_reducer_finalized(self: Any) -> None:
        """Raise if a backward pass began and never came to its end."""
        for reducer in self._reducers:
            if reducer.is_busy:
                self._log_and_throw(
                    RuntimeError, f"rank {self.group.rank}: a backward pass began and was not finished"
                )

    def _rebuild_buckets(self) -> bool:
        """Whether buckets have been cut anew by the observed order (it happens by itself)."""
        return any(reducer.stats.rebuilds > 0 for reducer in self._reducers)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._rebuild_buckets()

    def _update_process_group(self: Any, new_process_group: Any) -> None:
        self.regroup(new_process_group)

    def _check_default_group(self: Any) -> None:
        """Only a wrapper of the current group can be pickled: the reader has no other to use."""
        try:
            same = self.process_group is comm.current_group() or self.group is comm.current_group()
        except RuntimeError:
            same = False
        if not same:
            self._log_and_throw(
                RuntimeError,
                "only a wrapper that uses the current (default) group can be pickled: another group has no meaning in "
                "the process that reads it",
            )

    # ---- logging ----------------------------------------------------------------------------------------------

    def _log_and_throw(self: Any, err_type: type[Exception], err_msg: str) -> NoReturn:
        self._stats.error = f"{err_type.__name__}: {err_msg}"
        raise err_type(err_msg)

    def _get_ddp_logging_data(self: DistributedDataParallel) -> dict[str, Any]:  # type: ignore[misc]  # a mixin of it
        return logging_data(self)

    def _set_ddp_runtime_logging_sample_rate(self: Any, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(ValueError, f"the sample rate is {sample_rate}; expected at least 1")
        self._stats.sample_rate = sample_rate
