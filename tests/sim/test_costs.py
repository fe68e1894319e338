"""FLOPs of whole passes against the textbook counts."""

import dataclasses

import pytest
import torch
from simtools import small_model, small_workload

from streambp import split_sum
from streambp.sim.costs import CostCounter, attention_pairs
from streambp.sim.errors import SimulationError
from streambp.sim.fake import fake_mode
from streambp.sim.fidelity.settings import model_named
from streambp.sim.gpus import gpu_named
from streambp.sim.passes import run_pass
from streambp.sim.roofline import Roofline
from streambp.sim.simulation import simulate
from streambp.sim.workload import Workload

T, D, F, V, L = 150, 64, 208, 997, 2
H, K, E = 4, 2, 16
LAYER_WEIGHTS = D * (H + 2 * K) * E + H * E * D + 3 * D * F
CHUNKS = {"chunk_size": 16, "head_chunk_size": 10}


def flops_of(method, options=None, **changes):
    costs = CostCounter(Roofline(gpu=gpu_named("a800_80gb")))
    workload = small_workload(method, model=small_model(L), method_options=options or {}, **changes)
    run_pass(workload, costs=costs)
    totals: dict[tuple[str, str], int] = {}
    for key, flops in costs.flops.items():
        totals[key.kind, key.stage] = totals.get((key.kind, key.stage), 0) + flops
    assert all(t > 0 for t in costs.time_s.values())
    return totals


def test_pairs_of_causal_attention_are_aligned_bottom_right():
    for m, n in ((4, 4), (3, 7), (1, 5)):
        by_hand = sum(j <= i + n - m for i in range(m) for j in range(n))
        assert attention_pairs(m, n, causal=True) == by_hand
    assert attention_pairs(3, 7, causal=False) == 21


def test_standard_counts_forward_once_and_backward_twice():
    flops = flops_of("standard")
    forward = 2 * T * (L * LAYER_WEIGHTS + D * V)
    assert flops["matmul", "forward"] == forward
    assert flops["matmul", "backward"] == 2 * forward
    pairs = T * (T + 1) // 2
    assert flops["attention", "forward"] == L * 4 * H * E * pairs
    assert flops["attention", "backward"] == L * 10 * H * E * pairs
    assert not any(stage == "recompute" and value for (_, stage), value in flops.items())


def test_checkpointing_recomputes_all_but_the_last_product_of_a_layer():
    flops = flops_of("checkpointing")
    assert flops["matmul", "recompute"] == 2 * T * L * (LAYER_WEIGHTS - D * F)
    assert flops["attention", "recompute"] == flops["attention", "forward"]
    assert flops["matmul", "backward"] == 2 * flops["matmul", "forward"]


def test_streambp_needs_the_products_of_the_standard_pass_and_those_recomputed():
    flops = flops_of("streambp", CHUNKS)
    forward = 2 * T * (L * LAYER_WEIGHTS + D * V)
    assert flops["matmul", "forward"] == forward
    assert flops["matmul", "backward"] == 2 * forward
    # At most each layer once more, and its projections once more for keys and values.
    most = LAYER_WEIGHTS + D * (H + 2 * K) * E
    assert T * L * (LAYER_WEIGHTS - D * F) <= flops["matmul", "recompute"] / 2 <= T * L * most
    assert flops["attention", "recompute"] == flops["attention", "forward"]


def test_kept_attention_is_not_computed_twice():
    kept = flops_of("streambp", {**CHUNKS, "keep_kv": True, "keep_attention": True})
    plain = flops_of("streambp", CHUNKS)
    assert kept.get(("attention", "recompute"), 0) == 0
    assert kept["attention", "backward"] == plain["attention", "backward"]
    assert kept["matmul", "recompute"] < plain["matmul", "recompute"]


@pytest.mark.parametrize("switches", [(), ("recompute_head", "split_sums"), ("keep_attention",)])
def test_shortened_loops_count_all_chunks(switches, monkeypatch):
    monkeypatch.setattr(split_sum, "BLOCK_ELEMENTS", 1800)  # a loop of blocks in one of chunks
    options = {**CHUNKS, **dict.fromkeys(switches, True)}
    workload = small_workload("streambp", model=small_model(1), seq_len=320, method_options=options)
    counts = []
    for all_chunks in (False, True):
        costs = CostCounter()
        run_pass(workload, costs=costs, all_chunks=all_chunks)
        counts.append({key: value for key, value in costs.flops.items() if value})
    assert counts[0] == counts[1]


def test_experts_count_each_token_once_for_every_expert_it_chose():
    experts, chosen, width = 4, 2, 48
    fields = {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": width}
    model = small_model(L, model_type="qwen3_moe", **fields)
    layer = D * (H + 2 * K) * E + H * E * D + D * experts + chosen * 3 * D * width
    forward = 2 * T * (L * layer + D * V)
    for method, options in (("standard", {}), ("streambp", CHUNKS)):
        costs = CostCounter()
        run_pass(small_workload(method, model=model, method_options=options), costs=costs)
        counts = {
            stage: sum(flops for key, flops in costs.flops.items() if key[:2] == ("matmul", stage))
            for stage in ("forward", "backward")
        }
        assert counts == {"forward": forward, "backward": 2 * forward}, method


def test_grouped_products_of_every_shape_count_as_those_of_each_group():
    product = torch.ops.aten._grouped_mm
    ends = torch.tensor([16, 48], dtype=torch.int32)
    rows, both = torch.empty(48, 32), torch.empty(2, 32, 64)
    by_hand = 2 * 48 * 32 * 64
    wide = torch.empty(48, 64)
    for left, right in ((rows, both), (rows.T, wide), (both.transpose(1, 2), rows.T)):
        costs = CostCounter()
        with fake_mode() as mode, costs:
            args = [mode.from_tensor(t.bfloat16()) for t in (left, right)]
            product(*args, mode.from_tensor(ends))
        assert [f for key, f in costs.flops.items() if key.kind == "matmul"] == [by_hand]


def test_products_that_are_not_known_are_refused_not_counted_as_nothing():
    x = torch.empty(3, 3)
    with pytest.raises(SimulationError, match="FLOPs of aten::addr are not known"), CostCounter():
        torch.ops.aten.addr(x, x[0], x[1])
    with pytest.raises(SimulationError, match="aten::_int_mm"), CostCounter():
        torch._int_mm(torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 32, dtype=torch.int8))
    library = torch.library.Library("made_up", "DEF")
    library.define("experts(Tensor x) -> Tensor")
    library.impl("experts", torch.clone, "CPU")
    with pytest.raises(SimulationError, match="made_up::experts"), CostCounter():
        torch.ops.made_up.experts(x)


def test_lora_forms_no_gradient_of_frozen_weights():
    from streambp.bench.config import TuningConfig

    full = flops_of("standard")
    lora = flops_of("standard", tuning=TuningConfig(name="lora", rank=2))
    assert lora["matmul", "backward"] < 0.62 * full["matmul", "backward"]


def test_reserving_memory_and_asking_for_a_device_move_nothing():
    costs = CostCounter()
    with fake_mode(), costs:
        x = torch.empty(3, 5)
        assert x.device == torch.zeros_like(x).device
    assert sum(costs.bytes_moved.values()) == 2 * 3 * 5 * 4  # zeros_like: x and its result


def test_a_faster_gpu_is_predicted_faster():
    slow, fast = Roofline(gpu=gpu_named("rtx3090_24gb")), Roofline(gpu=gpu_named("h100_80gb"))
    arguments = ("matmul", 10**14, 10**9, torch.bfloat16)
    assert fast.op_time_s(*arguments) < slow.op_time_s(*arguments)
    halved = dataclasses.replace(fast, matmul_efficiency=fast.matmul_efficiency / 2)
    assert halved.op_time_s(*arguments) == pytest.approx(2 * fast.op_time_s(*arguments))


@pytest.mark.parametrize("gpu", ["a800_80gb", "h200_141gb"])
def test_predicted_times_of_a_large_model_are_near_its_flops_at_the_peak_rate(gpu):
    roofline = Roofline(gpu=gpu_named(gpu))
    rate = roofline.gpu.peak_bf16_flops_per_s
    efficiency = {"matmul": roofline.matmul_efficiency, "attention": roofline.attention_efficiency}
    times = {}
    for method in ("checkpointing", "streambp"):
        workload = Workload(
            model=model_named("qwen3_8b"), method=method, seq_len=32768, gpu=roofline.gpu
        )
        costs = simulate(workload, roofline=roofline).costs
        computing = sum(
            flops / (rate * efficiency[key.kind])
            for key, flops in costs.flops.items()
            if key.kind in efficiency
        )
        times[method] = sum(costs.time_s.values())
        assert computing < times[method] < 1.6 * computing
    assert times["checkpointing"] < times["streambp"] < 1.4 * times["checkpointing"]
