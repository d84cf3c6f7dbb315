"""``torch.late``: a fake accelerator, honest in what programs get wrong, on a torch without one and without C++.

It is torch's PrivateUse1 backend under another name, so that torch itself believes in it: ``tensor.device.type`` is
"late", ``torch.accelerator`` finds it, autograd runs its backward, modules move there with ``.to("late")``.

- **Work is done late.** A call only queues its kernel on the current stream and returns memory filled with NaN (or a
  number that nobody wants); a queue runs when somebody waits for it: ``.item()``, ``.cpu()``, ``synchronize``, an
  event. A copy with ``non_blocking=True`` reads and writes late too, in both directions. So whoever forgets to wait
  gets wrong numbers, always, not now and then.
- **Streams are independent.** What one has queued is invisible to another that did not wait for an event of it.
- **Memory is its own.** An operation on its tensors and on the host's together is an error, as on a GPU; so are tensors
  of two of its devices.
- **What it is asked is recorded**: ``torch.late.calls``.

Computes with the processor's kernels, so results must be equal to the processor's, bit for bit. What it cannot show:
the speed of anything, storages that are resized (``fully_shard``), the vendors' libraries (nccl, cudnn).

A process keeps it until its end; install it in a process of its own (``run_processes``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, return_and_correct_aliasing

KIND = "late"

_lock = threading.RLock()
_here = threading.local()


class Stream:
    """Kernels in order; run when somebody waits for them."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device_index = _index(device)
        self._queue: deque[Callable[[], None]] = deque()
        self.queued = self.done = 0

    def push(self, kernel: Callable[[], None]) -> None:
        with _lock:
            self._queue.append(kernel)
            self.queued += 1

    def run_until(self, position: int) -> None:
        with _lock, torch.no_grad(), _disable_current_modes():
            while self.done < position:
                self.done += 1
                self._queue.popleft()()

    def synchronize(self) -> None:
        _record("Stream.synchronize")
        self.run_until(self.queued)

    def query(self) -> bool:
        return self.done >= self.queued

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    """A position in a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stream: Stream | None = None
        self._position = 0

    def record(self, stream: Stream | None = None) -> None:
        _record("Event.record")
        self._stream = stream or current_stream()
        self._position = self._stream.queued

    def synchronize(self) -> None:
        _record("Event.synchronize")
        if self._stream is not None:
            self._stream.run_until(self._position)

    def query(self) -> bool:
        return self._stream is None or self._stream.done >= self._position

    def wait(self, stream: Stream | None = None) -> None:
        source, position = self._stream, self._position
        if source is not None:
            (stream or current_stream()).push(lambda: source.run_until(position))


def _record(call: str) -> None:
    torch.late.calls.append(call)


def _index(device: Any) -> int:
    if device is None:
        return int(getattr(_here, "device", 0))
    if isinstance(device, int):
        return device
    found = torch.device(device)
    return _index(found.index)


def current_stream(device: Any = None) -> Stream:
    streams = getattr(_here, "streams", {})
    index = _index(device)
    return streams.get(index) or torch.late.default_streams[index]


class _Module:
    """What ``torch.late`` offers, as ``torch.cuda`` does."""

    Stream, Event = Stream, Event
    current_stream = staticmethod(current_stream)

    def __init__(self, num_devices: int) -> None:
        self.calls: list[str] = []
        self.default_streams = [Stream(index) for index in range(num_devices)]
        self.generator = torch.Generator()
        self.is_used = False

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.is_used

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return len(self.default_streams)

    def current_device(self) -> int:
        return _index(None)

    def set_device(self, device: Any) -> None:
        _record(f"set_device({_index(device)})")
        self.is_used = True
        _here.device = _index(device)

    def get_device_name(self, device: Any = None) -> str:
        return "Late 1"

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = dict(getattr(_here, "streams", {}))
        _here.streams = {**before, stream.device_index: stream}
        try:
            yield
        finally:
            _here.streams = before

    def synchronize(self, device: Any = None) -> None:
        _record("synchronize")
        self.default_streams[_index(device)].run_until(self.default_streams[_index(device)].queued)
        current = current_stream(device)
        current.run_until(current.queued)

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        self.synchronize()
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.synchronize()
        self.generator.set_state(state)

    def memory_allocated(self, device: Any = None) -> int:
        return 3 << 20

    def max_memory_allocated(self, device: Any = None) -> int:
        return 5 << 20

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 1 << 30, 2 << 30


class LateTensor(torch.Tensor):
    """A tensor of the device; ``inner`` is its memory, which only kernels may look at."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int) -> LateTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(KIND, index),
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def tolist(self) -> Any:  # torch refuses subclasses
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:  # to compare addresses
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self) -> str:
        return f"LateTensor({tuple(self.shape)}, {self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        copy.__dict__.update({k: v for k, v in self.__dict__.items() if k == "_is_param"})
        memo[id(self)] = copy
        return copy


# -- calls ----------------------------------------------------------------------------------------------------------

_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    torch.late.is_used = True
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if func in _COPIES:
        return _copy(func, args, kwargs)
    wanted = kwargs.get("device")
    if wanted is not None and torch.device(wanted).type != KIND:  # a new tensor elsewhere, like one of ours
        return func(*_metas(args), **kwargs)
    index = _device_of(func, given, kwargs)
    if _is_view(func):
        made = func(*_inners(args), **_inners(kwargs))
        return return_and_correct_aliasing(func, args, kwargs, _wrapped(made, index))
    stream = current_stream(index)
    try:
        planned = func(*_metas(args), **_metas(kwargs))
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        planned = None  # it depends on values, or is wrong: find out by doing it
    outputs = None if planned is None else pytree.tree_leaves(planned)
    if outputs is None or not all(isinstance(each, torch.Tensor) for each in outputs):
        stream.run_until(stream.queued)
        return _finished(func, args, kwargs, _wrapped(_kernel(func, args, kwargs), index))
    if func._schema.is_mutable:
        stream.push(lambda: _kernel(func, args, kwargs))
        return _finished(func, args, kwargs, _wrapped(planned, index, of_meta=True))
    rooms = pytree.tree_map_only(torch.Tensor, _room, planned)

    def compute() -> None:
        results = pytree.tree_leaves(_kernel(func, args, kwargs))
        for room, result in zip(pytree.tree_leaves(rooms), results, strict=True):
            room.copy_(result)

    stream.push(compute)
    return _wrapped(rooms, index)


def _kernel(func: Any, args: Any, kwargs: Any) -> Any:
    with _disable_current_modes(), torch.no_grad():
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*_inners(args), **_inners(kwargs))
        with torch.random.fork_rng([]):
            torch.set_rng_state(torch.late.generator.get_state())
            made = func(*_inners(args), **_inners(kwargs))
            torch.late.generator.set_state(torch.get_rng_state())
            return made


def _finished(func: Any, args: Any, kwargs: Any, made: Any) -> Any:
    """In-place calls return what they were given."""
    if not func._schema.is_mutable:
        return made
    return return_and_correct_aliasing(func, args, kwargs, made)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """To, from and on the device; late, unless the host has to have it when the call returns."""
    if func is torch.ops.aten.copy_.default:
        target, source = args[0], args[1]
        is_lazy = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        made = target
    else:
        source, options = args[0], dict(kwargs)
        is_lazy = bool(options.pop("non_blocking", False))
        device = torch.device(options.pop("device", None) or source.device)
        like = func(_meta(source), **{**options, "device": "meta"})
        room = _room(like)
        made = target = room if device.type == "cpu" else LateTensor(room, _index(device))
    there = target.inner if isinstance(target, LateTensor) else target
    index = (source if isinstance(source, LateTensor) else target).device.index
    if isinstance(source, LateTensor):
        origin = source.inner
    else:
        origin = source if is_lazy else source.clone()  # else it may be changed as soon as this returns
    torch.broadcast_shapes(there.shape, origin.shape)
    stream = current_stream(index)
    stream.push(lambda: there.copy_(origin))
    if not isinstance(target, LateTensor) and not is_lazy:
        stream.run_until(stream.queued)
    return made


def _copy_in_place(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    made: torch.Tensor = _copy(torch.ops.aten.copy_.default, (target, source, non_blocking), {})
    return made


def _factory(name: str) -> Callable[..., Any]:
    overload = name.partition(".")[2] or "default"
    return lambda *args, **kwargs: _call(getattr(torch.ops.aten.arange, overload), args, kwargs)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _device_of(func: Any, given: list[torch.Tensor], kwargs: Any) -> int:
    here = {tensor.device.index for tensor in given if isinstance(tensor, LateTensor)}
    foreign = [tensor for tensor in given if not isinstance(tensor, LateTensor) and tensor.dim() and not tensor.is_meta]
    if len(here) > 1 or (here and foreign):
        places = sorted({str(tensor.device) for tensor in given})
        raise RuntimeError(f"{func}: expected all tensors on the same device, got {', '.join(places)}")
    return here.pop() if here else _index(kwargs.get("device"))


def _inners(tree: Any) -> Any:
    def inner(leaf: Any) -> Any:
        if isinstance(leaf, LateTensor):
            return leaf.inner
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == KIND else leaf

    return pytree.tree_map(inner, tree)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _metas(tree: Any) -> Any:
    def meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _meta(leaf) if isinstance(leaf, LateTensor) or leaf.dim() else leaf
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    return pytree.tree_map(meta, tree)


def _room(like: torch.Tensor) -> torch.Tensor:
    """Memory as nobody wants to see it."""
    room = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return room.fill_(float("nan") if room.is_floating_point() else True if room.dtype is torch.bool else 111)


def _wrapped(tree: Any, index: int, *, of_meta: bool = False) -> Any:
    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        return LateTensor(_room(tensor) if of_meta else tensor, index)

    return pytree.tree_map_only(torch.Tensor, wrap, tree)


_libraries: list[Any] = []


def install(num_devices: int = 1) -> None:
    """Give this process the device, once and for good. torch's autograd engine knows the first of several only."""
    if _libraries:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    module = _Module(num_devices)
    _setup_privateuseone_for_python_backend(KIND, backend_module=module)
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(lambda func, *args, **kwargs: _call(func, args, kwargs), "PrivateUse1")
    aten.impl("copy_", _copy_in_place, "PrivateUse1")  # torch.tensor(values, device=...) gets past the fallback
    for name in ("arange", "arange.start", "arange.start_step"):  # torch's own would resize what it is given
        aten.impl(name, _factory(name), "PrivateUse1")
    _libraries.extend((everything, aten))
