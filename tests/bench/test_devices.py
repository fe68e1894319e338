"""Choosing a device, and a whole measured run on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from streambp.bench import devices
from streambp.bench.config import (
    ConfigError,
    DeviceConfig,
    MeasureConfig,
    MethodConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from streambp.bench.devices.targets import CudaTarget
from streambp.bench.progress import CallbackProgress

NO_GPU = SimpleNamespace(is_available=lambda: False)
TWO_GPUS = SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda index: f"GPU {index}"
)


@pytest.fixture
def cfg(tiny_cfg):
    return RunConfig(
        model=tiny_cfg,
        method=MethodConfig(name="standard"),
        device=DeviceConfig(name="cpu"),
        optimizer=OptimizerConfig(lr=1e-2),
        measure=MeasureConfig(timing_samples=2, timeline=True),
        seq_len=40,
        batch_size=2,
        steps=3,
    )


def auto(cfg, **changes):
    return cfg.replace(device=DeviceConfig(name="auto"), **changes)


def test_auto_takes_the_gpu(cfg):
    choice = devices.choose(auto(cfg), TWO_GPUS)
    assert choice.name == "cuda" and "GPU 0" in choice.reason


def test_auto_takes_the_cpu_for_a_small_run(cfg):
    choice = devices.choose(auto(cfg), NO_GPU)
    assert choice.name == "cpu" and "small enough" in choice.reason


def test_auto_simulates_a_large_model(cfg, tiny_fields):
    large = {**tiny_fields, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8}
    choice = devices.choose(auto(cfg, model=ModelConfig(name="l", config=large)), NO_GPU)
    assert choice.name == "simulated" and "M parameters" in choice.reason


def test_auto_simulates_a_long_sequence(cfg):
    choice = devices.choose(auto(cfg, seq_len=2_000_000), NO_GPU)
    assert choice.name == "simulated" and "FLOPs" in choice.reason


def test_auto_simulates_an_optimizer_that_only_simulations_have(cfg):
    choice = devices.choose(auto(cfg, optimizer=OptimizerConfig(name="adamw_8bit")), TWO_GPUS)
    assert choice.name == "simulated"


def test_a_gpu_that_is_not_there_is_refused(cfg):
    with pytest.raises(ConfigError, match=r"device\.name='cuda'.*device=cpu"):
        devices.choose(cfg.replace(device=DeviceConfig(name="cuda")), NO_GPU)
    with pytest.raises(ConfigError, match=r"device\.index=2: 2 GPU"):
        devices.choose(cfg.replace(device=DeviceConfig(name="cuda", index=2)), TWO_GPUS)


def test_what_is_asked_for_is_taken(cfg):
    assert devices.resolve(cfg) == "cpu"
    assert devices.resolve(cfg.replace(device=DeviceConfig(name="simulated"))) == "simulated"


def test_dtype_auto_follows_the_device(cfg):
    assert devices.resolve_dtype(cfg, "cpu") == "float32"
    assert devices.resolve_dtype(cfg, "cuda") == "bfloat16"
    assert devices.resolve_dtype(cfg.replace(dtype="fp64"), "cuda") == "float64"


def test_a_measured_run_has_every_section(cfg):
    sections = devices.run(cfg)
    training, memory, time = (sections[name] for name in ("training", "memory", "time"))
    assert len(training["loss_per_step"]) == len(training["grad_norm_per_step"]) == 3
    assert training["loss_per_step"][-1] < training["loss_per_step"][0]
    assert training["tokens_per_step"] == 80
    assert training["supervised_tokens_per_step"] == 78
    assert set(memory["peak_by_phase_bytes"]) == {"forward", "backward", "optimizer"}
    assert memory["gradients_bytes"] > 0
    assert memory["optimizer_bytes"] == pytest.approx(2 * memory["gradients_bytes"], rel=0.01)
    assert memory["activation_peak_bytes"] > 0
    assert memory["peak_by_category_bytes"]["optimizer"] == memory["optimizer_bytes"]
    assert len(time["forward_backward_time_s_samples"]) == 2
    assert sections["timeline"]["live_bytes"]
    assert sections["provenance"] == {
        "training": "measured",
        "memory": "measured",
        "time": "measured",
        "flops": None,
    }


def test_a_run_that_ends_early_has_sent_what_it_knew(cfg, monkeypatch):
    from streambp.bench.devices import measured

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measured, "time_steps", fail)
    sent = {}

    def receive(event):
        if event["event"] == "section":
            sent[event["name"]] = event["values"]

    with pytest.raises(torch.OutOfMemoryError):
        devices.run(cfg, CallbackProgress(receive))
    assert len(sent["training"]["loss_per_step"]) == 3
    assert sent["memory"]["peak_live_bytes"] > 0
    assert sent["provenance"]["memory"] == "measured"
    assert sent["provenance"]["time"] is None


def test_measuring_alone_needs_no_training_and_no_optimizer(cfg):
    sections = devices.run(
        cfg.replace(
            steps=0,
            optimizer=OptimizerConfig(name="none"),
            measure=MeasureConfig(warmup_steps=0, timing_samples=0),
        )
    )
    assert "training" not in sections and "time" not in sections
    assert sections["memory"]["optimizer_bytes"] == 0
    assert sections["memory"]["gradients_bytes"] > 0
    assert set(sections["memory"]["peak_by_phase_bytes"]) == {"forward", "backward"}


def test_resident_optimizer_states_count_even_before_training(cfg):
    measure = MeasureConfig(warmup_steps=0, timing_samples=0)
    memory = devices.run(cfg.replace(steps=0, measure=measure))["memory"]
    assert memory["optimizer_bytes"] == pytest.approx(2 * memory["gradients_bytes"], rel=0.01)


def test_checkpointing_needs_less_memory_than_standard(cfg):
    measure = MeasureConfig(timing_samples=0)
    peaks = {
        name: devices.run(
            cfg.replace(method=MethodConfig(name=name), steps=0, seq_len=256, measure=measure)
        )["memory"]["activation_peak_bytes"]
        for name in ("standard", "checkpointing")
    }
    assert peaks["checkpointing"] < peaks["standard"]


def test_kept_outputs_cost_their_memory(cfg):
    measure = MeasureConfig(timing_samples=0)
    kept, dropped = (
        devices.run(
            cfg.replace(
                steps=0,
                measure=measure,
                method=MethodConfig(name="checkpointing"),
                dtype="bf16",
                device=DeviceConfig(name="cpu", assumptions={"outputs_kept": outputs_kept}),
            )
        )["memory"]["peak_by_phase_bytes"]["backward"]
        for outputs_kept in (True, False)
    )
    assert kept - dropped == 2 * 40 * 260 * 2  # B T V elements of bf16 logits


def test_cpu_budget_ends_in_out_of_memory_with_the_peak_known(cfg):
    from streambp.bench.memory import OverBudgetError

    sent = {}
    progress = CallbackProgress(
        lambda event: (
            sent.update({event["name"]: event["values"]}) if event["event"] == "section" else None
        )
    )
    with pytest.raises(OverBudgetError, match=r"exceeds budget_gib=0\.00012") as caught:
        devices.run(cfg.replace(budget_gib=2**-13), progress)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.peak_bytes == sent["memory"]["peak_live_bytes"]


def test_cuda_target_makes_its_gpu_current_and_limits_the_budget(cfg):
    calls = []
    cuda = SimpleNamespace(
        set_device=lambda index: calls.append(("set_device", index)),
        get_device_properties=lambda index: SimpleNamespace(total_memory=160 * 2**30),
        set_per_process_memory_fraction=lambda fraction, index: calls.append((fraction, index)),
    )
    target = CudaTarget(cfg.replace(device=DeviceConfig(name="cuda", index=1), budget_gib=80), cuda)
    target.prepare()
    assert calls == [("set_device", 1), (0.5, 1)]
    assert target.device == torch.device("cuda", 1)


def test_simulated_goes_to_the_simulator(cfg, monkeypatch):
    from streambp import sim

    seen = []
    monkeypatch.setattr(
        sim, "simulate_run", lambda cfg: seen.append(cfg) or {"memory": {}}, raising=False
    )
    sent = []
    progress = CallbackProgress(sent.append)
    simulated = cfg.replace(device=DeviceConfig(name="simulated"))
    assert devices.run(simulated, progress) == {"memory": {}}
    assert seen[0].dtype == "bfloat16"
    assert {"event": "section", "name": "memory", "values": {}} in sent
