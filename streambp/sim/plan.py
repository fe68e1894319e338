"""Ask before renting: does a model fit a GPU, at which length, with which chunk sizes?

Everything here is simulated: the model runs on tensors without storage, no GPU is used.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from streambp.bench.config import ModelConfig, TuningConfig
from streambp.bench.search import EVERYTHING_FITS, FOUND, Probe, find_max
from streambp.config import StreamConfig
from streambp.sim.errors import NothingFitsError
from streambp.sim.gpus import Gpu, resolve_gpu
from streambp.sim.roofline import Roofline
from streambp.sim.settings import Assumptions
from streambp.sim.simulation import simulate
from streambp.sim.workload import Workload

GIB = 2**30
_SEQ_LEN_STEP = 8
_SEQ_LEN_LIMIT = 2**23
#: Chunk sizes tried by `plan`, largest (fewest launches) first.
_CHUNK_SIZES = (8192, 4096, 2048, 1024, 512, 256)
#: Tokens of a head chunk hold this many bytes of bf16 logits at most.
_HEAD_CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A setting that fits, and what it was chosen from. Bytes are simulated, seconds predicted."""

    config: StreamConfig
    peak_bytes: int
    budget_bytes: int
    predicted_step_time_s: float
    gpu: Gpu
    seq_len: int
    batch_size: int
    assumptions: Assumptions
    tried: list[tuple[StreamConfig, int]] = field(default_factory=list)

    def __str__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in dataclasses.asdict(self.config).items())
        return (
            f"{settings}: simulated peak "
            f"{self.peak_bytes / GIB:.2f} of {self.budget_bytes / GIB:.2f} GiB on {self.gpu.name}, "
            f"predicted forward and backward {self.predicted_step_time_s:.2f} s"
        )


def plan(
    model: Any,
    gpu: Gpu | str | dict[str, Any],
    *,
    seq_len: int,
    batch_size: int = 1,
    tuning: str | TuningConfig = "full",
    optimizer: str = "adamw",
    optimizer_state_dtype: str | None = None,
    dtype: str = "bfloat16",
    budget_gib: float | None = None,
    assumptions: Assumptions | dict[str, Any] | None = None,
) -> Plan:
    """The fastest streaming setting whose simulated peak fits.

    Settings that keep more are tried first (attention outputs and K/V kept: nothing is computed
    twice), then larger chunks before smaller ones, then those that save memory by more passes over
    the weights; the first that fits is taken.

    Args:
        model: a Hugging Face config or model, a folder or config.json path, or a cached id.
        gpu: a name ("a800_80gb"), a mapping of numbers, or a `Gpu`.
        tuning: "full", "lora" (rank 16) or a `TuningConfig`.
        optimizer, optimizer_state_dtype: "adamw" (states in the parameters' dtype unless given),
            "adamw_8bit" or "none".

    Raises:
        NothingFitsError: not even the smallest chunks fit; says what the smallest needs.
        ValueError: an unknown GPU, model or setting.
    """
    base = _workload(
        model,
        gpu,
        seq_len=seq_len,
        batch_size=batch_size,
        tuning=tuning,
        optimizer=optimizer,
        optimizer_state_dtype=optimizer_state_dtype,
        dtype=dtype,
        assumptions=assumptions,
    )
    budget_bytes = _budget(base, budget_gib)
    tried: list[tuple[StreamConfig, int]] = []
    for config in _candidates(base):
        cell = _streamed(base, config)
        peak = simulate(cell).peak_bytes
        tried.append((config, peak))
        if peak <= budget_bytes:
            assert base.gpu is not None
            return Plan(
                config=config,
                peak_bytes=peak,
                budget_bytes=budget_bytes,
                predicted_step_time_s=_predicted_time_s(cell),
                gpu=base.gpu,
                seq_len=seq_len,
                batch_size=batch_size,
                assumptions=base.assumptions,
                tried=tried,
            )
    least = min(peak for _, peak in tried)
    raise NothingFitsError(
        f"nothing fits: seq_len={seq_len}, batch_size={batch_size} needs at least "
        f"{least / GIB:.2f} GiB (simulated) of {budget_bytes / GIB:.2f}. Fix: a shorter sequence "
        "(see estimate_max_sequence_length), LoRA, a smaller optimizer, or a larger GPU"
    )


def estimate_max_sequence_length(
    model: Any,
    gpu: Gpu | str | dict[str, Any],
    *,
    method: str = "streambp",
    config: StreamConfig | None = None,
    batch_size: int = 1,
    tuning: str | TuningConfig = "full",
    optimizer: str = "adamw",
    optimizer_state_dtype: str | None = None,
    dtype: str = "bfloat16",
    budget_gib: float | None = None,
    assumptions: Assumptions | dict[str, Any] | None = None,
) -> int:
    """The longest sequence, a multiple of 8 tokens, whose simulated peak fits; 0 if none does.

    `config` are streambp's settings (defaults if None); other arguments as in `plan`.
    """
    base = _workload(
        model,
        gpu,
        seq_len=_SEQ_LEN_STEP,
        batch_size=batch_size,
        tuning=tuning,
        optimizer=optimizer,
        optimizer_state_dtype=optimizer_state_dtype,
        dtype=dtype,
        assumptions=assumptions,
    )
    cell = _streamed(base, config or StreamConfig()) if method == "streambp" else base
    cell = cell.replace(method=method)
    budget_bytes = _budget(base, budget_gib)

    def try_value(value: int) -> Probe:
        peak = simulate(cell.replace(seq_len=value)).peak_bytes
        return Probe(value=value, fits=peak <= budget_bytes, peak_bytes=peak)

    found = find_max(
        try_value,
        budget_bytes=budget_bytes,
        step=_SEQ_LEN_STEP,
        start=8192,
        limit=_SEQ_LEN_LIMIT,
    )
    return found.largest or 0 if found.outcome in (FOUND, EVERYTHING_FITS) else 0


def model_config(model: Any) -> ModelConfig:
    """The project's model description of a Hugging Face config or model, a path or a cached id.

    Raises:
        ValueError: nothing of that kind.
    """
    if isinstance(model, ModelConfig):
        return model
    if isinstance(model, nn.Module):
        model = model.config
    if isinstance(model, (str, Path)):
        path = Path(model).expanduser()
        if path.is_dir():
            path = path / "config.json"
        if path.is_file():
            return ModelConfig(name=path.parent.name or "model", hf_config=str(path))
        return _cached(str(model))
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        fields = {**model.to_dict(), "model_type": model.model_type}
        return ModelConfig(name=model.model_type, config=fields)
    raise ValueError(
        f"model={model!r}: give a Hugging Face config or model, the path of a config.json or of a "
        "checkpoint folder, or the id of a model in the local cache"
    )


def _cached(name: str) -> ModelConfig:
    from transformers import AutoConfig

    try:
        return model_config(AutoConfig.from_pretrained(name, local_files_only=True))
    except OSError as error:
        raise ValueError(
            f"model={name!r}: no such file or folder, and not in the local Hugging Face cache "
            "(nothing is downloaded)"
        ) from error


def _workload(
    model: Any,
    gpu: Any,
    *,
    tuning: str | TuningConfig,
    optimizer: str,
    assumptions: Assumptions | dict[str, Any] | None,
    **fields: Any,
) -> Workload:
    return Workload(
        model=model_config(model),
        gpu=resolve_gpu(gpu),
        method="standard",
        tuning=TuningConfig(name=tuning) if isinstance(tuning, str) else tuning,
        optimizer=optimizer,
        assumptions=Assumptions.from_mapping(assumptions),
        **fields,
    )


def _budget(workload: Workload, budget_gib: float | None) -> int:
    assert workload.gpu is not None
    return workload.gpu.budget_bytes(budget_gib)


def _streamed(workload: Workload, config: StreamConfig) -> Workload:
    return workload.replace(method="streambp", method_options=dataclasses.asdict(config))


def _candidates(workload: Workload) -> list[StreamConfig]:
    """Settings from the fastest to the most frugal."""
    from streambp.bench.models import hf_config

    vocab_size = hf_config(workload.model).vocab_size
    head_chunk = max(64, min(2048, _HEAD_CHUNK_BYTES // (2 * vocab_size)))
    sizes = [size for size in _CHUNK_SIZES if size < workload.seq_len] or [workload.seq_len]
    keeping = [
        StreamConfig(
            chunk_size=size, head_chunk_size=head_chunk, keep_kv=kv, keep_attention=attention
        )
        for kv, attention in ((True, True), (False, True), (True, False))
        for size in sizes[:2]
    ]
    plain = [StreamConfig(chunk_size=size, head_chunk_size=head_chunk) for size in sizes]
    frugal = [
        StreamConfig(
            chunk_size=sizes[-1], head_chunk_size=64, recompute_head=weights, split_sums=weights
        )
        for weights in (False, True)
    ]
    return [*keeping, *plain, *frugal]


def _predicted_time_s(workload: Workload) -> float:
    """Roofline time of one forward and backward pass."""
    assert workload.gpu is not None
    costs = simulate(workload, roofline=Roofline(gpu=workload.gpu)).costs
    assert costs is not None
    return sum(costs.time_s.values())
