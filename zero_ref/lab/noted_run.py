"""One forward and backward of a model on the meta device, noted block by block.

Each operation below autograd is noted with the call of a block that it belongs to. An operation of backward
belongs to the block whose forward made the node that runs it: autograd numbers nodes in the order of forward,
so each call of a block has a range of numbers. Products are those that torch's `FlopCounterMode` counts, and
products of experts, which it does not; what is kept is what torch's hooks of saved tensors are given.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zero_ref.lab.on_meta import OnMeta, keys_seen
from zero_ref.simulator.models import blocks, from_module
from zero_ref.simulator.traced import Point

aten = torch.ops.aten

OUTSIDE = -1
"""The number of a call for what is outside of all blocks."""

SMALL = 16
"""A value of a sixteenth of a block's largest elements is a statistic, which a compiler keeps."""

Inputs = Callable[[int, int], Any]
"""What a model is called with, for a batch and a length: a mapping of keywords, a tuple, or one tensor."""

Lengths = tuple[float, float, float, float]
"""A matrix product: m, k, n, and how often."""

Product = tuple[str, float, float, float, float]
"""The same, behind what tells it from others: the operation, and which operands are weights."""


class _Op(NamedTuple):
    """An operation.

    Args:
        call: the number of the block's call.
        reads, writes: (storage, bytes) of each.
        products: matrix products.
        whole, seen: operations of fused attention over whole sequences, and without what a mask hides.
        packs: values that autograd had kept of this call before the operation.
        is_view: it moves nothing.
    """

    name: str
    call: int
    is_backward: bool
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    products: tuple[Product, ...]
    whole: float
    seen: float
    packs: int

    @property
    def in_memory(self) -> bool:
        """Whether it is limited by the bytes that it reads and writes."""
        return not self.products and not self.whole


class Notes(TorchDispatchMode):
    """Everything that is computed in a forward and a backward, and what autograd keeps."""

    def __init__(self, module: nn.Module, kind_of_call: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[_Op] = []
        self.kinds: list[int] = []  # of each call of a block that ran
        self.inputs: list[set[int]] = []  # the storages that each call of a block was given
        self.kept: list[tuple[int, int]] = []  # (call, storage)
        self.missing: dict[str, None] = {}
        self.outputs = 0
        self.inactive = 0
        self._kind_of_call = kind_of_call
        self._called = 0
        self._passes_on = set[int]()
        self._packs = Counter[int]()
        self._open: list[int] = []
        self._ranges: list[tuple[int, int]] = []  # (first node, call), in order
        self._in_backward = False
        self._number: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # alive, so that no other gets its address
        self._itemsize: list[int] = []
        self._made_in: dict[int, int] = {}  # the call that made a storage
        self._readers = Counter[int]()  # how many blocks were given a storage
        self._shares: dict[int, tuple[float, float, float]] = {}
        self.given = {self.storage(one) for one in (*module.parameters(), *module.buffers())}
        self.saved: set[int] = set()
        self._tokens = 1

    # ------------------------------------------------------------------------------- storages

    def storage(self, tensor: Tensor) -> int:
        """The number of a tensor's storage."""
        storage = tensor.untyped_storage()
        number = self._number.setdefault(storage._cdata, len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
            self._itemsize.append(tensor.element_size())
        return number

    def nbytes(self, storage: int) -> int:
        return self._storages[storage].nbytes()

    def itemsize(self, storage: int) -> int:
        return self._itemsize[storage]

    # --------------------------------------------------------------------------------- blocks

    @property
    def call(self) -> int:
        """The call of a block that computes at this moment."""
        if self._in_backward:
            node = torch._C._current_autograd_node()
            if node is None or not self._ranges:
                return OUTSIDE
            at = bisect_right(self._ranges, (node._sequence_nr(), len(self.inputs))) - 1
            # The accumulation of a gradient has the largest number there is.
            return OUTSIDE if at < 0 or node._sequence_nr() >= 2**62 else self._ranges[at][1]
        return self._open[-1] if self._open else OUTSIDE

    def called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a block, or pass on what it is given where one like it has run."""
        if self._in_backward:  # it is computed again
            return forward(*args, **kwargs)
        tensors = [
            one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.requires_grad
        ]
        if self._kind_of_call and self._called >= len(self._kind_of_call):
            raise ValueError("the model calls more blocks at another length or batch.")
        kind = self._kind_of_call[self._called] if self._kind_of_call else self._called
        self._called += 1
        if kind in self._passes_on and tensors:
            return tensors[0]
        number = len(self.inputs)
        self.kinds.append(kind)
        self._open.append(number)
        self.inputs.append({self.storage(one) for one in tensors})
        self._readers.update(self.inputs[-1])
        self._ranges.append((torch._C._autograd._get_sequence_nr(), number))
        result = forward(*args, **kwargs)
        self._open.pop()
        self._ranges.append((torch._C._autograd._get_sequence_nr(), self.call))
        if isinstance(result, Tensor) and tensors and result.shape == tensors[0].shape and self._kind_of_call:
            self._passes_on.add(kind)
        return result

    # ------------------------------------------------------------------------------ operations

    def keep(self, tensor: Tensor) -> Tensor:
        """Note a value that autograd keeps."""
        storage = self.storage(tensor)
        self._packs[self.call] += 1
        if storage not in self.given and storage not in self.saved:
            self.saved.add(storage)
            self.kept.append((self.call, storage))
        return tensor

    def backward(self, loss: Tensor) -> None:
        self._in_backward = True
        loss.backward()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        given = {self.storage(one) for one in read}
        written = [one for one in made if self.storage(one) not in given]
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += [one for one in tree_leaves(value) if isinstance(one, Tensor)]
        packet = func._overloadpacket
        if not written or packet in _MAKES_ROOM:
            return result
        call = self.call
        tag = packet.__name__ + "".join(str(int(self.storage(one) in self.given)) for one in read)
        products = tuple((tag, *lengths) for lengths in _products(packet, args, result))
        for one in written:
            self._made_in.setdefault(self.storage(one), call)
        whole, seen = self._attention(packet, func, args, call)
        if func.namespace not in ("aten", "prims", "prim") and not products:
            self.missing[f"the operations inside of {func.namespace}::{packet.__name__}"] = None
        if packet is aten._log_softmax and not self._in_backward:
            self.outputs = max(self.outputs, args[0].shape[-1])
        sources = written if packet in _GATHERS else read
        self.ops.append(
            _Op(
                packet.__name__,
                call,
                self._in_backward,
                tuple(
                    {
                        self.storage(one): min(one.nbytes, one.untyped_storage().nbytes()) for one in sources
                    }.items()
                )
                if packet not in _GATHERS
                else tuple((self.storage(one), one.nbytes) for one in sources),
                tuple({self.storage(one): one.nbytes for one in written}.items()),
                products,
                whole,
                seen,
                self._packs[call],
            )
        )
        if packet is aten._grouped_mm and not self._in_backward and args[1].dim() == 3:
            experts, inputs, outputs = args[1].shape
            self.inactive += round((experts - args[0].shape[0] / self._tokens) * inputs * outputs)
        return result

    def tokens(self, number: int) -> None:
        """Say how many tokens the run has."""
        self._tokens = number

    def _attention(self, packet: Any, func: Any, args: Any, call: int) -> tuple[float, float]:
        if not packet.__name__.startswith("_scaled_dot_product"):
            return 0.0, 0.0
        if "backward" in packet.__name__:
            # The shares of what forward has computed: five products where it made two.
            every, whole, seen = self._shares.get(call, (1.0, 1.0, 1.0))
            query, key, value = args[1:4]
            flops = _attention_flops(query, key, value) * _BACKWARD_OF_FLASH
            return flops * whole / every, flops * seen / every
        named = dict(zip((one.name for one in func._schema.arguments), args))
        query, key, value = args[:3]
        flops = _attention_flops(query, key, value)
        length = key.shape[-2]
        window = keys_seen(length)
        pairs = window * (window + 1) / 2 + window * (length - window)
        whole = flops * window / length
        seen = flops * pairs / length**2 if named.get("is_causal") else whole
        before = self._shares.get(call, (0.0, 0.0, 0.0))
        self._shares[call] = before[0] + flops, before[1] + whole, before[2] + seen
        return whole, seen

    # ------------------------------------------------------------------------------- summaries

    def summaries(self) -> dict[int, Summary]:
        """What each call of a block keeps and computes, and what is outside of them."""
        ops, kept = defaultdict[int, list[_Op]](list), defaultdict[int, list[int]](list)
        for one in self.ops:
            ops[one.call].append(one)
        for of_call, storage in self.kept:
            kept[self._owner(of_call, storage)].append(storage)
        transient = self._transients(kept)
        # Storages that operations of several blocks or ways read, or that a product does.
        readers = defaultdict[int, set[tuple[int, bool, bool]]](set)
        for one in self.ops:
            for storage, _ in one.reads:
                readers[storage].add((one.call, one.is_backward, one.in_memory))
        return {
            call: self._summary(call, ops[call], kept[call], transient[call], readers)
            for call in (*range(len(self.inputs)), OUTSIDE)
        }

    def _summary(
        self,
        call: int,
        ops: Sequence[_Op],
        kept: Sequence[int],
        transient: int,
        readers: Mapping[int, set[tuple[int, bool, bool]]],
    ) -> Summary:
        forward = [one for one in ops if not one.is_backward]
        backward = [one for one in ops if one.is_backward]
        made = {storage: one for one in forward for storage, _ in one.writes}
        operands = {storage for one in forward if not one.in_memory for storage, _ in one.reads}
        largest = max(
            (nbytes // self.itemsize(at) for one in forward for at, nbytes in one.writes), default=0
        )

        def role(storage: int) -> str:
            small = self.nbytes(storage) // self.itemsize(storage) * SMALL <= largest
            return self._role(storage, made.get(storage), call, storage in operands, small)

        roles = {storage: role(storage) for storage in kept}
        elements = Counter[tuple[str, str, int]]()
        for storage in kept:
            itemsize = self.itemsize(storage)
            name = made[storage].name if storage in made else "input"
            elements[name, roles[storage], itemsize] += self.nbytes(storage) // itemsize
        recomputed = {storage for storage in kept if roles[storage] == "pointwise"}
        given = self.inputs[call] if call != OUTSIDE else set()
        of_input = sum(map(self.nbytes, given))
        listed = [one for one in forward if one.products and one.name in ("mm", "addmm")][::2]
        listed += [one for one in forward if one.whole]
        return Summary(
            tuple(elements.items()),
            sum(map(self.nbytes, _sources(recomputed, made, set(kept) | self.given))),
            of_input,
            of_input + sum(nbytes for one in listed for _, nbytes in one.writes),
            transient,
            _counted(one for one in forward if one.packs == self._packs[call] and call != OUTSIDE),
            sum(one.whole for one in forward),
            self._work(forward, recomputed, readers),
            self._work(backward, recomputed, readers),
        )

    def _owner(self, call: int, storage: int) -> int:
        """The call that a value belongs to; what several blocks are given belongs to none."""
        if call == OUTSIDE or self._made_in.get(storage) == call:
            return call
        return call if self._readers[storage] == 1 else OUTSIDE

    def _role(self, storage: int, made_by: _Op | None, call: int, is_operand: bool, is_small: bool) -> str:
        """What a value is that autograd keeps, as `layers.Kept` names it."""
        if call == OUTSIDE and self.outputs:
            if self.nbytes(storage) == self._tokens * self.outputs * self.itemsize(storage):
                return "logits"
        elif storage in self.inputs[call]:
            return "input"
        if made_by is None:
            return "statistics"
        if made_by.whole:
            return "attention" if storage == made_by.writes[0][0] else "statistics"
        if made_by.products:
            return "product"
        if self.itemsize(storage) == 1:
            return "mask"
        if is_operand:
            return "operand"
        return "statistics" if is_small else "pointwise"

    def _transients(self, kept: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """The most bytes that backward makes in each call, less those of kept values that it has freed."""
        last = {storage: at for at, one in enumerate(self.ops) for storage, _ in one.reads}
        owner = {storage: call for call, storages in kept.items() for storage in storages}
        alive, total = dict[int, int](), 0
        freed, peak = defaultdict[int, int](int), defaultdict[int, int](int)
        for at, one in enumerate(self.ops):
            if not one.is_backward:
                continue
            for storage, _ in one.writes:
                if (
                    storage in last
                    and storage not in owner
                    and storage not in self.given
                    and storage not in alive
                ):
                    alive[storage] = self.nbytes(storage)
                    total += alive[storage]
            peak[one.call] = max(peak[one.call], total - freed[one.call])
            for storage, _ in one.reads:
                if last[storage] == at:
                    total -= alive.pop(storage, 0)
                    if storage in owner:
                        freed[owner.pop(storage)] += self.nbytes(storage)
        return peak

    def _work(
        self,
        ops: Sequence[_Op],
        recomputed: set[int],
        readers: Mapping[int, set[tuple[int, bool, bool]]],
    ) -> Work:
        in_memory = [one for one in ops if one.in_memory]
        return Work(
            _counted(ops),
            sum(one.seen for one in ops),
            sum(nbytes for one in in_memory for _, nbytes in (*one.reads, *one.writes)),
            self._fused(ops, recomputed, readers),
        )

    def _fused(
        self,
        ops: Sequence[_Op],
        recomputed: set[int],
        readers: Mapping[int, set[tuple[int, bool, bool]]],
    ) -> int:
        """Bytes that neighbouring operations read and write if each group of neighbours is one kernel."""
        group: dict[int, int] = {}  # of each storage that such an operation made

        def top(one: int) -> int:
            while group[one] != one:
                one = group[one]
            return one

        reads: dict[tuple[int, int], int] = {}
        for one in ops:
            if not one.in_memory:
                continue
            mine = one.writes[0][0]
            for storage, _ in one.writes:
                group.setdefault(storage, storage)
                group[top(storage)] = top(mine) if top(mine) in group else mine
            for storage, nbytes in one.reads:
                if storage in group:
                    group[top(storage)] = top(mine)
                else:
                    reads[mine, storage] = nbytes
        inside = {storage for one in ops if one.in_memory for storage, _ in one.writes}
        once = {
            (top(mine), storage): nbytes
            for (mine, storage), nbytes in reads.items()
            if storage not in recomputed
        }
        # What a product, another block or the other way reads has to be written.
        mine_alone = {(one.call, one.is_backward, True) for one in ops}
        written = sum(
            self.nbytes(storage)
            for storage in inside - recomputed
            if storage in self.saved or readers.get(storage, set()) - mine_alone
        )
        return sum(once.values()) + written


class Work(NamedTuple):
    """What a forward or a backward of a block computes, with the fields of `TracedPass`."""

    products: tuple[Product, ...]
    seen: float
    touched: int
    compiled: int


class Summary(NamedTuple):
    """A call of a block at one batch and length, with the fields of `TracedLayer`."""

    kept: tuple[tuple[tuple[str, str, int], int], ...]
    sources: int
    input: int
    by_operation: int
    gradients: int
    last: tuple[Product, ...]
    whole: float
    forward: Work
    backward: Work


def _sources(recomputed: set[int], made: Mapping[int, _Op], kept: set[int]) -> set[int]:
    """What values that are computed again are computed from, unless it is kept in any case."""
    found, waiting, seen = set[int](), list(recomputed), set(recomputed)
    while waiting:
        by = made.get(waiting.pop())
        for storage, _ in by.reads if by is not None and by.in_memory else ():
            if storage in seen or (storage in kept and storage not in recomputed):
                continue
            seen.add(storage)
            if storage in made and made[storage].in_memory:
                waiting.append(storage)
            elif storage in made:
                found.add(storage)
    return found


def _counted(ops: Iterable[_Op]) -> tuple[Product, ...]:
    """All products, in order."""
    return tuple(product for one in ops for product in one.products)


_BACKWARD_OF_FLASH = 2.5
"""Products of fused attention's backward over those of its forward: five where forward makes two."""
_MAKES_ROOM = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
_GATHERS = {aten.embedding, aten.index, aten.index_select, aten.gather}
"""Operations that read as much as they write, of a table that may be larger."""


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> float:
    *batch, length, width = query.shape
    return 2.0 * math.prod(batch) * length * key.shape[-2] * (width + value.shape[-1])


def _products(packet: Any, args: Sequence[Any], result: Any) -> Iterator[Lengths]:
    """The matrix products of an operation."""
    if packet in (aten.addmm, aten.baddbmm):
        args = args[1:]
    if packet in (aten.mm, aten.addmm):
        (m, k), n = args[0].shape, args[1].shape[1]
        yield m, k, n, 1
    elif packet in (aten.bmm, aten.baddbmm):
        (times, m, k), n = args[0].shape, args[1].shape[2]
        yield m, k, n, times
    elif packet is aten._grouped_mm:
        yield _grouped(args[0], args[1], result)
    elif packet in (aten.convolution, aten._convolution):
        yield _convolved(result, args[1], args[8], transposed=args[6], given=args[0])
    elif packet is aten.convolution_backward:
        made, given, weight = args[:3]
        one = _convolved(made, weight, args[9], transposed=args[7], given=given)
        yield from [one] * sum(args[10][:2])
    elif packet in flop_registry and not packet.__name__.startswith("_scaled_dot_product"):
        flops = flop_registry[packet](*args, out_val=result)
        yield 1, 1, 1, flops / 2


def _grouped(first: Tensor, second: Tensor, result: Tensor) -> Lengths:
    """A product for each expert, of which all are given as many rows."""
    if second.dim() == 3:
        experts, k, n = second.shape
        return first.numel() / k / experts, k, n, experts
    # Gradients of the weights: the rows that the two have in common are shared out over the experts.
    experts, m, n = result.shape
    return m, first.shape[1] / experts, n, experts


def _convolved(made: Tensor, weight: Tensor, groups: int, *, transposed: bool, given: Tensor) -> Lengths:
    """A convolution as products of patches with kernels, one for each group."""
    outputs, inputs, *kernel = weight.shape
    if transposed:
        made = given
    places = made.shape[0] * math.prod(made.shape[2:])
    return places, inputs * math.prod(kernel), outputs / groups, groups


def note(module: nn.Module, inputs: Inputs, point: Point, kind_of_call: Sequence[int] = ()) -> Notes:
    """Run a module once.

    Args:
        kind_of_call: the kind of each block that is called, of which one runs; empty to run all.
    """
    notes = Notes(module, kind_of_call)
    notes.tokens(math.prod(point))
    module.zero_grad(set_to_none=True)
    with torch.device("meta"):
        given = inputs(*point)
    args = () if isinstance(given, Mapping) else given if isinstance(given, tuple) else (given,)
    keywords = given if isinstance(given, Mapping) else {}
    try:
        with _blocks_noted(module, notes), torch.device("meta"), OnMeta(), notes:
            with torch.autograd.graph.saved_tensors_hooks(notes.keep, lambda kept: kept):
                loss = _loss_of(module(*args, **keywords))
            notes.backward(loss)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"the model cannot be traced on the meta device, which has shapes and no values: {error}"
        ) from error
    finally:
        module.zero_grad(set_to_none=True)
    return notes


@contextmanager
def _blocks_noted(module: nn.Module, notes: Notes) -> Iterator[None]:
    """Note when a block begins and ends: what has a number in its name, as the units of stage 3."""
    names = [name for name, _ in module.named_parameters()]
    prefixes = set()
    for unit in blocks(from_module(module))[1:]:
        path = names[unit[0]].split(".")
        number = next(place for place, part in enumerate(path) if part.isdecimal())
        prefixes.add(".".join(path[: number + 1]))
    wrapped = [one for name, one in module.named_modules() if name in prefixes]
    for one in wrapped:
        one.forward = wraps(one.forward)(partial(notes.called, one.forward))
    try:
        yield
    finally:
        for one in wrapped:
            del one.forward


def _loss_of(result: Any) -> Tensor:
    """The loss among what a model returns; if there is none, the sum of its first result with a gradient."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    found = [one for one in tree_leaves(result) if isinstance(one, Tensor) and one.requires_grad]
    if not found:
        raise ValueError("nothing that the model returns has a gradient: no parameter is trained.")
    scalar = next((one for one in found if one.dim() == 0), None)
    return found[0].sum() if scalar is None else scalar
