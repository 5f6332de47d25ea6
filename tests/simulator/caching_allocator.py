"""The rules by which PyTorch's caching allocator takes memory from a GPU, on sizes alone.

A request is rounded up to 512 bytes and gets the smallest free block of its pool that is large enough, whose
rest stays free. Small requests, up to 1 MiB, have a pool of their own. Freed neighbours become one block. If
no block is large enough, the allocator asks the device for a segment; or, with expandable segments, it makes
the pool's only segment longer.

Source: c10/cuda/CUDACachingAllocator.cpp in torch. A device that is full is left out: nothing is given back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KIB, MIB = 2**10, 2**20


@dataclass(eq=False)
class Block:
    """A piece of a segment."""

    small: bool
    nbytes: int
    free: bool = True
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """What one stream's tensors take.

    Args:
        expandable: segments grow, as with expandable_segments:True.
    """

    def __init__(self, *, expandable: bool) -> None:
        self.expandable = expandable
        self.reserved = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}
        self._last: dict[bool, Block | None] = {True: None, False: None}

    def take(self, nbytes: int) -> Block:
        """Give a block for a tensor of so many bytes."""
        nbytes = max(512, _up(nbytes, 512))
        small = nbytes <= MIB
        enough = [block for block in self._free[small] if block.nbytes >= nbytes]
        block = min(enough, key=lambda block: block.nbytes, default=None) or self._grown(small, nbytes)
        self._free[small].remove(block)
        block.free = False
        rest = block.nbytes - nbytes
        if rest >= (512 if small or self.expandable else MIB + 1):
            self._split(block, nbytes)
        return block

    def give_back(self, block: Block) -> None:
        """Free a block, and join it with free ones beside it."""
        block.free = True
        self._free[block.small].append(block)
        if block.before is not None and block.before.free:
            self._join(block.before, block)
            block = block.before
        if block.after is not None and block.after.free:
            self._join(block, block.after)

    def _split(self, block: Block, nbytes: int) -> None:
        rest = Block(block.small, block.nbytes - nbytes, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.nbytes = rest, nbytes
        self._free[block.small].append(rest)
        if self._last[block.small] is block:
            self._last[block.small] = rest

    def _join(self, first: Block, second: Block) -> None:
        first.nbytes += second.nbytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        self._free[second.small].remove(second)
        if self._last[second.small] is second:
            self._last[second.small] = first

    def _grown(self, small: bool, nbytes: int) -> Block:
        """Take memory from the device, and return a free block that is large enough."""
        if not self.expandable:
            of_segment = 2 * MIB if small else 20 * MIB if nbytes < 10 * MIB else _up(nbytes, 2 * MIB)
            self.reserved += of_segment
            self._free[small].append(Block(small, of_segment))
            return self._free[small][-1]
        last = self._last[small]
        at_the_end = last.nbytes if last is not None and last.free else 0
        more = _up(nbytes - at_the_end, 2 * MIB if small else 20 * MIB)
        self.reserved += more
        if last is None or not last.free:
            last = Block(small, 0, before=self._last[small])
            if last.before is not None:
                last.before.after = last
            self._last[small] = last
            self._free[small].append(last)
        last.nbytes += more
        return last


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def reserved_by(events: Iterable[tuple[int, int]], *, expandable: bool) -> int:
    """Return the bytes that are reserved after tensors were made and freed.

    Args:
        events: (number of the tensor, its bytes), and when it is freed, (number, 0).
    """
    allocator, living = CachingAllocator(expandable=expandable), dict[int, Block]()
    for number, nbytes in events:
        if nbytes:
            living[number] = allocator.take(nbytes)
        elif number in living:
            allocator.give_back(living.pop(number))
    return allocator.reserved
