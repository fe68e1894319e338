"""Settles ``device=auto`` and refuses a device that this machine doesn't have.

torch is imported only where the answer depends on it: a command with an error in it, or whose runs
are all there already, ends before that second has passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streambp.bench.config import ConfigError, RunConfig

__all__ = ["DeviceChoice", "choose", "resolve", "resolve_dtype"]

#: Above either of these, ``auto`` simulates a run rather than doing it on the CPU.
MAX_CPU_PARAMETERS = 300_000_000
MAX_CPU_PASS_FLOPS = 2e13  # one forward and backward pass: a few minutes on a few cores


@dataclass(kw_only=True, frozen=True)
class DeviceChoice:
    """``name`` is "cuda", "cpu" or "simulated"; ``reason`` says why, for the record."""

    name: str
    reason: str


def choose(cfg: RunConfig, cuda: Any = None) -> DeviceChoice:
    """The device of the run, with the reason. ``cuda`` stands in for ``torch.cuda`` (None).

    ``auto`` takes a GPU if there is one; else it simulates models of more than 300M parameters,
    passes too long for a CPU and optimizers that only simulations have; else the CPU.
    Errors: ``ConfigError`` for a GPU that isn't there.
    """
    name = cfg.device.name
    if name == "cuda":
        _check_gpu(cfg.device.index, cuda or _torch_cuda())
    if name != "auto":
        return DeviceChoice(name=name, reason=f"device={name} was asked for")
    if cfg.optimizer.name == "adamw_8bit" or cfg.optimizer.state_dtype is not None:
        return DeviceChoice(name="simulated", reason="only simulated runs have this optimizer")
    cuda = cuda or _torch_cuda()
    if cuda.is_available():
        _check_gpu(cfg.device.index, cuda)
        gpu = cuda.get_device_name(cfg.device.index)
        return DeviceChoice(name="cuda", reason=f"device=auto found a GPU ({gpu})")
    num_parameters, flops = _size(cfg)
    if num_parameters > MAX_CPU_PARAMETERS:
        size = f"{num_parameters / 1e6:,.0f}M parameters"
        limit = f"more than {MAX_CPU_PARAMETERS / 1e6:.0f}M"
        return DeviceChoice(
            name="simulated", reason=f"device=auto: no GPU, and {size} ({limit}) on a CPU"
        )
    if flops > MAX_CPU_PASS_FLOPS:
        return DeviceChoice(
            name="simulated",
            reason=f"device=auto: no GPU, and {flops:.1e} FLOPs a pass are too many for a CPU "
            f"(more than {MAX_CPU_PASS_FLOPS:.0e})",
        )
    return DeviceChoice(name="cpu", reason="device=auto: no GPU, and the run is small enough")


def resolve(cfg: RunConfig) -> str:
    """The name of the run's device: "cuda", "cpu" or "simulated". Errors: see ``choose``."""
    return choose(cfg).name


def resolve_dtype(cfg: RunConfig, device: str) -> str:
    """The dtype of weights and activations: ``auto`` is float32 on a CPU, else bfloat16."""
    if cfg.dtype != "auto":
        return cfg.dtype
    return "float32" if device == "cpu" else "bfloat16"


def _torch_cuda() -> Any:
    import torch

    return torch.cuda


def _check_gpu(index: int, cuda: Any) -> None:
    import torch

    if not cuda.is_available():
        problem = (
            "no GPU is visible to torch"
            if torch.version.cuda
            else f"torch {torch.__version__} is built without CUDA"
        )
        raise ConfigError("device.name", "cuda", problem, "device=cpu, or device=simulated")
    count = cuda.device_count()
    if index >= count:
        raise ConfigError(
            "device.index", index, f"{count} GPU(s) are visible", f"an index below {count}"
        )


def _size(cfg: RunConfig) -> tuple[int, float]:
    """(parameters, FLOPs of one forward and backward pass): 6 per parameter and token, and
    causal attention's 6 per head dimension, token and earlier token."""
    if cfg.experiment.kind == "linear_example":
        from streambp.bench.linear_example import Options

        options = Options.parse(cfg.experiment.options)
        return 2 * options.width**2, float(options.flops)
    from streambp.bench.models import build

    model = build(cfg.model, dtype="float32", device="meta", seed=0)
    text = model.config.get_text_config()
    num_parameters = sum(p.numel() for p in model.parameters())
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention_width = text.num_hidden_layers * text.num_attention_heads * head_dim
    tokens = cfg.batch_size * cfg.seq_len
    return num_parameters, 6.0 * tokens * (num_parameters + attention_width * cfg.seq_len)
