"""Under which assumptions each published table is simulated, and why."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from streambp.bench.config import ModelConfig, TuningConfig
from streambp.sim.gpus import gpu_named
from streambp.sim.settings import Assumptions, paper_assumptions
from streambp.sim.workload import Workload

GPU = "a800_80gb"
#: The paper's chunk sizes, and our settings that sum weight gradients in little memory (the paper's
#: program adds them up in 16 bits): they cost time, not exactness.
PAPER_CHUNKS = {
    "chunk_size": 500, "head_chunk_size": 100, "recompute_head": True, "split_sums": True
}  # fmt: skip
#: Ours for the longest sequences: smaller chunks cost time too.
BEST_CHUNKS = {**PAPER_CHUNKS, "chunk_size": 256, "head_chunk_size": 64}
LORA_RANK = 32
BASELINES = ("standard", "checkpointing")
#: Table 8: X (rows, width), W1 and W2 (width, width).
LINEAR_ROWS, LINEAR_WIDTH = 100_000, 16_384

#: Table 3 is a trainer's whole step, which lets go of the outputs before backward.
TRAINER = Assumptions(gradients_resident=True, outputs_kept=False, mask="additive")
#: Models with sliding windows: the paper's transformers made one 16-bit mask per windowed layer;
#: the installed one does so (from a boolean mask) when no mask is given.
WINDOWED = Assumptions(gradients_resident=True, outputs_kept=True, mask="none")

REASONS = {
    "figure3": "gradients resident, outputs kept alive, one additive 16-bit mask shared by layers",
    "table3": "as figure 3 with the outputs released; full: two 8-bit moments (about 2 bytes a "
    f"parameter); LoRA: rank {LORA_RANK}, fp32 adapters, fp32 moments",
    "table8": "fp32, one weight gradient formed beside the resident ones",
    "table9": "as figure 3; Gemma without a mask: its windowed layers then make their own, as in "
    "the paper's transformers. The table's GB are GiB: its smallest value is below the bytes of "
    "weights and gradients in units of 1e9",
}

_MODELS = Path(__file__).resolve().parents[3] / "conf" / "model"


@cache
def model_named(name: str) -> ModelConfig:
    """A model of `conf/model`. `ValueError` where the project's conf folder is not there."""
    path = _MODELS / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"model={name!r}: no {path}. Run from a checkout of the project")
    return ModelConfig(**yaml.safe_load(path.read_text(encoding="utf-8")))


def workload(model: str, tuning: str, method: str, seq_len: int, **changes: Any) -> Workload:
    """A cell of figure 3; streambp with the paper's chunk sizes and our assumptions."""
    streamed = method == "streambp"
    values: dict[str, Any] = {
        "model": model_named(model),
        "method": method,
        "method_options": PAPER_CHUNKS if streamed else {},
        "seq_len": seq_len,
        "gpu": gpu_named(GPU),
        "tuning": TuningConfig(name=tuning, rank=LORA_RANK),
        "assumptions": paper_assumptions(method),
    }
    return Workload(**{**values, **changes})


def trainer_workload(model: str, tuning: str, method: str, seq_len: int) -> Workload:
    """A cell of table 3: the optimizer's states are resident too."""
    return workload(
        model,
        tuning,
        method,
        seq_len,
        optimizer="adamw_8bit" if tuning == "full" else "adamw",
        assumptions=TRAINER if method in BASELINES else paper_assumptions(method),
    )
