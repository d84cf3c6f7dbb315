"""DistributedDataParallel: a module whose gradients are shared by all ranks.

Owns construction, forward, and the user's interface; gradients are the reducer's. Methods that synchronise buffers are
functions of ``_module_buffers``, those that ``Join`` needs of ``_join_hook``, those that only PyTorch's trainers call
of ``_torch_names``.

Per forward: notice changed parameters, announce to a join context, synchronise buffers, move and cast inputs, run the
module, register a hook on every output so that backward's beginning is known.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from phalanx import _nested_values as values
from phalanx import comm
from phalanx.ddp.buckets._assignment import Caps
from phalanx.ddp.buckets._parameters import NamedParameter, ParameterScanner
from phalanx.ddp.hooks import mixed_precision as mixed_precision_hooks
from phalanx.ddp.hooks._hook_signature import check_comm_hook
from phalanx.ddp.reducer._reducer import Reducer, ReducerOptions
from phalanx.ddp.reducer._stats import Stats
from phalanx.ddp.wrapper import _constructor_arguments as arguments
from phalanx.ddp.wrapper import _join_hook as joining
from phalanx.ddp.wrapper import _module_buffers as buffers
from phalanx.ddp.wrapper import _torch_names as torch_names
from phalanx.ddp.wrapper._constructor_arguments import MixedPrecision
from phalanx.ddp.wrapper._join import Join, Joinable, JoinHook, group_of
from phalanx.ddp.wrapper._logging import log_environment, logging_data
from phalanx.ddp.wrapper._mixed import cast_buffers, cast_parameters
from phalanx.ddp.wrapper._replicas import CollectiveLog, compare_replicas, desync_report, verify_replicas
from phalanx.ddp.wrapper._torch_class import answer_for_torchs_class

if TYPE_CHECKING:
    from phalanx.comm import Group

DelayedParams = Sequence[tuple[str, nn.Parameter]]


class _CurrentForward(threading.local):
    ddp: DistributedDataParallel | None = None


_current_forward = _CurrentForward()


class DistributedDataParallel(nn.Module, Joinable):
    """Wrap ``module`` so that every backward pass leaves the same gradients on all ranks.

    >>> model = DistributedDataParallel(nn.Linear(10, 10))          # doctest: +SKIP
    >>> loss = model(batch).sum()                                    # doctest: +SKIP
    >>> loss.backward()                        # gradients are means over the ranks  # doctest: +SKIP

    The arguments up to ``forward_sync_buffers`` are those of PyTorch's class. Parameters that a rank does not use just
    work, so ``find_unused_parameters``, ``static_graph`` and ``skip_all_reduce_unused_params`` cost nothing; with one
    of the first two a parameter whose gradient is undefined on all ranks keeps the one it had, as there. A parameter
    may be a DTensor: this rank's part is what is shared, with the ranks of ``process_group`` or ``device_mesh``.
    Further, keyword-only:

    ``reduce``: ``"mean"``, ``"sum"``, or ``"weighted"`` (see ``set_step_weight``).
    ``fingerprint_every``: compare the replicas every so many synchronised steps; ``ReplicaDrift`` names who differs.
    ``keep_log``: remember the last collectives for ``desync_report``.

    Raises ``ReplicaMismatch`` if the ranks' modules differ; ``PeerLost`` out of ``backward`` if a peer dies, with
    ``.grad`` as before the step: call ``regroup`` with a new group and repeat the step.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: DelayedParams | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: MixedPrecision | None = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        reduce: str = "mean",
        fingerprint_every: int = 0,
        keep_log: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        arguments.check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        arguments.check_groups(process_group, device_mesh)
        arguments.check_reduce(reduce)
        arguments.warn_check_reduction(check_reduction)
        syncs = arguments.buffer_syncs(broadcast_buffers, forward_sync_buffers)
        delayed = list(delay_all_reduce_named_params or ())
        self._use_given_group(process_group, device_mesh)
        self.module = module
        self.dim = dim
        self.reduce = reduce
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.fingerprint_every = fingerprint_every
        self.forward_sync_buffers = syncs[0]
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.buffer_hook: buffers.BufferHook | None = None
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._delayed_names = {name for name, _ in delayed}
        self._delayed = [NamedParameter(name, param, False) for name, param in delayed]
        self._caps = Caps.from_options(bucket_cap_mb, bucket_cap_mb_list)
        self._comm_hooks: list[tuple[Callable[..., Any], Any]] = []
        self._stats = Stats()
        self._log = CollectiveLog() if keep_log else None
        self._lazy_init_ran = False
        scanner = self._make_scanner()
        arguments.check_module(module, [*scanner.members, *self._delayed], self.parameters_to_ignore)
        everything = [m.param for m in (*scanner.members, *self._delayed)]
        devices = arguments.check_devices(everything, device_ids, output_device)
        arguments.check_sync_batch_norm(module, devices.type)
        self.device_type, self.device_ids, self.output_device = devices.type, devices.ids, devices.output
        self.device = everything[0].device
        log_environment()
        if init_sync:
            self._sync_replicas(0, with_buffers=syncs[1])
        self._attach()
        if mixed_precision is not None:
            cast_buffers(module, mixed_precision.buffer_dtype, self.parameters_to_ignore)
            reduce_dtype = mixed_precision.reduce_dtype or mixed_precision.param_dtype
            if reduce_dtype is not None:
                hook = mixed_precision_hooks.allreduce_in(reduce_dtype)
                self.register_comm_hook(self.group, hook)

    # ---- building ---------------------------------------------------------------------------------------------

    def _use_given_group(self, process_group: Any, device_mesh: Any) -> None:
        self.device_mesh = device_mesh
        if device_mesh is not None:
            process_group = device_mesh.get_group(0)
        self.group: Group = group_of(process_group)
        self.process_group = self.group if process_group is None else process_group

    def _make_scanner(self) -> ParameterScanner:
        self._scanner = ParameterScanner(self.module, self.parameters_to_ignore | self._delayed_names)
        return self._scanner

    def _sync_replicas(self, src: int, *, with_buffers: bool) -> None:
        verify_replicas(self.group, [*self._scanner.members, *self._delayed])
        ignored = self.parameters_to_ignore
        buffers.sync_module_states(self.group, self.module, ignored, src=src, buffers=with_buffers)

    def _attach(self) -> None:
        """Build what belongs to this process and group; undone by pickling and copying."""
        view = self.gradient_as_bucket_view
        options = ReducerOptions(caps=self._caps, reduce=self.reduce, gradient_as_bucket_view=view)
        self.reducer: Reducer | None = None
        self._reducers: list[Reducer] = []
        if self._scanner.members:
            self.reducer = Reducer(self.group, self._scanner.members, options, self._stats)
            self._reducers.append(self.reducer)
        if self._delayed:
            # Launched only at the end of backward, so that the two sequences of collectives never interleave.
            options = ReducerOptions(
                caps=Caps((1 << 62,), True),
                reduce=self.reduce,
                gradient_as_bucket_view=view,
                launch_early=False,
            )
            self._reducers.append(Reducer(self.group, self._delayed, options, Stats()))
        for reducer in self._reducers:
            reducer.exchange.log = self._log
            reducer.undefined_is_unused = self.find_unused_parameters or self.static_graph
        for hook, state in self._comm_hooks:
            self._reducers[0].use_hook(hook, state)

    def regroup(self, group: Any, *, init_sync: bool = False, src: int = 0) -> None:
        """Go on in another group, e.g. after ``PeerLost``: a step under way is dropped, ``.grad`` is as before it.

        Call it between steps, on all ranks of the new group. With ``init_sync`` it checks the replicas and takes the
        states of rank ``src``, which is what a newly constructed wrapper on a joining rank does.
        """
        self.process_group, self.group = group, group_of(group)
        for reducer in self._reducers:
            reducer.regroup(self.group)
        if init_sync:
            self._sync_replicas(src, with_buffers=True)

    def request_regroup(self) -> None:
        """Ask for a new group: after the next synchronised step ``regroup_requested`` is true on every rank."""
        for reducer in self._reducers:
            reducer.wants_regroup = True

    @property
    def regroup_requested(self) -> bool:
        """Whether any rank had asked for a new group by the last synchronised step."""
        totals = self._reducers[0].totals
        return totals is not None and totals.regroup_wanted

    def set_step_weight(self, weight: float) -> None:
        """Set this rank's weight (e.g. tokens in its batch) for ``reduce="weighted"``; give it before each backward.

        It weighs the whole ``.grad`` of the step, including what ``no_sync`` passes accumulated.
        """
        if not weight >= 0:
            raise ValueError(f"rank {self.group.rank}: the weight of a step is {weight}; expected a number >= 0")
        for reducer in self._reducers:
            reducer.step_weight = float(weight)

    # ---- forward ----------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"), ExitStack() as stack:
            if self._log is not None:
                stack.enter_context(comm.observe(self._log))
            moved, moved_kwargs = self._pre_forward(*inputs, **kwargs)
            output = self._run_ddp_forward(*moved, **moved_kwargs)
            return self._post_forward(output)

    def _will_sync(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._lazy_init_ran:
            self._lazy_init()
        if self._will_sync():
            self._stats.begin_step()
            self._stats.current.forward_start = self._stats.now()
        if torch.is_grad_enabled():
            self._notice_changes()
        announcement = Join.notify_join_context(self)
        active = self.group.size if announcement is None else announcement.count()
        if announcement is not None:
            self._divide_by_active(active)
        if self.fingerprint_every and self._will_sync():
            compare_replicas(self, active, counted=announcement is not None)
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids is not None:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = values.move_to(device, (inputs, kwargs))
        if self.mixed_precision is not None:
            inputs, kwargs = values.cast_floating(self.mixed_precision.param_dtype, (inputs, kwargs))
        return inputs, kwargs

    def _notice_changes(self) -> None:
        if self.reducer is not None and self._scanner.changed():
            self.reducer.propose(self._scanner.members)
        for reducer in self._reducers:
            reducer.before_forward()

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            if self.mixed_precision is None:
                return self.module(*inputs, **kwargs)
            with cast_parameters(self.module, self.mixed_precision.param_dtype, self.parameters_to_ignore):
                return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self.require_forward_param_sync = self._will_sync()
        if self._will_sync():
            self._stats.current.forward_end = self._stats.now()
            self._register_output_hooks(output)
        return output

    def _register_output_hooks(self, output: Any) -> None:
        tensors = list(values.find_tensors(output))
        for reducer in self._reducers:
            reducer.prepare_for_backward(tensors)

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Say which wrapper is running its forward (compilers ask); nests, and each thread has its own."""
        previous, _current_forward.ddp = _current_forward.ddp, self
        try:
            yield
        finally:
            _current_forward.ddp = previous

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return _current_forward.ddp

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside only accumulate gradients locally; the next synchronised backward sends them too.

        >>> with model.no_sync():                        # doctest: +SKIP
        ...     model(first).sum().backward()
        >>> model(second).sum().backward()               # doctest: +SKIP
        """
        previous, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = previous

    # ---- buffers ----------------------------------------------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        return bool(self.forward_sync_buffers)

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def sync_buffers(self) -> None:
        """Broadcast the buffers from rank 0 (or run the buffer hook) now."""
        self._sync_buffers()

    def _sync_buffers(self) -> None:
        with torch.no_grad():
            src = self._find_common_rank(self._distributed_rank, True) if self._join_config.enable else 0
            self._sync_module_buffers(src)

    # ---- hooks ------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket; it returns a future of the new flat gradients.

        The bucket is not divided by the number of ranks. One hook per wrapper, registered before backward.
        """
        check_comm_hook(hook)
        if self._comm_hooks:
            raise RuntimeError("register_comm_hook can only be called once")
        if self.reduce != "mean":
            raise ValueError(f"a communication hook decides how to reduce; reduce={self.reduce!r} cannot be kept")
        if self.reducer is None:
            raise RuntimeError("all parameters are delayed, so there is no bucket for a communication hook")
        self._comm_hooks.append((hook, state))
        self.reducer.use_hook(hook, state)

    def _lazy_init(self) -> None:
        """Take over, before the first forward, optimizers that were set to run in backward."""
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    # ---- join -------------------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context for ranks with different numbers of batches; see ``Join``.

        Gradients are divided by the group's size, or, with ``divide_by_initial_world_size=False``, by the number of
        ranks that still have data.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return joining.DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    @property
    def _distributed_rank(self) -> int:
        return self.group.rank

    def _divide_by_active(self, active: int) -> None:
        for reducer in self._reducers:
            reducer.exchange.divisor = self.group.size if self._divide_by_initial_world_size else active

    # ---- reports ----------------------------------------------------------------------------------------------

    def ddp_logging_data(self) -> dict[str, Any]:
        """Bucket sizes, times and counters; ``docs/ddp.md`` explains them."""
        return logging_data(self)

    def desync_report(self) -> str:
        """Return each rank's last collectives, told over the current group, which must work (after ``regroup``,
        say)."""
        if self._log is None:
            raise RuntimeError("construct with keep_log=True to remember collectives")
        return desync_report(self.group, self._log.lines)

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        self._stats.error = f"{err_type.__name__}: {err_msg}"
        raise err_type(err_msg)

    # ---- copies -----------------------------------------------------------------------------------------------

    _OF_THIS_PROCESS = ("group", "process_group", "reducer", "_reducers", "_scanner", "_stats", "device_mesh")

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        return self._state_without_process()

    def _state_without_process(self) -> dict[str, Any]:
        state = copy.copy(self.__dict__)
        for name in self._OF_THIS_PROCESS:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch has no types for it
        self._revive(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = copy.deepcopy(self._state_without_process(), memo)
        nn.Module.__setstate__(twin, state)
        twin._revive(self.process_group)
        return twin

    def _revive(self, process_group: Any) -> None:
        self._use_given_group(process_group, None)
        self._stats = Stats()
        self._make_scanner()
        self._attach()

    # ---- methods that are functions of other modules -----------------------------------------------------------

    broadcast_bucket_size = buffers.BROADCAST_BYTES
    use_side_stream_for_tensor_copies = False
    _divide_by_initial_world_size = True
    _has_sink_clone = True
    _active_ddp_module = property(lambda _: _current_forward.ddp)

    named_module_buffers = property(buffers.named_module_buffers)
    modules_buffers = property(buffers.modules_buffers)
    will_sync_module_buffers = buffers.will_sync_module_buffers
    _check_sync_bufs_pre_fwd = buffers.check_sync_bufs_pre_fwd
    _check_sync_bufs_post_fwd = buffers.check_sync_bufs_post_fwd
    _sync_module_buffers = buffers.sync_module_buffers
    _default_broadcast_coalesced = buffers.default_broadcast_coalesced
    _distributed_broadcast_coalesced = buffers.distributed_broadcast_coalesced
    _register_buffer_comm_hook = buffers.register_buffer_comm_hook
    _find_common_rank = joining.find_common_rank
    _check_global_requires_backward_grad_sync = joining.check_global_requires_backward_grad_sync
    _check_and_sync_module_buffers = joining.check_and_sync_module_buffers
    _sync_final_model = joining.sync_final_model
    scatter = torch_names.scatter
    gather = torch_names.gather
    to_kwargs = torch_names.to_kwargs
    _build_params_for_reducer = torch_names.build_params_for_reducer
    _build_debug_param_to_name_mapping = torch_names.build_debug_param_to_name_mapping
    _get_parameters = torch_names.get_parameters
    _get_data_parallel_params = staticmethod(torch_names.get_data_parallel_params)
    _set_params_and_buffers_to_ignore_for_model = staticmethod(torch_names.set_params_and_buffers_to_ignore_for_model)
    _assign_modules_buffers = torch_names.assign_modules_buffers
    _match_all_reduce_for_bwd_pass = torch_names.match_all_reduce_for_bwd_pass
    _match_unused_params_allreduce = torch_names.match_unused_params_allreduce
    _check_comm_hook = torch_names.check_hook
    _register_builtin_comm_hook = torch_names.register_builtin_comm_hook
    _register_fused_optim = torch_names.register_fused_optim
    _setup_in_backward_optimizers = torch_names.setup_in_backward_optimizers
    _set_static_graph = torch_names.set_static_graph
    _set_sparse_metadata = torch_names.set_sparse_metadata
    _set_ddp_sink_clone = torch_names.set_ddp_sink_clone
    _remove_autograd_hooks = torch_names.remove_autograd_hooks
    _check_reducer_finalized = torch_names.check_reducer_finalized
    _rebuild_buckets = torch_names.rebuild_buckets
    _has_rebuilt_buckets = property(torch_names.rebuild_buckets)
    _check_default_group = torch_names.check_default_group
    _update_process_group = torch_names.update_process_group
    _get_ddp_logging_data = logging_data
    _set_ddp_runtime_logging_sample_rate = torch_names.set_ddp_runtime_logging_sample_rate


answer_for_torchs_class(DistributedDataParallel)
