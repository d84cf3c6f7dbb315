"""Lists every private name of torch that is used here, with what breaks without it; the only module that says them.

``NAMES`` are functions, classes and modules, ``ATTRIBUTES`` what objects of torch have. Each is imported from here by
the name on the left (``from phalanx._torch_private import current_graph_task_id``) and looked up in torch then, so that
importing this module imports nothing, and a caller pays for no more than a call of torch's own. A name that this torch
does not have raises ``ImportError`` with what is lost. ``IN_PLACE`` lists what is said where it is used, since a call
would cost a hot path more than the reading, or torch is the one who reads.
"""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any

# Our name: (torch's, what breaks without it).
NAMES: dict[str, tuple[str, str]] = {
    # ---- autograd
    "current_graph_task_id": (
        "torch._C._current_graph_task_id",
        "DDP cannot tell one backward pass from the next; traces cannot tell forward from backward",
    ),
    "current_autograd_node": (
        "torch._C._current_autograd_node",
        "traces of communication in backward name no module",
    ),
    "autograd_sequence_number": (
        "torch.autograd._get_sequence_nr",
        "traces of communication in backward name no module",
    ),
    "will_engine_execute_node": (
        "torch._C._will_engine_execute_node",
        "DDP cannot tell torch.autograd.grad from backward, and would reduce gradients that nobody accumulates",
    ),
    "execution_engine": (
        "torch.autograd.Variable._execution_engine",
        "DDP does not learn that backward has ended; DTensors cannot run a backward of their own",
    ),
    "preserve_version_counter": (
        "torch.autograd.grad_mode._unsafe_preserve_version_counter",
        "broadcasting buffers makes a backward fail whose forward has read them",
    ),
    # ---- many tensors at once
    "foreach_copy_": ("torch._foreach_copy_", "one copy per gradient in place of one for all"),
    "foreach_mul_": ("torch._foreach_mul_", "one multiplication per gradient in place of one for all"),
    "foreach_add_": ("torch._foreach_add_", "one addition per gradient in place of one for all"),
    "foreach_check_and_unscale_": (
        "torch._amp_foreach_non_finite_check_and_unscale_",
        "dividing a step's gradient and looking whether it is finite are two passes over it",
    ),
    "optimizer_foreach_types": (
        "torch.optim.optimizer._foreach_supported_types",
        "optimizers on accelerators update DTensors one by one unless foreach=True is said",
    ),
    "foreach_types": (
        "torch.utils._foreach_utils._foreach_supported_types",
        "clip_grad_norm_ scales DTensors one by one unless foreach=True is said",
    ),
    # ---- tensors
    "make_wrapper_subclass": ("torch.Tensor._make_wrapper_subclass", "no ShardedTensor can be made"),
    "make_subclass": ("torch.Tensor._make_subclass", "no DTensor can be made"),
    "is_zerotensor": (
        "torch.Tensor._is_zerotensor",
        "collectives crash on zeros that torch has not made yet, such as the gradient of sgn",
    ),
    "is_view": ("torch.Tensor._is_view", "a redistributed gradient may be a view that nobody may write to"),
    "is_alias_of": ("torch._C._is_alias_of", "it is not known which results of an operation are views"),
    "storage_use_count": (
        "torch._C._storage_Use_Count",
        "DDP cannot see whether a gradient that it handed out is still held, and must copy each",
    ),
    "is_functional_tensor": (
        "torch._is_functional_tensor",
        "collectives inside torch.func crash where they should be refused",
    ),
    "is_functorch_wrapped_tensor": (
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "collectives and DTensors inside torch.func crash where they should be refused",
    ),
    "are_functorch_transforms_active": (
        "torch._C._are_functorch_transforms_active",
        "autograd functions on DTensors inside torch.func are wrong where they should be refused",
    ),
    "FakeTensor": (
        "torch._subclasses.fake_tensor.FakeTensor",
        "collectives crash on tensors without data where they should be refused",
    ),
    "FakeTensorMode": (
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "fake tensors are made of a DTensor's wrapper",
    ),
    # ---- torch.compile
    "register_effectful_op": (
        "torch._higher_order_ops.effects._register_effectful_op",
        "a compiled program may send in another order than other ranks'",
    ),
    "EffectType": (
        "torch._library.effects.EffectType",
        "a compiled program may send in another order than other ranks'",
    ),
    "register_opaque_type": (
        "torch._library.opaque_object.register_opaque_type",
        "torch.compile breaks its graph at placements and meshes",
    ),
    "OpaqueMember": (
        "torch._library.opaque_object.MemberType",
        "torch.compile breaks its graph where a placement is asked",
    ),
    "UnsupportedFakeTensor": (
        "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
        "torch.compile fails at a DTensor that it should leave alone",
    ),
    "TracingContext": ("torch._guards.TracingContext", "make_fx records a DTensor's part where it should be refused"),
    "AttrSource": ("torch._dynamo.source.AttrSource", "torch.compile does not guard a DTensor's local tensor"),
    "WeakTensorKeyDictionary": (
        "torch.utils.weak.WeakTensorKeyDictionary",
        "torch.compile makes several fake tensors of one DTensor",
    ),
    "assert_async": ("torch._assert_async", "targets and indices out of range go unseen where torch.compile traced"),
    "FunctionalTensor": (
        "torch._subclasses.functional_tensor.FunctionalTensor",
        "torch.compile sends what it traces, which has no data",
    ),
    "calculate_correct_fan": (
        "torch.nn.init._calculate_correct_fan",
        "kaiming_uniform_ of a ShardedTensor has no bound",
    ),
    # ---- interception
    "DisableTorchFunction": (
        "torch._C.DisableTorchFunction",
        "the functions that we call on the way are intercepted again",
    ),
    "DisableTorchFunctionSubclass": (
        "torch._C.DisableTorchFunctionSubclass",
        "a ShardedTensor cannot be asked for its shape",
    ),
    "num_dispatch_modes": (
        "torch._C._len_torch_dispatch_stack",
        "DTensors cannot see whether a mode of torch looks on",
    ),
    "num_function_modes": (
        "torch._C._len_torch_function_stack",
        "operators on DTensors pass function modes unseen",
    ),
    "pop_mode_temporarily": (
        "torch.utils._python_dispatch._pop_mode_temporarily",
        "modes of the user see what we do for ourselves",
    ),
    "current_dispatch_modes": (
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "tracing of DTensors records this rank's part where it should be refused",
    ),
    "local_scalar_dense": (
        "torch.ops.aten._local_scalar_dense",
        "torch.full(size, dtensor) is refused although its value is known",
    ),
    "nn_operations": ("torch._C._nn", "cross_entropy of DTensors has no kernel to compare with"),
    "operations": ("torch._ops", "register_sharding cannot tell operations from other callables"),
    "CustomOpDef": (
        "torch._library.custom_ops.CustomOpDef",
        "register_sharding does not take what torch.library.custom_op returns",
    ),
    "get_tracing_state": (
        "torch._C._get_tracing_state",
        "torch.jit.trace of DTensors records this rank's part where it should be refused",
    ),
    "jit_recursive": (
        "torch.jit._recursive",
        "torch.jit.script of a module with DTensors is wrong where it should be refused",
    ),
    "muon": (
        "torch.optim._muon",
        "Muon on a cut matrix differs from that on the matrix by the roundings of bfloat16",
    ),
    "set_code_exec_strategy": (
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "torch.compile compiles what intercepts calls on DTensors, frame by frame",
    ),
    "FrameExecStrategy": (
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch.compile compiles what intercepts calls on DTensors, frame by frame",
    ),
    "FrameAction": (
        "torch._C._dynamo.eval_frame._FrameAction",
        "torch.compile compiles what intercepts calls on DTensors, frame by frame",
    ),
    "apply_permutation": (
        "torch.nn.modules.rnn._apply_permutation",
        "recurrent layers do not take sequences that were packed unsorted",
    ),
    "detect_is_causal_mask": (
        "torch.nn.modules.transformer._detect_is_causal_mask",
        "TransformerEncoder does not take a mask that is a DTensor",
    ),
    "CheckpointFrame": (
        "torch.utils.checkpoint._CheckpointFrame",
        "activation checkpointing keeps the wrapper of a DTensor and loses its data",
    ),
    # ---- attention in parts
    "flash_attention_for_cpu": (
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "context parallel attention on CPU is several times slower, and holds all scores in memory",
    ),
    "flash_attention_for_cpu_backward": (
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "context parallel attention on CPU is several times slower, and holds all scores in memory",
    ),
    # ---- nested arguments
    "tree_flatten": ("torch.utils._pytree.tree_flatten", "tensors inside lists of arguments are not found"),
    "tree_leaves": ("torch.utils._pytree.tree_leaves", "tensors inside lists of arguments are not found"),
    "tree_map_only": (
        "torch.utils._pytree.tree_map_only",
        "tensors inside lists of arguments are not replaced",
    ),
    "tree_unflatten": (
        "torch.utils._pytree.tree_unflatten",
        "lists of arguments cannot be put together again",
    ),
    # ---- c10d
    "backend_plugins": (
        "torch.distributed.distributed_c10d.Backend._plugins",
        "backends that were registered with torch cannot carry a group, nor can ours be registered once",
    ),
    "DistributedBackendOptions": (
        "torch._C._distributed_c10d._DistributedBackendOptions",
        "backends that were registered with torch's extended interface cannot carry a group",
    ),
    "c10d_world": (
        "torch.distributed.distributed_c10d._world",
        "the global ranks of a process group that a user brings are not known",
    ),
    "BackendOptions": (
        "torch._C._distributed_c10d.Backend.Options",
        "backend_override of a mesh cannot be told from a pair of name and options",
    ),
    "GlooOptions": (
        "torch.distributed.ProcessGroupGloo._Options",
        "backend_override of a mesh does not take gloo's options",
    ),
    "register_process_group": (
        "torch._C._distributed_c10d._register_process_group",
        "torch's functional collectives and meshes do not find our groups",
    ),
    "unregister_process_group": (
        "torch._C._distributed_c10d._unregister_process_group",
        "names of groups that have ended stay in torch's tables",
    ),
    "get_backend": (
        "torch.distributed.ProcessGroup._get_backend",
        "collectives of a process group that a user brings take twice as long",
    ),
    "remote_device": (
        "torch.distributed._remote_device",
        "placements of shards do not compare equal with torch's",
    ),
    "NON_GROUP_MEMBER": (
        "torch.distributed.GroupMember.NON_GROUP_MEMBER",
        "a rank outside of a process group cannot make a ShardedTensor that the group holds",
    ),
    "set_default_timeout": (
        "torch.distributed.ProcessGroupGloo._set_default_timeout",
        "gloo's operations time out as soon as connecting may",
    ),
}

# Our name: (the class, its attribute, what breaks without it).
ATTRIBUTES: dict[str, tuple[str, str, str]] = {
    "storage_address": (
        "torch.UntypedStorage",
        "_cdata",
        "DDP cannot tell which memory a gradient lies in, and may write into one that is in use",
    ),
    "post_accumulate_grad_hooks": (
        "torch.Tensor",
        "_post_accumulate_grad_hooks",
        "hooks that users register after wrapping see a gradient after it was sent",
    ),
    "module_parameters": ("torch.nn.Module", "_parameters", "parameters cannot be replaced in a module"),
    "module_buffers": ("torch.nn.Module", "_buffers", "buffers cannot be replaced in a module"),
    "module_children": ("torch.nn.Module", "_modules", "DDP does not notice submodules that were replaced"),
    "flat_weights": (
        "torch.nn.RNNBase",
        "_flat_weights",
        "mixed precision leaves recurrent layers as they are",
    ),
    "flat_weight_names": (
        "torch.nn.RNNBase",
        "_flat_weights_names",
        "mixed precision leaves recurrent layers as they are",
    ),
    "schema_of": (
        "torch._ops.OpOverload",
        "_schema",
        "the places of an operation's arguments are not known by their names",
    ),
    "overload_of": (
        "torch._library.custom_ops.CustomOpDef",
        "_opoverload",
        "register_sharding does not take what torch.library.custom_op returns",
    ),
    "is_profiler_enabled": (
        "torch.autograd.profiler",
        "_is_profiler_enabled",
        "a simulated rank that profiles while the process does ends it with a segmentation fault",
    ),
    "sequence_number_of": (
        "torch.autograd.graph.Node",
        "_sequence_nr",
        "traces of communication in backward name no module",
    ),
    "register_hook_dict": (
        "torch.autograd.graph.Node",
        "_register_hook_dict",
        "gradients of DTensors are not reduced",
    ),
    "device_types": (
        "torch.distributed.ProcessGroup",
        "_device_types",
        "collectives of a process group that a user brings take twice as long",
    ),
}

# What is said where it is used: (the class or module, its attribute): what breaks without it.
IN_PLACE: dict[tuple[str, str], str] = {
    ("torch._dynamo.trace_rules", "_allowed_callable_ids"): "torch.compile breaks its graph at parallel styles",
    (
        "torch._dynamo.trace_rules",
        "SKIP_DIRS",
    ): "torch.compile compiles what intercepts calls on DTensors, frame by frame",
    ("torch._dynamo.trace_rules", "add"): "torch.compile compiles what intercepts calls on DTensors, frame by frame",
    ("torch._dynamo.trace_rules", "get_legacy_mod_inlinelist"): "torch.compile breaks its graph at meshes and styles",
    (
        "torch.fx.experimental.proxy_tensor",
        "ProxyTorchDispatchMode",
    ): "make_fx records a DTensor's part where it should be refused",
    (
        "torch._subclasses.functional_tensor",
        "FunctionalTensorMode",
    ): "torch.export records a DTensor's part where it should be refused",
    (
        "torch._functorch.aot_autograd",
        "aot_module_simplified",
    ): "torch.compile compiles DTensors below autograd, and fails",
    (
        "torch._dynamo.backends.common",
        "aot_module_simplified",
    ): "torch.compile compiles DTensors below autograd, and fails",
    ("torch._dynamo.variables.builder", "_automatic_dynamic"): "a second batch size gives a DTensor symbols for sizes",
    (
        "torch.utils._foreach_utils",
        "_group_tensors_by_device_and_dtype",
    ): "optimizers and clip_grad_norm_ see the device of a DTensor's wrapper, not of its data",
    (
        "torch.autograd.profiler.profile",
        "_prepare_trace",
    ): "two simulated ranks that profile end the process with a segmentation fault",
    (
        "torch",
        "_dynamo",
    ): "torch.compile compiles frames of ours one by one, which takes minutes and is wrong where they keep a memory",
    (
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "_get_active_ddp_module",
    ): "torch.compile makes one graph of a model under DDP, and no bucket is sent before all of backward is done",
    ("torch.jit", "_get_trace_graph"): "torch.onnx records this rank's part where it should be refused",
    (
        "torch.distributed._functional_collectives",
        "_resolve_group",
    ): "torch's functional collectives do not take a mesh of ours",
    (
        "torch.distributed.tensor",
        "_dtensor_spec",
    ): "torch's DTensor takes a mesh of ours and fails later, without saying why",
    ("torch.distributed", "_state_dict_utils"): "torch's state-dict helpers take a shard for the full tensor",
    (
        "torch.distributed.checkpoint",
        "_state_dict_stager",
    ): "async_save copies a shard as if it had the global shape",
    ("torch.Tensor", "_version"): "views of DTensors that are copies do not notice that they are out of date",
    ("torch.Tensor", "_backward_hooks"): "gradients of DTensors are not reduced",
    (
        "torch.Tensor",
        "_is_param",
    ): "a parameter that is a ShardedTensor comes out of a pickle as a plain tensor",
    ("torch.distributed.ProcessGroupGloo", "_allgather_base"): "no all_gather_into_tensor over c10d",
    ("torch.distributed.ProcessGroupGloo", "_reduce_scatter_base"): "no reduce_scatter_tensor over c10d",
}


def find(path: str) -> Any:
    """Return what ``path`` stands for, importing modules on the way.

    >>> find("collections.abc.Mapping").__name__
    'Mapping'
    """
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    walked = first
    for part in rest:
        walked = f"{walked}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(walked)
            except ImportError:
                raise AttributeError(f"no {walked}") from None
    return found


def __getattr__(name: str) -> Any:
    if name in NAMES:
        path, breaks = NAMES[name]
        try:
            value = find(path)
        except AttributeError:
            raise ImportError(f"this torch has no {path}; without it: {breaks}") from None
    elif name in ATTRIBUTES:
        value = attrgetter(ATTRIBUTES[name][1])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
