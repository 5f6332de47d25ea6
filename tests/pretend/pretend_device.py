"""A pretend accelerator, "pretend:0", on a CPU build of torch: its tensors keep their numbers on the CPU.

An operation runs at once, but is booked as if it were queued: on which stream, which memory it reads and
writes, and whether the host would have to wait for it. Streams, events and futures carry vector clocks
(Lamport 1978, Fidge 1988), so that two accesses which nothing orders are found although they never collide:

    waits   the host waited for the device: `.item()`, a copy to or from pageable host memory, `synchronize`
    races   two streams used the same memory, one of them to write, and no event ordered them
    frees   memory was freed, and could have been handed out again, while another stream still used it

The device is torch's PrivateUse1, registered from Python. So autograd, DDP's C++ reducer and torch's
optimizers run on it as on any accelerator that torch does not know: no code of theirs is replaced, but for
futures (which carry clocks), `torch.tensor` (whose copy goes below Python) and pinned memory.

What it cannot show: that a kernel is right, how long anything takes, what CUDA's own caching does, and a
wrong number of a device, since each rank has pretend:0. What the host does with pinned memory is booked
within `HostUse` only.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
DEVICE = torch.device("cpu")  # `register` makes it pretend:0: before that torch does not know the name
CPU = torch.device("cpu")

T = TypeVar("T")

Clock = dict[int, int]
"""By stream, how many of its operations are done before what follows."""


class Stream:
    """A queue of operations, each after the one before it."""

    ids = itertools.count()

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.stream_id, self.device, self.clock = next(Stream.ids), DEVICE, Clock()
        self.clock[self.stream_id] = 0

    def join(self, clock: Clock) -> None:
        """Order the following work of this stream after everything that the clock has seen."""
        for stream, count in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.join(other.clock)

    def wait_event(self, event: Event) -> None:
        self.join(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        gpu.wait("Stream.synchronize", self.clock)

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, *args: object, **kwargs: object) -> None:
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or gpu.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or gpu.current).join(self.clock)

    def synchronize(self) -> None:
        gpu.wait("Event.synchronize", self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


@dataclass
class Access:
    """An operation's use of the bytes [start, stop) of a storage."""

    start: int
    stop: int
    stream: int
    at: int
    writes: bool
    what: str


@dataclass
class Block:
    """A storage: the stream on which it was allocated, those that `record_stream` named, and who used it."""

    nbytes: int
    home: Stream
    recorded: set[Stream] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class Gpu:
    """The streams and memory of the device, and the errors found in their use."""

    def __init__(self) -> None:
        self.default, self.host = Stream(), Stream()
        self.lock = threading.RLock()
        self.local = threading.local()
        self.blocks: dict[int, Block] = {}
        self.allocated = self.peak = 0
        self.forget()

    def forget(self) -> None:
        """Begin anew to note what goes wrong."""
        self.waits: list[str] = []
        self.races: list[str] = []
        self.frees: list[str] = []
        self.to_host: list[int] = []  # bytes of each copy to the host

    def findings(self) -> dict[str, list[str]]:
        """Return the errors by kind, each place once."""
        all_of = {"waits": self.waits, "races": self.races, "frees": self.frees}
        return {kind: sorted(set(found)) for kind, found in all_of.items() if found}

    @property
    def current(self) -> Stream:
        return getattr(self.local, "stream", None) or self.default

    def wait(self, why: str, clock: Clock | None = None) -> None:
        """The host waits for the current stream, or for a clock; what it queues then comes after."""
        place = _place()
        if place:  # else torch waits by itself, within a backward
            self.waits.append(f"{why} at {place}")
        self.host.join(self.current.clock if clock is None else clock)

    def born(self, storage: Any, home: Stream | None = None) -> None:
        """Note memory that has just been allocated on the current stream, or by the host (pinned memory)."""
        with self.lock:
            address = storage.data_ptr()
            if address and address not in self.blocks:
                self.blocks[address] = block = Block(storage.nbytes(), home or self.current)
                self.allocated += block.nbytes * (home is None)
                self.peak = max(self.peak, self.allocated)
                weakref.finalize(storage, self._died, address).atexit = False

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the CPU lies in memory that the device can read by itself."""
        block = self.blocks.get(tensor.untyped_storage().data_ptr())
        return block is not None and block.home is self.host

    def _died(self, address: int) -> None:
        with self.lock:
            block = self.blocks.pop(address, None)
            if block is None or block.home is self.host:  # the host's allocator waits by itself
                return
            self.allocated -= block.nbytes
            # The allocator hands the block to the next operation of its home stream, as soon as the recorded
            # streams are where they are now.
            safe = [block.home, *block.recorded]
            for access in block.accesses:
                if all(stream.clock.get(access.stream, 0) < access.at for stream in safe):
                    self.frees.append(f"{access.what}, memory of stream {block.home.stream_id}")
                    return

    def launch(self, stream: Stream, op: str, reads: list[Any], writes: list[Any]) -> None:
        """Queue an operation that uses this memory (tensors on the CPU)."""
        with self.lock:
            stream.join(self.host.clock)
            stream.clock[stream.stream_id] += 1
            what = f"{op} on stream {stream.stream_id} at {_place()}"
            for tensor in writes:
                self._access(stream, tensor, True, what)
            for tensor in reads:
                if not any(tensor is written for written in writes):
                    self._access(stream, tensor, False, what)

    def _access(self, stream: Stream, tensor: Any, writes: bool, what: str) -> None:
        block = self.blocks.get(tensor.untyped_storage().data_ptr())
        if block is None or tensor.numel() == 0:
            return
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        last = sum(
            (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        new = Access(
            start, start + (last + 1) * size, stream.stream_id, stream.clock[stream.stream_id], writes, what
        )
        kept = []
        for old in block.accesses:
            ordered = stream.clock.get(old.stream, 0) >= old.at
            overlaps = old.start < new.stop and new.start < old.stop
            if overlaps and (writes or old.writes) and not ordered:
                self.races.append(f"{old.what} and {what}")
            # What came before this write is ordered before all that will be ordered after it.
            covered = new.start <= old.start and old.stop <= new.stop
            same = (old.stream, old.writes, old.start, old.stop) == (new.stream, writes, new.start, new.stop)
            if not (ordered and covered and (writes or same)):
                kept.append(old)
        block.accesses = [*kept, new]


DEPTH = 8
"""Callers that are named beside the place of a finding."""


def _place() -> str:
    """The innermost lines outside torch and of this folder: where the operation was asked for."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < DEPTH:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "pretend_" not in name and "weakref" not in name and name[0] != "<":
            found.append(f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)


class PretendTensor(torch.Tensor):
    """A tensor of the device. `inner` has its numbers; `after` is what its reader has to wait for."""

    inner: torch.Tensor
    after: Clock | None

    @staticmethod
    def __new__(cls, inner: torch.Tensor, after: Clock | None = None) -> PretendTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
        )
        self.inner, self.after = inner, after
        gpu.born(inner.untyped_storage())
        return self

    def record_stream(self, stream: Stream) -> None:
        gpu.blocks[self.inner.untyped_storage().data_ptr()].recorded.add(stream)

    def __repr__(self, **_: object) -> str:
        return f"PretendTensor({self.inner})"

    def __reduce_ex__(self, protocol: object) -> Any:
        gpu.wait("pickle")
        return torch.Tensor.__reduce_ex__(self.inner.detach().requires_grad_(self.requires_grad), protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(first, PretendTensor):
            if name in ("data_ptr", "untyped_storage", "_typed_storage"):
                return getattr(first.inner, name)()
            if name == "tolist":
                return first.cpu().tolist()
            if func == torch.Tensor.backward:  # straight to the engine: its hooks must come by here, too
                ones = torch.ones_like(first) if first.dim() == 0 else (kwargs or {})["gradient"]
                engine = torch.autograd.Variable._execution_engine
                return engine.run_backward(
                    (first,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
            if name == "numpy":
                raise TypeError(f"can't convert {DEVICE} device type tensor to numpy")
            if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
                return PretendTensor(first.inner.detach())
            setter = torch.Tensor.data.__set__  # type: ignore[attr-defined]
            if func == setter and isinstance(args[1], PretendTensor):
                with torch._C.DisableTorchFunctionSubclass():
                    func(first, args[1])
                first.inner = args[1].inner
                return None
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "is_nonzero"}
"""Operations whose result the host needs before it can go on."""

MIXES = {"_to_copy", "copy_", "_foreach_copy_", "lift_fresh", "index", "index_put_"}
"""Operations that take tensors of the CPU beside those of the device."""


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the numbers, and book it."""
    name = func._schema.name.split("::")[-1]
    leaves = tree_leaves((args, kwargs))
    mine = [leaf for leaf in leaves if isinstance(leaf, PretendTensor)]
    others = [
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, PretendTensor)
    ]
    devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    if name not in MIXES and mine and any(tensor.dim() for tensor in others):
        raise RuntimeError(
            f"{name}: Expected all tensors to be on the same device, {DEVICE} and cpu at {_place()}"
        )
    for tensor in mine:
        if tensor.after is not None:
            gpu.current.join(tensor.after)
            tensor.after = None
    outside = {id(tensor) for tensor in others}
    wrapped = {id(tensor.inner): tensor for tensor in mine}
    to_cpu = any(device.type == "cpu" for device in devices)
    raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))
    raw_kwargs.pop("pin_memory", None)
    out = func(*raw_args, **raw_kwargs)
    waits_for = list[str]()
    if name in WAITS or (
        name in ("index", "index_put_")
        and any(t.dtype == torch.bool for t in leaves if isinstance(t, torch.Tensor) and t.dim())
    ):
        waits_for.append(name)

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) in outside:
            return value
        if id(value) in wrapped:
            return wrapped[id(value)]
        return value if to_cpu else PretendTensor(value)

    result = tree_map(wrap, out)
    arguments = func._schema.arguments
    if any(a.alias_info is not None and not a.alias_info.is_write for a in arguments):
        return result  # a view, which queues nothing
    given = [*zip(arguments, args), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    writes = [
        _raw(leaf)
        for argument, value in given
        if argument.alias_info is not None
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]
    fresh = [
        leaf.inner
        for leaf in tree_leaves(result)
        if isinstance(leaf, PretendTensor) and id(leaf.inner) not in wrapped
    ]
    if not name.startswith("empty") and not name.startswith("new_empty"):
        gpu.launch(gpu.current, name, [*(tensor.inner for tensor in mine), *others], [*writes, *fresh])
    for to, source, non_blocking in _copies(name, args, kwargs, to_cpu):
        _book_copy(name, to, source, non_blocking)
    for why in waits_for:
        gpu.wait(why)
    return result


STAGED_NBYTES = 2**16
"""Source: CUDA's Runtime API, "API synchronization behavior"."""


def _raw(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.inner
    return CPU if isinstance(value, torch.device) and value.type == NAME else value


def _copies(name: str, args: Any, kwargs: Any, to_cpu: bool) -> Iterator[tuple[Any, Any, bool]]:
    """Yield the copies of an operation: to, from, and whether the host need not wait."""
    if name == "copy_":
        yield args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    elif name == "_foreach_copy_":
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        for to, source in zip(args[0], args[1], strict=True):
            yield to, source, non_blocking
    elif name == "_to_copy" and to_cpu:
        yield None, args[0], bool(kwargs.get("non_blocking"))


def _book_copy(name: str, to: Any, source: Any, non_blocking: bool) -> None:
    comes, goes = isinstance(source, PretendTensor), isinstance(to, PretendTensor)
    if comes == goes:
        return
    on_host = to if comes else source
    if comes:
        gpu.to_host.append(source.nbytes)
    # What fits is copied to a buffer of the driver's, and the host goes on.
    goes_on = on_host is not None and (gpu.is_pinned(on_host) or (goes and source.nbytes <= STAGED_NBYTES))
    if not (non_blocking and goes_on):
        gpu.wait(f"{name} {'to' if comes else 'from'} the host")


class HostUse(TorchDispatchMode):
    """Also books what the host does with pinned memory, which the device may still read or write."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, PretendTensor) for leaf in leaves):
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            writes = [
                t
                for a, value in zip(func._schema.arguments, args)
                if a.alias_info and a.alias_info.is_write
                for t in tree_leaves(value)
            ]
            is_view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
            if not is_view:
                gpu.launch(gpu.host, func._schema.name, tensors, writes)
        return func(*args, **(kwargs or {}))


class Future(torch.futures.Future[T]):
    """As torch's for an accelerator: who waits for it comes after who set its result."""

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()
        self.devices, self.clock, self.value_ = devices, Clock(), None

    def set_result(self, result: Any) -> None:
        if not self.devices and any(isinstance(leaf, PretendTensor) for leaf in tree_leaves(result)):
            raise ValueError(
                f"The result contained tensors residing on device {DEVICE}, and the future has no devices"
            )
        self.clock, self.value_ = dict(gpu.current.clock), result
        # DDP's reducer waits in C++, which knows no clocks. The first use of what it gets joins this one.
        super().set_result(
            tree_map(
                lambda v: PretendTensor(v.inner, self.clock) if isinstance(v, PretendTensor) else v, result
            )
        )

    def wait(self) -> Any:
        super().wait()
        gpu.current.join(self.clock)
        return self.value_

    def value(self) -> Any:
        return self.value_

    def then(self, callback: Callable[[Any], Any]) -> Any:
        after = Future(devices=self.devices)

        def act(_: object) -> None:
            stream = Stream()  # torch runs callbacks on streams of their own
            stream.join(self.clock)
            try:
                with on_stream(stream):
                    after.set_result(callback(self))
            except Exception as error:
                after.set_exception(error)

        super().add_done_callback(act)
        return after


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    before = getattr(gpu.local, "stream", None)
    gpu.local.stream = stream or before
    try:
        yield
    finally:
        gpu.local.stream = before


def _module() -> types.ModuleType:
    """Return the module of the device, as torch.cuda is for CUDA."""
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        Stream=Stream,
        Event=Event,
        stream=on_stream,
        current_stream=lambda device=None: gpu.current,
        default_stream=lambda device=None: gpu.default,
        current_device=lambda: 0,
        set_device=lambda device: None,
        device_count=lambda: 1,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_device_name=lambda device=None: "pretend accelerator",
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        synchronize=lambda device=None: gpu.wait("synchronize"),
        memory_allocated=lambda device=None: gpu.allocated,
        max_memory_allocated=lambda device=None: gpu.peak,
        reset_peak_memory_stats=lambda device=None: setattr(gpu, "peak", gpu.allocated),
        empty_cache=lambda: None,
    )
    return module


gpu: Gpu = Gpu()


def register() -> None:
    """Register the device with torch, once in a process. It stays."""
    global DEVICE
    if DEVICE.type == NAME:
        return
    with warnings.catch_warnings(action="ignore"):
        import torch.distributed.optim  # which compiles calls of `torch.tensor`, as long as that is torch's
    _setup_privateuseone_for_python_backend(NAME, backend_module=_module())
    DEVICE = torch.device(NAME, 0)
    gpu.__init__()  # type: ignore[misc]  # with streams of this device
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
    register.library = library  # type: ignore[attr-defined]  # with it the kernel would go
    _foreach_supported_types.append(PretendTensor)
    torch.futures.Future = Future  # type: ignore[misc]
    for maker in ("tensor", "as_tensor"):  # torch turns Python's dispatch off within them
        setattr(torch, maker, _on_the_cpu_first(getattr(torch, maker)))
    torch.Tensor.is_pinned = _is_pinned  # type: ignore[method-assign]
    torch.empty_like = _pinned(torch.empty_like)


def _is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    return tensor.is_cpu and gpu.is_pinned(tensor)


def _pinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        if pin_memory:
            gpu.born(made.untyped_storage(), gpu.host)
        return made

    return pinned


def _on_the_cpu_first(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def on_the_cpu_first(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = data if isinstance(data, PretendTensor) else make(data, *args, **kwargs)
        device = torch.get_default_device() if device is None else torch.device(device)
        return made.to(device)

    return on_the_cpu_first
