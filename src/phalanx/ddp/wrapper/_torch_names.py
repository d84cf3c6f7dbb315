"""Gives ``DistributedDataParallel`` the methods that only PyTorch's trainers call.

They are private there or old, and nothing here needs them; the class takes each as a method. Where a name stands for
PyTorch's own machinery (graph walks, sinks), docs/parity.md says what does its work here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather as gather_outputs
from torch.nn.parallel.scatter_gather import scatter_kwargs

from phalanx import _nested_values as values
from phalanx import comm
from phalanx._torch_faults import check_fused_tensors
from phalanx.ddp.hooks import optimizer_overlap
from phalanx.ddp.hooks._hook_signature import check_comm_hook
from phalanx.ddp.hooks.default import Hook, allreduce_hook, fp16_compress_hook

if TYPE_CHECKING:
    from phalanx.ddp.wrapper._wrapper import DistributedDataParallel

BUILTIN: dict[str, Hook] = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}


# ---- inputs and outputs


def scatter(ddp: DistributedDataParallel, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
    return scatter_kwargs(inputs, kwargs, device_ids, dim=ddp.dim)


def gather(ddp: DistributedDataParallel, outputs: Any, output_device: Any) -> Any:
    return gather_outputs(outputs, output_device, dim=ddp.dim)


def to_kwargs(ddp: DistributedDataParallel, inputs: Any, kwargs: Any, device_id: int) -> Any:
    """Put the inputs on the device, each in a tuple of one as if scattered to one device."""
    device = torch.device(ddp.device_type, device_id)
    moved, moved_kwargs = values.move_to(device, (inputs, kwargs))
    return (moved,), (moved_kwargs,)


# ---- parameters


def build_params_for_reducer(ddp: DistributedDataParallel) -> tuple[list[nn.Parameter], list[bool]]:
    """List the parameters that take part, and which of them have sparse gradients."""
    members = ddp._scanner.members
    return [m.param for m in members], [m.sparse for m in members]


def build_debug_param_to_name_mapping(
    ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter]
) -> dict[int, str]:
    names = {id(param): name for name, param in ddp.module.named_parameters()}
    unknown = [index for index, param in enumerate(parameters) if id(param) not in names]
    if unknown:
        ddp._log_and_throw(ValueError, f"parameters {unknown} are not in the module")
    return {index: names[id(param)] for index, param in enumerate(parameters)}


def get_parameters(ddp: DistributedDataParallel, m: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    for part in m.modules() if recurse else [m]:
        yield from part.parameters(recurse=False)


def get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
    for name, param in module.named_parameters():
        if not getattr(param, "_ddp_ignored", False):
            yield (name, param) if named_params else param


def set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Iterable[str]) -> None:
    """Let a wrapper of ``module`` leave these names (as in ``named_parameters`` and ``named_buffers``) alone."""
    ignored = list(params_and_buffers_to_ignore)
    module._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]  # modules take any attribute
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in ignored:
            tensor._ddp_ignored = True  # type: ignore[attr-defined]  # the mark that torch's own tools read


# ---- buffers


def assign_modules_buffers(ddp: DistributedDataParallel) -> None:
    """Do nothing: buffers are looked up by name each time."""


# ---- join


def match_all_reduce_for_bwd_pass(ddp: DistributedDataParallel) -> None:
    """Take part in a backward pass of the other ranks with nothing to add."""
    for reducer in ddp._reducers:
        reducer.mirror_pass()


def match_unused_params_allreduce(ddp: DistributedDataParallel) -> None:
    """Do nothing: what was used rides in the buckets."""


# ---- hooks and optimizers


def check_hook(ddp: DistributedDataParallel, hook: Callable[..., Any]) -> None:
    check_comm_hook(hook)


def register_builtin_comm_hook(ddp: DistributedDataParallel, comm_hook_type: Any) -> None:
    """Register one of the built-in hooks by torch's enum value (or its name): ALLREDUCE or FP16_COMPRESS."""
    ddp.register_comm_hook(ddp.group, _builtin_hook(comm_hook_type))


def register_fused_optim(
    ddp: DistributedDataParallel,
    optim: type[torch.optim.Optimizer],
    *args: Any,
    optim_params: Iterable[nn.Parameter] | None = None,
    **kwargs: Any,
) -> None:
    """Update each parameter as soon as its gradient is reduced, within backward, with ``optim(..., *args)``."""
    given = None if optim_params is None else list(optim_params)
    hook = optimizer_overlap.fused_optimizer_hook(optim, given, args, kwargs)
    if kwargs.get("fused") and issubclass(optim, torch.optim.SGD):  # here, not in the first backward
        check_fused_tensors(ddp.module.parameters() if given is None else given, "_register_fused_optim")
    ddp.register_comm_hook(ddp.group, hook)


def setup_in_backward_optimizers(ddp: DistributedDataParallel) -> None:
    params = [member.param for member in ddp._scanner.members]
    if optimizer_overlap.take_over(params):
        ddp.register_comm_hook(ddp.group, optimizer_overlap.in_backward_hook)
        ddp._reducers[0].after_pass.append(lambda: optimizer_overlap.clear_gradients(params))


# ---- reducer


def set_static_graph(ddp: DistributedDataParallel) -> None:
    """Do what ``static_graph=True`` does: undefined gradients stay None."""
    ddp.static_graph = True
    for reducer in ddp._reducers:
        reducer.undefined_is_unused = True


def set_sparse_metadata(ddp: DistributedDataParallel, global_unique_ids: dict[str, Tensor]) -> None:
    """Take rows that any rank touches, by parameter name: then only their values travel."""
    ddp._reducers[0].exchange.sparse.set_metadata(global_unique_ids)


def set_ddp_sink_clone(ddp: DistributedDataParallel, val: bool) -> None:
    """Accept it: outputs are never cloned here."""
    ddp._has_sink_clone = val


def remove_autograd_hooks(ddp: DistributedDataParallel) -> None:
    for reducer in ddp._reducers:
        reducer.stop()


def check_reducer_finalized(ddp: DistributedDataParallel) -> None:
    """Raise if a backward pass began and never came to its end."""
    for reducer in ddp._reducers:
        if reducer.is_busy:
            ddp._log_and_throw(RuntimeError, f"rank {ddp.group.rank}: a backward pass began and was not finished")


def rebuild_buckets(ddp: DistributedDataParallel) -> bool:
    """Tell whether buckets have been assigned anew by the observed order (it happens by itself)."""
    return any(reducer.stats.rebuilds > 0 for reducer in ddp._reducers)


def update_process_group(ddp: DistributedDataParallel, new_process_group: Any) -> None:
    ddp.regroup(new_process_group)


def check_default_group(ddp: DistributedDataParallel) -> None:
    """Refuse to pickle a wrapper of another group than the current one: the reader has no other to use."""
    try:
        same = ddp.process_group is comm.current_group() or ddp.group is comm.current_group()
    except RuntimeError:
        same = False
    if not same:
        ddp._log_and_throw(
            RuntimeError,
            "only a wrapper that uses the current (default) group can be pickled: another group has no meaning in "
            "the process that reads it",
        )


def set_ddp_runtime_logging_sample_rate(ddp: DistributedDataParallel, sample_rate: int) -> None:
    if sample_rate < 1:
        ddp._log_and_throw(ValueError, f"the sample rate is {sample_rate}; expected at least 1")
    ddp._stats.sample_rate = sample_rate


def _builtin_hook(comm_hook_type: Any) -> Hook:
    """Find the hook for an enum member (or its name)."""
    name = getattr(comm_hook_type, "name", str(comm_hook_type)).rpartition(".")[2]
    if name not in BUILTIN:
        raise ValueError(f"unknown built-in communication hook {comm_hook_type!r}; expected one of {sorted(BUILTIN)}")
    return BUILTIN[name]
