"""What a deep model allocates, told from a shallow run. (Methods: see test_simulation.py.)"""

import dataclasses

import pytest
from simtools import small_model, small_workload, told_apart

from streambp.sim.allocator import replay
from streambp.sim.simulation import simulate
from streambp.sim.timeline import timeline_of
from streambp.sim.tracker import Block, Event
from streambp.sim.unroll import unrolled


@pytest.mark.parametrize("method", ["standard", "checkpointing"])
def test_many_layers_more_are_those_of_the_deep_run(method):
    workload = small_workload(method, model=small_model(11), optimizer="adamw")
    short = simulate(workload, record_events=True)
    full = simulate(workload, full=True, record_events=True)
    assert short.num_layers_run == 4 and full.num_layers_run == 11
    assert told_apart(short.blocks) == told_apart(full.blocks)


def test_timeline_and_reserved_memory_come_from_the_events():
    simulation = simulate(small_workload("checkpointing"), record_events=True)
    points = timeline_of(simulation.blocks, max_points=100)
    assert 50 < len(points["live_bytes"]) <= 100
    assert max(points["live_bytes"]) == simulation.peak_bytes
    totals = [sum(values) for values in zip(*points["by_category_bytes"].values(), strict=True)]
    assert totals == points["live_bytes"]
    assert points["op_index"] == sorted(points["op_index"])
    at_peak = points["live_bytes"].index(simulation.peak_bytes)
    assert points["phase"][at_peak] == simulation.peak_phase
    for name, values in points["by_category_bytes"].items():
        assert values[at_peak] == simulation.by_category.get(name, 0)
    events = [event for block in simulation.blocks for event in block.events]
    assert replay(events).peak_reserved_bytes >= simulation.peak_bytes


def test_events_are_kept_only_if_asked_for():
    assert simulate(small_workload()).blocks is None


LAYERS = ("first", "middle", "middle", "last")


def made_up(middle_bytes):
    """Blocks of four layers, each with one tensor that lives until its backward."""
    blocks = [Block("start", 0, [Event(1, 8, "weights", 0)])]
    sizes = (5, *middle_bytes, 7)
    for index, (place, size) in enumerate(zip(LAYERS, sizes, strict=True)):
        event = Event(10 + index, size, "activations", index + 1)
        blocks.append(Block(f"forward/layer {place}", index + 1, [event]))
    for index in reversed(range(4)):
        event = Event(10 + index, -sizes[index], "activations", 9 - index)
        blocks.append(Block(f"backward/layer {LAYERS[index]}", 9 - index, [event]))
    return blocks


def test_new_layers_go_in_the_middle_and_free_what_they_allocated():
    resident = [Event(3, 80, "weights", 0), Event(4, 90, "weights", 0)]
    blocks = unrolled(made_up((6, 6)), resident, num_layers=7, period=1)
    sizes = [event.num_bytes for block in blocks for event in block.events]
    assert sizes == [80, 90, 5, 6, 6, 6, 6, 6, 7, -7, -6, -6, -6, -6, -6, -5]
    ids = [event.event_id for block in blocks for event in block.events]
    assert ids[2:9] == ids[:8:-1] and len(set(ids)) == 9
    ops = [event.op_index for block in blocks[1:] for event in block.events]
    assert ops == sorted(ops)


def test_middle_layers_that_differ_are_not_taken_for_the_others():
    assert unrolled(made_up((6, 9)), [], num_layers=7, period=1) is None
    blocks = made_up((6, 6))
    blocks[-2] = dataclasses.replace(blocks[-2], events=[])  # one does not free its tensor
    assert unrolled(blocks, [], num_layers=7, period=1) is None
    of_before = made_up((6, 6))
    of_before[3].events.append(Event(1, -8, "weights", 3))  # frees what was there before the pass
    assert unrolled(of_before, [], num_layers=7, period=1) is None


def test_too_few_layers_are_refused():
    with pytest.raises(ValueError, match="4 layers of period 2 can't be unrolled to 8"):
        unrolled(made_up((6, 6)), [], num_layers=8, period=2)
