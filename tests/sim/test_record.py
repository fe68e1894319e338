"""A simulated run as a record, and the searches and plans built on it."""

import json

import pytest
from simtools import small_model

import streambp
from streambp.bench import preflight, search, worker
from streambp.bench.config import RunConfig
from streambp.bench.progress import CallbackProgress
from streambp.sim import simulate_run
from streambp.sim.errors import NothingFitsError, SimulationError
from streambp.sim.plan import estimate_max_sequence_length, model_config, plan
from streambp.sim.record import workload_of
from streambp.sim.settings import PAPER

TINY_GPU = {
    "name": "tiny_gpu",
    "memory_bytes": 64 * 2**20,
    "usable_fraction": 1.0,
    "sm": 80,
    "bandwidth_bytes_per_s": 1e12,
    "peak_bf16_flops_per_s": 1e14,
    "peak_fp32_flops_per_s": 1e13,
}


def config_of(**changes):
    model = small_model(3)
    values = {
        "model": {"name": "small", "config": model.config},
        "method": {"name": "streambp", "chunk_size": 64, "head_chunk_size": 32},
        "device": {"name": "simulated"},
        "optimizer": {"name": "adamw"},
        "gpu": TINY_GPU,
        "seq_len": 256,
    }
    return RunConfig.from_dict({**values, **changes})


def test_the_record_says_what_was_simulated_and_adds_up():
    sections = simulate_run(config_of())
    memory = sections["memory"]
    assert memory["peak_allocated_bytes"] == sum(memory["peak_by_category_bytes"].values())
    assert memory["peak_allocated_bytes"] == max(memory["peak_by_phase_bytes"].values())
    assert memory["optimizer_bytes"] >= 2 * memory["gradients_bytes"] * 0.9
    assert memory["peak_reserved_bytes"] >= memory["peak_allocated_bytes"]
    assert memory["fits"] and memory["headroom_bytes"] > 0
    for name in ("memory", "time", "flops"):
        beside = sections[name]["beside"]
        assert beside["method"] == "checkpointing"
        assert set(sections[name]) - {"beside"} == set(beside) - {"method"}
    assert memory["beside"]["peak_allocated_bytes"] > memory["peak_allocated_bytes"]
    assert memory["beside"]["peak_reserved_bytes"] > memory["peak_reserved_bytes"]
    assert sections["flops"]["beside"]["total_flops"] > 0
    assert memory["nvml_device_bytes"] is None and memory["unavailable"]["nvml_device_bytes"]
    assert sections["provenance"]["memory"] == "simulated"
    assert sections["provenance"]["time"] == "predicted"
    assert sections["flops"]["total_flops"] > 0
    assert any("assumptions: gradients_resident true" in note for note in sections["notes"])
    assert any("75% of 100 TFLOP/s" in note for note in sections["notes"])
    timeline = sections["timeline"]
    assert max(timeline["live_bytes"]) == memory["peak_allocated_bytes"]
    assert timeline["provenance"] == "simulated"
    json.dumps(sections, allow_nan=False)
    assert "timeline" not in simulate_run(config_of(measure={"timeline": False}))


def test_a_budget_below_what_is_resident_is_said_in_words():
    with pytest.raises(NothingFitsError, match="weights, gradients and optimizer alone need"):
        simulate_run(config_of(budget_gib=0.001))


def test_inputs_that_do_not_fit_are_named_and_the_states_are_not_blamed():
    standard = {"name": "standard"}
    sections = simulate_run(config_of(paper=True, method=standard, seq_len=8000))
    memory = sections["memory"]
    assert sum(memory["resident_by_category_bytes"].values()) > memory["budget_bytes"]
    assert not memory["fits"]
    note = sections["notes"][0]
    assert "MiB too much" in note and "inputs and additive mask 0.12" in note
    assert "the largest tensor: logits" in note or "attention_mask 0.12" in note
    fitting = simulate_run(config_of(method=standard))
    assert not any("too much" in note for note in fitting["notes"])


def test_a_baseline_that_cannot_be_simulated_leaves_the_answer_and_a_note():
    sections = simulate_run(config_of(dtype="float32"))
    assert sections["memory"]["peak_allocated_bytes"] > 0
    assert not any("beside" in sections[name] for name in ("memory", "time", "flops"))
    assert any(
        note.startswith("no checkpointing beside it: attention of torch.float32")
        for note in sections["notes"]
    )


def test_a_budget_above_what_the_gpu_has_is_refused_not_cut():
    for call in (
        lambda: simulate_run(config_of(budget_gib=0.07)),
        lambda: search.run(
            config_of(budget_gib=0.07, search={"name": "max_seq_len"}), search.Progress()
        ),
        lambda: plan(small_model(3), TINY_GPU, seq_len=256, budget_gib=0.07),
    ):
        with pytest.raises(ValueError, match=r"budget_gib=0\.07: tiny_gpu has 0\.06 GiB"):
            call()
    assert simulate_run(config_of(budget_gib=0.0625))["memory"]["budget_bytes"] == 64 * 2**20


def test_numbers_that_an_own_gpu_shares_with_a_known_one_are_told():
    rate = {"peak_bf16_flops_per_s": 312e12, "sm": 80}
    notes = simulate_run(config_of(gpu={**TINY_GPU, **rate}))["notes"]
    assert "tiny_gpu: gpu.sm, gpu.peak_bf16_flops_per_s as a100_80gb" in notes
    assert not any(note.endswith("a100_80gb") for note in simulate_run(config_of())["notes"])


def test_a_budget_below_what_is_resident_ends_a_run_as_out_of_memory():
    ending = worker.outcome(config_of(budget_gib=0.001), worker.Progress())
    assert ending["status"] == "oom"
    assert "of the 0.00 that a run may use on tiny_gpu (simulated)" in ending["status_detail"]
    ending = worker.outcome(config_of(seq_len=4096, method={"name": "standard"}), worker.Progress())
    assert ending["status"] == "oom"
    assert "the simulated peak of" in ending["status_detail"]


def test_impossible_numbers_end_a_command_before_a_run():
    for changes, said in (
        ({"gpu": {**TINY_GPU, "memory_bytes": -5}}, r"gpu\.memory_bytes=-5"),
        ({"gpu": {**TINY_GPU, "sm": "new"}}, r"gpu\.sm='new'"),
        ({"search": {"name": "max_seq_len", "limit": 4}}, r"search\.limit"),
    ):
        with pytest.raises(ValueError, match=said):
            preflight.resolve(config_of(**changes))


def test_a_run_beyond_its_budget_does_not_fit():
    memory = simulate_run(config_of(seq_len=4096, method={"name": "standard"}))["memory"]
    assert not memory["fits"] and memory["headroom_bytes"] < 0


def test_paper_sets_the_papers_assumptions_and_the_command_line_wins():
    standard = {"name": "standard"}
    assert workload_of(config_of(paper=True, method=standard)).assumptions == PAPER
    assert workload_of(config_of(paper=True)).assumptions.mask == "none"  # streamed
    device = {"name": "simulated", "assumptions": {"mask": "none"}}
    changed = workload_of(config_of(paper=True, method=standard, device=device)).assumptions
    assert changed.mask == "none" and changed.outputs_kept


def test_a_search_finds_the_longest_sequence_and_says_so():
    lines: list[str] = []
    progress = CallbackProgress(lambda event: lines.append(event.get("text", "")))
    checkpointing = config_of(search={"name": "max_seq_len"}, method={"name": "checkpointing"})
    sections = search.run(checkpointing, progress)
    found = sections["search"]
    assert found["outcome"] == "found" and found["largest"] % 8 == 0
    assert found["smallest_failing"] == found["largest"] + 8
    assert sections["memory"]["fits"]
    assert any("simulated" in line for line in lines)
    peak = sections["memory"]["peak_allocated_bytes"]
    assert peak == next(
        probe["peak_bytes"] for probe in found["probes"] if probe["value"] == found["largest"]
    )


def test_a_search_where_nothing_fits_says_what_is_resident():
    sections = search.run(
        config_of(search={"name": "max_batch_size"}, budget_gib=0.001), search.Progress()
    )
    assert sections["search"]["outcome"] == "nothing_fits"
    assert "alone need" in sections["search"]["message"]
    assert sections["memory"] is None


def test_attention_that_is_not_modelled_is_refused(monkeypatch):
    from streambp.bench import models

    build = models.build

    def with_flex(*args, **kwargs):
        model = build(*args, **kwargs)
        model.config._attn_implementation = "flex_attention"
        return model

    monkeypatch.setattr("streambp.sim.passes.build", with_flex)
    with pytest.raises(SimulationError, match="attn_implementation='flex_attention'"):
        simulate_run(config_of(method={"name": "standard"}))


def test_an_op_that_needs_data_is_named_with_where_it_was_called(monkeypatch):
    from streambp.bench import step

    def reads_values(model, batch, num_items_in_batch):
        return float(batch["labels"].sum())

    monkeypatch.setitem(step.OBJECTIVES, "sft", reads_values)
    with pytest.raises(SimulationError, match=r"_local_scalar_dense.*test_record.py.*reads_values"):
        simulate_run(config_of(method={"name": "standard"}))


def test_float64_attention_with_a_mask_is_refused_not_guessed():
    config = config_of(method={"name": "standard"}, dtype="float64")
    with pytest.raises(SimulationError, match="math fallback"):
        simulate_run(config)


def test_plan_takes_the_fastest_setting_that_fits():
    generous = plan(small_model(3), TINY_GPU, seq_len=256)
    assert generous.config.keep_kv and generous.config.keep_attention
    assert generous.peak_bytes <= generous.budget_bytes
    less = (generous.peak_bytes - 1) / 2**30
    tight = plan(small_model(3), TINY_GPU, seq_len=256, budget_gib=less)
    assert tight.peak_bytes <= tight.budget_bytes < generous.peak_bytes
    assert tight.config != generous.config
    with pytest.raises(NothingFitsError, match="nothing fits: seq_len=256"):
        plan(small_model(3), TINY_GPU, seq_len=256, budget_gib=0.005)


def test_the_longest_sequence_of_a_method():
    config = streambp.StreamConfig(chunk_size=64, head_chunk_size=32)
    model = small_model(1)
    ours = estimate_max_sequence_length(model, TINY_GPU, config=config, budget_gib=0.03)
    theirs = estimate_max_sequence_length(model, TINY_GPU, method="checkpointing", budget_gib=0.03)
    assert ours > theirs > 0
    assert estimate_max_sequence_length(model, TINY_GPU, budget_gib=0.001) == 0


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_another_attention_than_sdpa_is_refused_not_simulated_as_sdpa(tmp_path, field):
    path = tmp_path / "config.json"
    for value, refused in (("flash_attention_2", True), ("eager", True), ("sdpa", False)):
        path.write_text(json.dumps({**small_model(2).config, field: value}))
        for model in ({"hf_config": str(path)}, {"checkpoint": str(tmp_path)}):
            config = config_of(model={"name": "m", **model})
            if refused:
                with pytest.raises(ValueError, match=f"{field}='{value}', but every run"):
                    simulate_run(config)
            else:
                simulate_run(config)


def test_models_are_taken_as_config_path_or_module(tmp_path):
    from transformers import Qwen3Config

    config = Qwen3Config(num_hidden_layers=2)
    assert model_config(config).config["num_hidden_layers"] == 2
    config.save_pretrained(tmp_path)
    assert model_config(tmp_path).hf_config == str(tmp_path / "config.json")
    with pytest.raises(ValueError, match="not in the local Hugging Face cache"):
        model_config("nobody/nothing")
    with pytest.raises(ValueError, match="give a Hugging Face config"):
        model_config(3)
