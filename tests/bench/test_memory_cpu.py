"""CPU instruments against known bytes: live tensors, resident set size, state."""

from pathlib import Path

import pytest
import torch
from torch import nn

from streambp.bench.memory import (
    RssPeak,
    fill_gradients,
    measure_cpu,
    state_bytes,
    track_step,
)
from streambp.bench.step import BACKWARD, FORWARD, forward_backward

MIB = 2**20


class Doubler(nn.Module):
    """One weight of 1 MiB."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MIB // 4))


def step_of_known_size(model, *, forward_mib, backward_mib):
    """Holds this many MiB in each phase, beside what is resident."""

    def step(around):
        with around(FORWARD):
            held = torch.empty(forward_mib * MIB, dtype=torch.uint8)
        with around(BACKWARD):
            more = torch.empty(backward_mib * MIB, dtype=torch.uint8)
            del more
        del held

    return step


def test_live_bytes_by_phase_are_exact():
    model = Doubler()
    fill_gradients(model)
    batch = {"input_ids": torch.zeros(MIB // 8, dtype=torch.int64)}
    step = step_of_known_size(model, forward_mib=5, backward_mib=7)
    live = track_step(model, batch, None, step)
    assert live.peak_by_phase_bytes == {FORWARD: (3 + 5) * MIB, BACKWARD: (3 + 12) * MIB}
    assert live.peak_live_bytes == 15 * MIB
    assert live.peak_phase == BACKWARD
    assert live.peak_by_category_bytes == {
        "weights": MIB,
        "gradients": MIB,
        "inputs": MIB,
        "activations": 12 * MIB,
    }
    largest = live.peak_largest[0]
    assert (largest["bytes"], largest["shape"], largest["dtype"]) == (7 * MIB, [7 * MIB], "uint8")
    assert live.timeline is None


def test_the_peak_is_reset_between_runs():
    model = Doubler()
    big = step_of_known_size(model, forward_mib=9, backward_mib=1)
    small = step_of_known_size(model, forward_mib=2, backward_mib=1)
    assert track_step(model, {}, None, big).peak_live_bytes == 11 * MIB
    assert track_step(model, {}, None, small).peak_live_bytes == 4 * MIB


def test_timeline_is_there_when_asked_for():
    step = step_of_known_size(None, forward_mib=1, backward_mib=2)
    live = track_step(Doubler(), {}, None, step, timeline=True)
    assert max(live.timeline["live_bytes"]) == live.peak_live_bytes


def test_state_bytes_count_tied_weights_once_and_optimizer_states():
    model = nn.ModuleDict({"a": nn.Linear(16, 8, bias=False), "b": nn.Linear(16, 8, bias=False)})
    model["b"].weight = model["a"].weight
    weight_bytes = 16 * 8 * 4
    assert state_bytes(model, None) == {
        "weights_bytes": weight_bytes,
        "gradients_bytes": 0,
        "optimizer_bytes": 0,
    }
    fill_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = state_bytes(model, optimizer)
    assert state["gradients_bytes"] == weight_bytes
    assert state["optimizer_bytes"] == 2 * weight_bytes + 4  # and the step count


def test_memory_section_of_a_real_step(tiny_model, tiny_batch):
    fill_gradients(tiny_model)
    memory, _, timeline = measure_cpu(
        tiny_model,
        tiny_batch,
        None,
        lambda around: forward_backward(tiny_model, tiny_batch, around=around),
    )
    assert timeline is None
    assert memory["weights_bytes"] > memory["gradients_bytes"] > 0  # buffers are weights too
    assert 0 < memory["activation_peak_bytes"] < memory["peak_live_bytes"]
    assert memory["peak_live_bytes"] == (
        memory["activation_peak_bytes"] + memory["weights_bytes"] + memory["gradients_bytes"]
    )
    assert sum(memory["peak_by_category_bytes"].values()) == memory["peak_live_bytes"]
    assert memory["peak_rss_bytes"] > memory["peak_live_bytes"]
    for name in memory["unavailable"]:
        assert memory[name] is None
    assert {name for name, value in memory.items() if value is None} == set(memory["unavailable"])


def resident(num_bytes):
    """Allocate and touch this many bytes, then free them."""
    return torch.full((num_bytes,), 1, dtype=torch.uint8)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs procfs")
def test_rss_peak_of_known_bytes_and_reset_between_blocks():
    with RssPeak() as idle:
        pass
    if idle.reading.how != "reset":
        pytest.skip("this system refuses to reset the high-water mark")
    with RssPeak() as big:
        del_me = resident(128 * MIB)
        del del_me
    with RssPeak() as small:
        del_me = resident(32 * MIB)
        del del_me
    assert big.reading.peak_rss_bytes - idle.reading.peak_rss_bytes == pytest.approx(
        128 * MIB, abs=4 * MIB
    )
    assert small.reading.peak_rss_bytes - idle.reading.peak_rss_bytes == pytest.approx(
        32 * MIB, abs=4 * MIB
    )


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs procfs")
def test_rss_is_sampled_where_the_reset_is_refused(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "clear_refs").mkdir()  # can't be written
    (tmp_path / "self" / "statm").symlink_to("/proc/self/statm")
    with RssPeak(proc=tmp_path) as idle:
        pass
    with RssPeak(proc=tmp_path) as big:
        held = resident(64 * MIB)
        for _ in range(20):
            held.add_(1)
        del held
    assert big.reading.how == "sampled"
    grown = big.reading.peak_rss_bytes - idle.reading.peak_rss_bytes
    assert grown == pytest.approx(64 * MIB, abs=4 * MIB)


def test_rss_is_of_the_lifetime_without_procfs(tmp_path):
    with RssPeak(proc=tmp_path) as rss:
        pass
    assert rss.reading.how == "lifetime"
    assert rss.reading.peak_rss_bytes > 50 * MIB
