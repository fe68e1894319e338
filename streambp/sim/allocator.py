"""A model of PyTorch's CUDA caching allocator: reserved bytes, and where memory runs out.

Block level, one stream. Both ways of getting memory from the driver are modelled: whole segments
(the default) and expandable segments. Real reserved memory differs by up to about 1 GiB, since
streams, other libraries and the driver's own rounding are left out; allocated bytes are exact.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_MIB = 2**20
_SMALL_MAX = _MIB  # requests up to this come from the pool of small segments
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_LARGE_MIN = 10 * _MIB  # requests from this on get a segment of their own size
_ROUND_SEGMENT = 2 * _MIB
_MIN_BLOCK = 512


class AllocatorOutOfMemory(Exception):
    """A request that did not fit, with what was reserved and allocated then."""

    def __init__(self, request_bytes: int, reserved_bytes: int, allocated_bytes: int):
        super().__init__(
            f"{request_bytes} bytes asked for with {reserved_bytes} reserved, "
            f"{allocated_bytes} allocated"
        )
        self.request_bytes = request_bytes
        self.reserved_bytes = reserved_bytes
        self.allocated_bytes = allocated_bytes


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Peaks of a replayed program. `oom_event`: index of the event that did not fit, or None."""

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    num_retries: int
    oom_event: int | None


class _Segment:
    """A contiguous range from the driver, cut into blocks."""

    __slots__ = ("is_small", "number", "size")

    def __init__(self, number: int, size: int, is_small: bool):
        self.number = number
        self.size = size
        self.is_small = is_small


class _Block:
    __slots__ = ("free", "next", "offset", "prev", "segment", "size")

    def __init__(self, segment: _Segment, offset: int, size: int):
        self.segment = segment
        self.offset = offset
        self.size = size
        self.free = True
        self.prev: _Block | None = None
        self.next: _Block | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Best fit first: smallest size, then lowest address."""
        return (self.size, self.segment.number, self.offset)


class _Pool:
    """Free blocks in order of size."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int, int]] = []
        self._blocks: dict[tuple[int, int, int], _Block] = {}

    def blocks(self) -> list[_Block]:
        return list(self._blocks.values())

    def add(self, block: _Block) -> None:
        bisect.insort(self._keys, block.key)
        self._blocks[block.key] = block

    def remove(self, block: _Block) -> None:
        self._keys.pop(bisect.bisect_left(self._keys, block.key))
        del self._blocks[block.key]

    def best_fit(self, num_bytes: int) -> _Block | None:
        index = bisect.bisect_left(self._keys, (num_bytes, -1, -1))
        return self._blocks[self._keys[index]] if index < len(self._keys) else None


class CachingAllocator:
    """Replays allocations as the caching allocator would serve them.

    Args:
        capacity_bytes: what the driver can give; None: without limit.
        expandable: expandable segments (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`).
    """

    def __init__(self, capacity_bytes: int | None = None, *, expandable: bool = False):
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.num_retries = 0
        self._capacity = capacity_bytes
        self._expandable = expandable
        self._pools = {True: _Pool(), False: _Pool()}
        self._live: dict[int, _Block] = {}
        self._num_segments = 0
        self._tails: dict[bool, _Block] = {}  # last block of each expandable segment

    def allocate(self, event_id: int, num_bytes: int) -> None:
        """Serve a request. Raises `AllocatorOutOfMemory` if even an emptied cache can't."""
        size = max(-(-num_bytes // _MIN_BLOCK) * _MIN_BLOCK, _MIN_BLOCK)
        small = size <= _SMALL_MAX
        pool = self._pools[small]
        block = pool.best_fit(size)
        if block is not None:
            pool.remove(block)
        else:
            block = self._grow(size, small)
        block.free = False
        self._split(block, size)
        self._live[event_id] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, event_id: int) -> None:
        """Give a block back to its pool, merged with free neighbours."""
        block = self._live.pop(event_id)
        self.allocated_bytes -= block.size
        block.free = True
        pool = self._pools[block.segment.is_small]
        if block.next is not None and block.next.free:
            pool.remove(block.next)
            self._merge(block, block.next)
        if block.prev is not None and block.prev.free:
            pool.remove(block.prev)
            block = block.prev
            assert block.next is not None
            self._merge(block, block.next)
        pool.add(block)

    def _split(self, block: _Block, size: int) -> None:
        remaining = block.size - size
        small = block.segment.is_small
        splits_finely = small or self._expandable
        if not (remaining >= _MIN_BLOCK if splits_finely else remaining > _SMALL_MAX):
            return
        rest = _Block(block.segment, block.offset + size, remaining)
        rest.prev, rest.next = block, block.next
        if block.next is not None:
            block.next.prev = rest
        block.next = rest
        block.size = size
        if self._tails.get(small) is block:
            self._tails[small] = rest
        self._pools[small].add(rest)

    def _merge(self, left: _Block, right: _Block) -> None:
        left.size += right.size
        left.next = right.next
        if right.next is not None:
            right.next.prev = left
        if self._tails.get(left.segment.is_small) is right:
            self._tails[left.segment.is_small] = left

    def _grow(self, size: int, small: bool) -> _Block:
        return self._grow_tail(size, small) if self._expandable else self._new_segment(size, small)

    def _new_segment(self, size: int, small: bool) -> _Block:
        if small:
            segment_size = _SMALL_SEGMENT
        elif size < _LARGE_MIN:
            segment_size = _LARGE_SEGMENT
        else:
            segment_size = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        self._reserve(segment_size, size)
        self._num_segments += 1
        return _Block(_Segment(self._num_segments, segment_size, small), 0, segment_size)

    def _grow_tail(self, size: int, small: bool) -> _Block:
        """Map more pages behind the pool's one expandable segment."""
        page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        tail = self._tails.get(small)
        have = tail.size if tail is not None and tail.free else 0
        need = -(-(size - have) // page) * page
        self._reserve(need, size)
        if tail is not None and tail.free:
            self._pools[small].remove(tail)
            tail.size += need
            return tail
        if tail is None:
            self._num_segments += 1
            block = _Block(_Segment(self._num_segments, 0, small), 0, need)
        else:
            block = _Block(tail.segment, tail.offset + tail.size, need)
            block.prev = tail
            tail.next = block
        self._tails[small] = block
        return block

    def _reserve(self, num_bytes: int, request_bytes: int) -> None:
        if self._over(num_bytes):
            self.num_retries += 1
            self.empty_cache()
            if self._over(num_bytes):
                raise AllocatorOutOfMemory(request_bytes, self.reserved_bytes, self.allocated_bytes)
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _over(self, num_bytes: int) -> bool:
        return self._capacity is not None and self.reserved_bytes + num_bytes > self._capacity

    def empty_cache(self) -> None:
        """Give whole segments without a live block back to the driver.

        Of an expandable segment nothing is given back: an upper bound on what it reserves.
        """
        if self._expandable:
            return
        for pool in self._pools.values():
            for block in pool.blocks():
                if block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size


def replay(
    events: Iterable[Sequence[Any]],
    *,
    capacity_bytes: int | None = None,
    expandable: bool = False,
) -> Replay:
    """Run `(id, +bytes)` and `(id, -bytes)` events through the allocator until memory runs out.

    Whatever else an event holds is not looked at; one of 0 bytes changes nothing.
    """
    allocator = CachingAllocator(capacity_bytes, expandable=expandable)
    oom_event = None
    for index, (event_id, num_bytes, *_) in enumerate(events):
        if num_bytes == 0:
            continue
        if num_bytes < 0:
            allocator.free(event_id)
            continue
        try:
            allocator.allocate(event_id, num_bytes)
        except AllocatorOutOfMemory:
            oom_event = index
            break
    return Replay(
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        num_retries=allocator.num_retries,
        oom_event=oom_event,
    )
