"""The caching allocator's rules, one by one."""

import random

import pytest

from streambp.sim.allocator import CachingAllocator, replay

MIB = 2**20


@pytest.mark.parametrize(
    ("request_bytes", "reserved_bytes"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB, 10 * MIB), (11 * MIB, 12 * MIB)],
)
def test_segment_sizes(request_bytes, reserved_bytes):
    allocator = CachingAllocator()
    allocator.allocate(1, request_bytes)
    assert allocator.reserved_bytes == reserved_bytes


def test_a_freed_block_is_used_again_and_neighbours_merge():
    allocator = CachingAllocator()
    for number in range(4):
        allocator.allocate(number, 4 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    for number in (1, 3, 2):
        allocator.free(number)
    allocator.allocate(9, 16 * MIB)  # the merged rest of the segment
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.allocated_bytes == 20 * MIB


def test_fragmentation_reserves_more_than_is_allocated_and_expandable_segments_do_not():
    events = []
    for number in range(8):
        events.append((number, (30 + number) * MIB))
        if number:
            events.append((number - 1, -(30 + number - 1) * MIB))
    native, expandable = replay(events), replay(events, expandable=True)
    assert expandable.peak_allocated_bytes == (36 + 37) * MIB  # native keeps unsplit rests
    assert native.peak_allocated_bytes >= expandable.peak_allocated_bytes
    assert expandable.peak_reserved_bytes < native.peak_reserved_bytes


def test_out_of_memory_is_an_event_and_comes_after_emptying_the_cache():
    events = [(1, 40 * MIB), (1, -40 * MIB), (2, 60 * MIB), (3, 60 * MIB)]
    assert replay(events, capacity_bytes=70 * MIB).oom_event == 3
    result = replay(events[:3], capacity_bytes=70 * MIB)
    assert result.oom_event is None and result.num_retries == 1


@pytest.mark.parametrize("expandable", [False, True])
def test_books_balance_over_a_random_program(expandable):
    rng = random.Random(0)
    allocator = CachingAllocator(expandable=expandable)
    live: dict[int, int] = {}
    for number in range(2000):
        if live and rng.random() < 0.5:
            allocator.free(live.pop(rng.choice(list(live))))
        else:
            live[number] = number
            allocator.allocate(number, rng.choice([1, 700, MIB // 2, 3 * MIB, 25 * MIB]))
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for number in live.values():
        allocator.free(number)
    assert allocator.allocated_bytes == 0
