"""What the grader and an answer in another process say to each other, and how neither has to trust it.

A message is JSON. Lists, dicts, tensors, storages and optimizers have numbers that both sides know, so that
what one side changes in place changes on the other side too: a parameter that the answer moved into a flat
tensor is a window of that flat tensor in the grader's process as well. Towards the answer a message may also
hold a pickle, because the grader is trusted. Towards the grader it never does: what comes is read into
numbers, texts, containers, tensors and a few value types of this package. Everything else becomes `Opaque`.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import inspect
import io
import json
import math
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from socket import socket
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

LARGEST_MESSAGE = 64 * 2**20
MOST_ELEMENTS = 2**26
"""Of a tensor that an answer sends: an expanded one needs few bytes on the wire and many in the grader."""

VALUES_FROM = ("zero_ref.plan.", "zero_ref.simulator.", "zero_ref_course.", "zero_ref.lab.meter")
"""Modules whose NamedTuples and dataclasses an answer may return."""

REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


class WireError(Exception):
    """What came cannot be read, or what was given cannot be sent."""


class Opaque:
    """Stands for a value of a type that does not travel: it has its type's name and its repr."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


# ------------------------------------------------------------------------------------------- messages


def send(sock: socket, message: Any) -> None:
    """Send one message."""
    text = json.dumps(message).encode()
    if len(text) > LARGEST_MESSAGE:
        raise WireError(f"it has {len(text):,} bytes, and {LARGEST_MESSAGE:,} may be sent at once")
    sock.sendall(struct.pack(">Q", len(text)) + text)


def receive(sock: socket) -> Any:
    """The next message.

    Raises:
        EOFError: the other side has ended.
        WireError: it is no message.
        TimeoutError: as the socket says.
    """
    (size,) = struct.unpack(">Q", _read(sock, 8))
    if size > LARGEST_MESSAGE:
        raise WireError(f"a message of {size:,} bytes came, and {LARGEST_MESSAGE:,} are allowed")
    try:
        return json.loads(_read(sock, size))
    except (ValueError, RecursionError) as error:
        raise WireError(f"what came is no message: {error}") from None


def _read(sock: socket, size: int) -> bytes:
    read = io.BytesIO()
    while left := size - read.tell():
        part = sock.recv(min(left, 2**20))
        if not part:
            raise EOFError
        read.write(part)
    return read.getvalue()


# ------------------------------------------------------------------------------------------- both sides


class Table:
    """The objects that both sides know, by number; the grader counts up and the answer counts down.

    Args:
        step: 1 on the grader's side, -1 on the answer's.
    """

    def __init__(self, step: int) -> None:
        self.step = self._last = step
        self.objects: dict[int, Any] = {}
        self._number_of: dict[int, int] = {}

    def number(self, thing: Any) -> int:
        """Its number, a new one the first time."""
        key = _key(thing)
        if key not in self._number_of:
            self._last += self.step
            self.put(self._last, thing)
        return self._number_of[key]

    def put(self, number: int, thing: Any) -> None:
        """Know it by a number that the other side has chosen."""
        self.objects[number] = thing  # alive from now on, so that its id stays its own
        self._number_of[_key(thing)] = number

    def known(self, thing: Any) -> int | None:
        """Its number if it has one."""
        return self._number_of.get(_key(thing))

    def forget_containers(self) -> None:
        """After a call: lists, dicts and sets are known for one call, all else for as long as the answer."""
        for number, thing in list(self.objects.items()):
            if isinstance(thing, (list, dict, set)):
                del self.objects[number], self._number_of[_key(thing)]


def _key(thing: Any) -> int:
    # Every call of untyped_storage() makes a new Python object for the same memory.
    return ~thing._cdata if isinstance(thing, torch.UntypedStorage) else id(thing)


class Writer:
    """Writes values for one message.

    Args:
        table: what both sides know.
        trusted: whether the reader trusts us, so that a value may be pickled.
        expose: gives for an object the (name, methods, values) that the other side may use of it, or None.
    """

    def __init__(
        self,
        table: Table,
        trusted: bool,
        expose: Callable[[Any], tuple[str, list[str], dict[str, Any]] | None] = lambda _: None,
    ) -> None:
        self.table, self.trusted, self.expose = table, trusted, expose
        self._written: set[int] = set()

    def write(self, value: Any) -> Any:
        """A value as JSON: a scalar, or a list that begins with the kind of value."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) in (bytes, bytearray):
            return ["bytes", _text(bytes(value))]
        if "numpy" in sys.modules and type(value).__module__ == "numpy":
            return self._numpy(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, Optimizer):
            return self._optimizer(value)
        if isinstance(value, tuple) and (type(value) is tuple or not self._is_value(value)):
            return ["tuple", [self.write(item) for item in value]]
        if isinstance(value, (list, set)):
            return self._once(
                value, "list" if isinstance(value, list) else "set", lambda: map(self.write, value)
            )
        if isinstance(value, frozenset):
            return ["frozenset", [self.write(item) for item in value]]
        if isinstance(value, dict):
            return self._once(
                value, "dict", lambda: ([self.write(key), self.write(item)] for key, item in value.items())
            )
        if isinstance(value, (complex, torch.dtype, Fraction, range, Path, bool, int, float, str)):
            return _simple(value)
        if isinstance(value, torch.distributed.ReduceOp.RedOpType):
            return ["op", value.name]
        return self._trusted(value) if self.trusted else self._untrusted(value)

    def _once(self, value: Any, kind: str, items: Callable[[], Any]) -> Any:
        number = self.table.number(value)
        if number in self._written:
            return ["known", number]
        self._written.add(number)
        return [kind, number, list(items())]

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise WireError(f"a tensor of layout {tensor.layout} on {tensor.device} cannot be sent")
        tensor = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
        number = self.table.number(tensor)
        if number in self._written:
            return ["known", number]
        self._written.add(number)
        memory = tensor.untyped_storage()
        place, content = self.table.number(memory), None
        if place not in self._written:
            self._written.add(place)
            content = _text(ctypes.string_at(memory.data_ptr(), memory.nbytes()) if memory.nbytes() else b"")
        layout = [list(tensor.size()), list(tensor.stride()), tensor.storage_offset()]
        grad = self.write(tensor.grad) if tensor.is_leaf else None
        kind = "param" if isinstance(tensor, nn.Parameter) else "tensor"
        dtype = str(tensor.dtype).removeprefix("torch.")
        return [kind, number, place, content, dtype, layout, tensor.requires_grad, grad]

    def _optimizer(self, optimizer: Optimizer) -> Any:
        number = self.table.number(optimizer)
        if number in self._written:
            return ["known", number]
        self._written.add(number)
        groups = [
            [[self.write(param) for param in group["params"]], self._options(group)]
            for group in optimizer.param_groups
        ]
        state = [[self.write(param), self._options(of_param)] for param, of_param in optimizer.state.items()]
        kind = _text(pickle.dumps(type(optimizer))) if self.trusted else type(optimizer).__name__
        return ["optimizer", number, kind, groups, state]

    def _options(self, options: Mapping[str, Any]) -> Any:
        return [[key, self.write(value)] for key, value in options.items() if key != "params"]

    def _numpy(self, value: Any) -> Any:
        if value.dtype.kind not in "biuf" or value.nbytes > LARGEST_MESSAGE:
            return self._untrusted(value)
        return [
            "numpy",
            value.dtype.str,
            list(value.shape),
            _text(value.tobytes()),
            not hasattr(value, "flags") or (not value.shape and type(value).__name__ != "ndarray"),
        ]

    def _trusted(self, value: Any) -> Any:
        if not isinstance(value, type) and (exposed := self.expose(value)):
            name, methods, values = exposed
            return ["proxy", self.table.number(value), name, methods, self.write(values)]
        return ["pickle", _text(pickle.dumps(value))]

    def _untrusted(self, value: Any) -> Any:
        if (number := self.table.known(value)) is not None:
            return ["known", number]  # what the grader has lent
        if isinstance(value, Iterator):
            return ["iterator", [self.write(item) for item in value]]
        if isinstance(value, (type({}.keys()), type({}.values()), type({}.items()))):
            return self.write(list(value))
        if self._is_value(value):
            kind = type(value)
            values = [[name, self.write(getattr(value, name))] for name in _field_names(kind)]
            return ["value", kind.__module__, kind.__qualname__, values]
        try:
            text = repr(value)[:2000]
        except Exception as error:
            text = f"<a {type(value).__name__} whose repr raises {type(error).__name__}>"
        return ["opaque", type(value).__name__, text]

    def _is_value(self, value: Any) -> bool:
        return _is_value_type(type(value))


def _is_value_type(kind: Any) -> bool:
    if not isinstance(kind, type) or not f"{kind.__module__}.".startswith(VALUES_FROM):
        return False
    if issubclass(kind, tuple):
        return hasattr(kind, "_fields")
    return dataclasses.is_dataclass(kind) and all(one.init for one in dataclasses.fields(kind))


def _field_names(kind: Any) -> list[str]:
    return list(kind._fields) if issubclass(kind, tuple) else [one.name for one in dataclasses.fields(kind)]


def _simple(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, Fraction):
        return ["fraction", value.numerator, value.denominator]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, Path):
        return ["path", str(value)]
    base = next(base for base in (bool, int, float, str) if isinstance(value, base))
    return base(value)


class Reader:
    """Reads the values of one message, into objects that are known already where they have a number.

    Args:
        table: what both sides know.
        trusted: whether the writer is trusted, so that a pickle is opened.
        proxy: makes what stands for an object of the other side.
    """

    def __init__(
        self, table: Table, trusted: bool, proxy: Callable[[int, str, list[str], Any], Any] | None = None
    ) -> None:
        self.table, self.trusted, self.proxy = table, trusted, proxy

    def read(self, node: Any) -> Any:
        """The value.

        Raises:
            WireError: the message is not one that a `Writer` writes.
        """
        try:
            return self._read(node)
        except WireError:
            raise
        except Exception as error:
            raise WireError(f"{type(error).__name__}: {error}") from None

    def _read(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        kind, *parts = node
        method = getattr(self, f"_read_{kind}", None) if isinstance(kind, str) else None
        if method is None:
            raise WireError(f"there is no kind of value {kind!r}")
        return method(*parts)

    def _read_known(self, number: int) -> Any:
        return self.table.objects[number]

    def _read_bytes(self, text: str) -> bytes:
        return base64.b64decode(text)

    def _read_tuple(self, items: list[Any]) -> Any:
        return tuple(map(self._read, items))

    def _read_frozenset(self, items: list[Any]) -> Any:
        return frozenset(map(self._read, items))

    def _read_iterator(self, items: list[Any]) -> Any:
        return iter([*map(self._read, items)])

    def _read_list(self, number: int, items: list[Any]) -> Any:
        found = self._container(number, list)
        found[:] = [*map(self._read, items)]
        return found

    def _read_set(self, number: int, items: list[Any]) -> Any:
        found = self._container(number, set)
        values = {*map(self._read, items)}
        found.clear()
        found |= values
        return found

    def _read_dict(self, number: int, items: list[Any]) -> Any:
        found = self._container(number, dict)
        pairs = [(self._read(key), self._read(value)) for key, value in items]
        found.clear()
        found.update(pairs)
        return found

    def _container(self, number: int, kind: Any) -> Any:
        found = self.table.objects.get(number)
        if found is None:
            self.table.put(number, found := kind())
        if not isinstance(found, kind):
            raise WireError(f"object {number} is a {type(found).__name__}")
        return found

    def _read_tensor(self, *parts: Any) -> torch.Tensor:
        return self._tensor(torch.Tensor, *parts)

    def _read_param(self, *parts: Any) -> torch.Tensor:
        return self._tensor(nn.Parameter, *parts)

    def _tensor(
        self,
        kind: Any,
        number: int,
        place: int,
        content: str | None,
        dtype: str,
        layout: Any,
        follows: bool,
        grad: Any,
    ) -> torch.Tensor:
        memory = self._memory(place, content)
        size, stride, offset = layout
        kind_of_number = _dtype(dtype)
        _check_place(size, stride, offset, memory.nbytes() // kind_of_number.itemsize)
        window = torch.empty(0, dtype=kind_of_number).set_(memory, offset, size, stride)
        found = self.table.objects.get(number)
        if found is None:
            found = (
                nn.Parameter(window, bool(follows))
                if kind is nn.Parameter
                else window.requires_grad_(bool(follows))
            )
            self.table.put(number, found)
        if not isinstance(found, torch.Tensor):
            raise WireError(f"object {number} is no tensor")
        is_there = found.untyped_storage()._cdata == memory._cdata and (
            found.dtype,
            found.size(),
            found.stride(),
            found.storage_offset(),
        ) == (window.dtype, window.size(), window.stride(), window.storage_offset())
        if not is_there:
            found.data = window
        if found.is_leaf:
            if found.requires_grad != follows:
                found.requires_grad_(bool(follows))
            gradient = self._read(grad)
            if found.grad is not gradient:
                found.grad = gradient
        return found

    def _memory(self, place: int, content: str | None) -> torch.UntypedStorage:
        memory = self.table.objects.get(place)
        if content is not None:
            values = base64.b64decode(content)
            if memory is None:
                self.table.put(place, memory := torch.UntypedStorage(len(values)))
            if not isinstance(memory, torch.UntypedStorage) or memory.nbytes() != len(values):
                raise WireError(f"object {place} is no memory of {len(values)} bytes")
            if values:
                ctypes.memmove(memory.data_ptr(), values, len(values))
        if not isinstance(memory, torch.UntypedStorage):
            raise WireError(f"object {place} is no memory")
        return memory

    def _read_optimizer(self, number: int, kind: str, groups: Any, state: Any) -> Any:
        of_groups = [([*map(self._read, params)], self._options(options)) for params, options in groups]
        of_params = [(self._read(param), self._options(options)) for param, options in state]
        found = self.table.objects.get(number)
        if found is None:
            made = pickle.loads(base64.b64decode(kind)) if self.trusted else _of_torch(kind)
            found = made([{"params": params, **own} for params, own in of_groups])
            self.table.put(number, found)
        if not isinstance(found, Optimizer) or len(found.param_groups) > len(of_groups):
            raise WireError(f"object {number} is no optimizer of {len(of_groups)} groups")
        for group, (params, options) in zip(found.param_groups, of_groups):
            if [*map(id, group["params"])] != [*map(id, params)]:
                group["params"] = params
            group.update(options)
        found.param_groups += [
            {"params": params, **own} for params, own in of_groups[len(found.param_groups) :]
        ]
        found.state.clear()
        found.state.update(of_params)
        return found

    def _options(self, options: Any) -> dict[str, Any]:
        return {str(key): self._read(value) for key, value in options}

    def _read_proxy(self, number: int, name: str, methods: list[str], values: Any) -> Any:
        if self.proxy is None:
            raise WireError("only the grader lends objects")
        if number not in self.table.objects:
            self.table.put(number, self.proxy(number, name, methods, self._read(values)))
        return self.table.objects[number]

    def _read_pickle(self, text: str) -> Any:
        if not self.trusted:
            raise WireError("an answer may not send a pickle")
        return pickle.loads(base64.b64decode(text))

    def _read_value(self, module: str, name: str, values: list[Any]) -> Any:
        kind = inspect.getattr_static(sys.modules.get(module), name, None)
        if not _is_value_type(kind) or kind.__module__ != module:
            raise WireError(f"{module}.{name} is no type of values")
        return kind(**{field: self._read(value) for field, value in values})

    def _read_opaque(self, name: str, text: str) -> Any:
        return type(str(name)[:80], (Opaque,), {})(str(text)[:2000])

    def _read_numpy(self, dtype: str, shape: list[int], content: str, scalar: bool) -> Any:
        import numpy as np

        if np.dtype(dtype).kind not in "biuf":
            raise WireError(f"an array of {dtype}")
        array = np.frombuffer(bytearray(base64.b64decode(content)), dtype).reshape(shape)
        return array[()] if scalar else array

    def _read_dtype(self, name: str) -> torch.dtype:
        return _dtype(name)

    def _read_complex(self, real: float, imag: float) -> complex:
        return complex(real, imag)

    def _read_fraction(self, numerator: int, denominator: int) -> Fraction:
        return Fraction(numerator, denominator)

    def _read_range(self, start: int, stop: int, step: int) -> range:
        return range(start, stop, step)

    def _read_path(self, text: str) -> Path:
        return Path(text)

    def _read_op(self, name: str) -> Any:
        if name not in REDUCE_OPS:
            raise WireError(f"there is no operation {name!r}")
        return getattr(torch.distributed.ReduceOp, name)


def _check_place(size: list[int], stride: list[int], offset: int, numel: int) -> None:
    """That a tensor lies in memory of `numel` elements: torch would enlarge it, with any contents."""
    whole = [*size, *stride, offset]
    if len(size) != len(stride) or len(size) > 16 or not all(type(one) is int and one >= 0 for one in whole):
        raise WireError(f"a tensor of shape {size} and strides {stride} at {offset}")
    if math.prod(size) > MOST_ELEMENTS:
        raise WireError(f"a tensor of shape {size} is too large")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride))
    if (math.prod(size) and last >= numel) or offset > numel:
        raise WireError(
            f"a tensor of shape {size} and strides {stride} at {offset} does not lie in its memory"
        )


def _of_torch(name: str) -> Any:
    found = getattr(torch.optim, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise WireError("an optimizer of the answer's own cannot be sent")
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise WireError(f"there is no dtype {name!r}")
    return found


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
