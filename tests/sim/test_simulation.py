"""The fast path equals the full simulation to the byte; the simulation equals a real CPU run."""

import dataclasses

import pytest
import torch
from simtools import small_model, small_workload, told_apart

from streambp import split_sum
from streambp.bench.config import TuningConfig
from streambp.bench.methods import method_named
from streambp.bench.models import build
from streambp.bench.step import forward_backward
from streambp.sim.passes import run_pass
from streambp.sim.simulation import simulate
from streambp.sim.tracker import LiveTracker, register_model

LORA = TuningConfig(name="lora", rank=4)
CHUNKS = {"chunk_size": 40, "head_chunk_size": 50}
SEQ_LEN = 90  # three chunks, the last one short
CONFIGURATIONS = {
    "standard": ("standard", {}),
    "standard, mask": ("standard", {"assumptions": {"mask": "additive"}}),
    "standard, padding": ("standard", {"assumptions": {"mask": "padding"}}),
    "standard, LoRA": ("standard", {"tuning": LORA}),
    "standard, fresh gradients": ("standard", {"assumptions": {"gradients_resident": False}}),
    "standard, tied": ("standard", {"model": small_model(tie_word_embeddings=True)}),
    "standard, kept outputs": ("standard", {"assumptions": {"outputs_kept": True}}),
    "checkpointing": ("checkpointing", {}),
    "checkpointing, batch": ("checkpointing", {"batch_size": 3}),
    "checkpointing, LoRA": ("checkpointing", {"tuning": LORA}),
    "checkpointing, fresh gradients": (
        "checkpointing",
        {"assumptions": {"gradients_resident": False}},
    ),
    "checkpointing, adamw": (
        "checkpointing",
        {"optimizer": "adamw", "optimizer_state_dtype": "float32"},
    ),
    "checkpointing, long": ("checkpointing", {"seq_len": 2000}),
    "streambp": ("streambp", {"method_options": CHUNKS}),
    "streambp, batch": ("streambp", {"method_options": CHUNKS, "batch_size": 2}),
    "streambp, LoRA": ("streambp", {"method_options": CHUNKS, "tuning": LORA}),
    "streambp, kept K and V": ("streambp", {"method_options": {**CHUNKS, "keep_kv": True}}),
    "streambp, kept attention": (
        "streambp",
        {"method_options": {**CHUNKS, "keep_attention": True}},
    ),
    "streambp, fresh gradients": (
        "streambp",
        {"method_options": CHUNKS, "assumptions": {"gradients_resident": False}},
    ),
    "streambp, recomputed head": (
        "streambp",
        {"method_options": {**CHUNKS, "recompute_head": True}},
    ),
    "streambp, split sums": (
        "streambp",
        {"method_options": {**CHUNKS, "recompute_head": True, "split_sums": True}},
    ),
    "streambp, tied": (
        "streambp",
        {"method_options": CHUNKS, "model": small_model(tie_word_embeddings=True)},
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_short_depths_give_the_full_depth_to_the_byte(name):
    method, changes = CONFIGURATIONS[name]
    workload = small_workload(method, **{"seq_len": SEQ_LEN, **changes})
    fast = simulate(workload, record_events=True)
    full = simulate(workload, full=True, record_events=True)
    assert fast.num_layers_run == 4 and full.num_layers_run == 5
    assert told_apart(fast.blocks) == told_apart(full.blocks)
    assert fast.phase_peaks == full.phase_peaks
    assert fast.peak_bytes == full.peak_bytes
    assert fast.by_category == full.by_category
    assert sum(fast.by_category.values()) == fast.peak_bytes
    assert fast.resident_by_category == full.resident_by_category


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep_kv": True},
        {"keep_attention": True},
        {"recompute_head": True},
        {"split_sums": True},
    ],
)
def test_few_chunks_give_all_chunks_to_the_byte(options, monkeypatch):
    monkeypatch.setattr(split_sum, "BLOCK_ELEMENTS", 1800)
    few_options = {"chunk_size": 16, "head_chunk_size": 10, **options}
    workload = small_workload("streambp", method_options=few_options, model=small_model(2))
    few, every = run_pass(workload), run_pass(workload, all_chunks=True)
    assert few.tracker.num_ops < every.tracker.num_ops
    assert few.tracker.peak_bytes == every.tracker.peak_bytes
    assert few.tracker.peak_by_category == every.tracker.peak_by_category


def test_alternating_layers_repeat_by_their_period():
    model = small_model(
        9,
        model_type="gemma3_text",
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 4 + ["sliding_attention"],
    )
    workload = small_workload("checkpointing", model=model)
    assert simulate(workload).num_layers_run == 9  # too short for a shortcut

    longer = dataclasses.replace(
        model,
        config={
            **model.config,
            "num_hidden_layers": 14,
            "layer_types": ["sliding_attention", "full_attention"] * 7,
        },
    )
    workload = small_workload("checkpointing", model=longer)
    fast = simulate(workload, record_events=True)
    full = simulate(workload, full=True, record_events=True)
    assert fast.num_layers_run == 8 and fast.phase_peaks == full.phase_peaks
    assert told_apart(fast.blocks) == told_apart(full.blocks)


MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}


@pytest.mark.parametrize(
    ("fields", "num_layers_run"),
    [
        ({**MIXTURE, "mlp_only_layers": [0, 1, 2]}, 9),  # no list by layer says which are dense
        ({**MIXTURE, "mlp_only_layers": [8]}, 9),
        ({**MIXTURE, "num_hidden_layers": 10, "decoder_sparse_step": 2}, 8),
        (MIXTURE, 4),
        ({}, 4),
    ],
)
def test_layers_that_differ_are_not_taken_for_each_other(fields, num_layers_run):
    workload = small_workload("checkpointing", model=small_model(9, **fields))
    fast, full = simulate(workload), simulate(workload, full=True)
    assert fast.num_layers_run == num_layers_run
    assert fast.phase_peaks == full.phase_peaks


def test_layers_with_adapters_are_not_taken_for_those_without():
    some = TuningConfig(name="lora", rank=4, target_modules=["layers.1.self_attn.q_proj"])
    workload = small_workload("checkpointing", model=small_model(9), tuning=some)
    fast, full = simulate(workload), simulate(workload, full=True)
    assert fast.num_layers_run == 9
    assert fast.phase_peaks == full.phase_peaks


@pytest.mark.parametrize(
    ("method", "options"),
    [("standard", {}), ("checkpointing", {}), ("streambp", CHUNKS)],
    ids=["standard", "checkpointing", "streambp"],
)
def test_a_real_cpu_run_has_the_simulated_peak(method, options):
    workload = small_workload(method, method_options=options, gpu=None, dtype="float32")
    simulated = run_pass(workload, all_chunks=True).tracker.peak_bytes

    model = build(workload.model, dtype="float32", device="cpu", seed=0)
    method_named(method).apply(model, options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = {name: torch.zeros(1, 150, dtype=torch.int64) for name in ("input_ids", "labels")}
    tracker = LiveTracker()
    with tracker, register_model(tracker, model):
        for name, tensor in batch.items():
            tracker.register(tensor, "inputs", name)
        forward_backward(model, batch)
    assert simulated == pytest.approx(tracker.peak_bytes, rel=0.01)


def test_split_sums_save_half_of_a_layers_sums(monkeypatch):
    monkeypatch.setattr(split_sum, "BLOCK_ELEMENTS", 64)
    model = small_model(3, hidden_size=256, intermediate_size=1024)
    options = {"chunk_size": 16, "head_chunk_size": 10, "recompute_head": True}
    whole, split = (
        simulate(
            small_workload(model=model, method="streambp", method_options={**options, **extra})
        ).by_category["weight_grad_buffers"]
        for extra in ({}, {"split_sums": True})
    )
    assert 0.5 <= split / whole < 0.55


def streamed(seq_len, chunk_size):
    """The head's chunk stays as it is: it has a peak of its own."""
    options = {"chunk_size": chunk_size, "head_chunk_size": 8}
    workload = small_workload(
        "streambp", model=small_model(1), seq_len=seq_len, method_options=options
    )
    return simulate(workload)


@pytest.mark.parametrize(
    ("seq_len", "sizes"),
    [
        (521, (520, 400, 300, 261, 260, 174, 131, 130, 100, 65, 64, 38, 37)),
        (150, (149, 100, 76, 75, 50, 38, 37, 26, 25, 16, 9, 7, 4, 3, 2, 1)),
    ],
)
def test_from_two_chunks_on_the_peak_never_rises_when_the_chunk_shrinks(seq_len, sizes):
    rounding = 2 * 512  # the allocator rounds each tensor up to 512 bytes: two tensors' worth
    least = streamed(seq_len, sizes[0]).peak_bytes
    for chunk_size in sizes[1:]:
        peak = streamed(seq_len, chunk_size).peak_bytes
        assert peak <= least + rounding, chunk_size
        least = min(least, peak)


def test_a_single_chunk_has_no_fp32_sums_of_weight_gradients():
    one, two = streamed(521, 521), streamed(521, 520)
    width, ffn = 64, 208
    weights = width * (4 + 2 * 2) * 16 + 4 * 16 * width + 3 * width * ffn  # q, k, v, o and the MLP
    assert one.by_category["weight_grad_buffers"] == 2 * width * ffn  # the one being formed
    assert two.by_category["weight_grad_buffers"] >= 4 * weights
    assert one.peak_bytes < two.peak_bytes


def test_streambp_needs_less_than_checkpointing_and_that_less_than_standard():
    standard, checkpointing, streambp = (
        simulate(small_workload(method, seq_len=2048, method_options=options)).peak_bytes
        for method, options in (("standard", {}), ("checkpointing", {}), ("streambp", CHUNKS))
    )
    assert streambp < checkpointing < standard
