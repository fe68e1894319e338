"""A measured run: training, then the memory pass, then the timing pass, on a CPU or a GPU.

The passes are separate because the instruments of one would spoil the other. All three run the
same step (``step.forward_backward``) on the same model.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from streambp.bench.config import RunConfig
from streambp.bench.data import batches, to_device
from streambp.bench.devices.targets import check_budget, target_of
from streambp.bench.memory import fill_gradients
from streambp.bench.methods import apply_method
from streambp.bench.models import build
from streambp.bench.progress import Progress
from streambp.bench.step import Batch, forward_backward
from streambp.bench.timing import time_steps
from streambp.bench.training import StepStats, Trainer

__all__ = ["measure"]

RESIDENT_NOTE = (
    "memory: one step of one micro-batch with gradients and optimizer states resident before it; "
    "activation_peak_bytes is the peak of forward and backward over them and the weights"
)


def measure(cfg: RunConfig, progress: Progress) -> dict[str, Any]:
    """The record's sections of a run on ``cfg.device``; each is sent on as soon as it is known."""
    sections = _Sections(progress)
    target = target_of(cfg)
    target.prepare()
    outputs_kept = _outputs_kept(cfg)

    progress.phase("model")
    model = build(
        cfg.model, dtype=cfg.dtype, device=target.device, seed=cfg.seed, tuning=cfg.tuning
    )
    apply_method(model, cfg.method)
    source = batches(
        cfg.data,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        batch_size=cfg.batch_size,
        seq_len=cfg.seq_len,
        seed=cfg.seed,
    )
    trainer = Trainer(model, cfg.optimizer, objective=cfg.objective.name, keep_outputs=outputs_kept)

    def next_step() -> list[Batch]:
        return [to_device(next(source), target.device) for _ in range(cfg.grad_accum)]

    torch.manual_seed(cfg.seed)  # dropout
    if cfg.steps:
        _train(cfg, trainer, next_step, sections, progress)
    micro_batches = next_step()
    progress.phase("warm-up")
    for _ in range(cfg.measure.warmup_steps):
        forward_backward(model, micro_batches[0], cfg.objective.name, keep_outputs=outputs_kept)
    if cfg.measure.memory:
        progress.phase("memory")
        _make_resident(trainer)
        taken = target.memory_pass(
            model,
            micro_batches[0],
            trainer.optimizer,
            lambda around: _memory_step(trainer, micro_batches[0], cfg, outputs_kept, around),
        )
        sections.note(RESIDENT_NOTE, *taken.notes)
        if taken.timeline is not None:
            sections.put("timeline", taken.timeline)
        sections.put("memory", taken.memory)
        sections.provenance("memory")
        check_budget(taken.memory, cfg.budget_gib)
    if cfg.measure.timing_samples:
        progress.phase("timing")
        sections.put(
            "time",
            time_steps(
                trainer,
                micro_batches,
                target.clock(),
                num_samples=cfg.measure.timing_samples,
                warmup_steps=cfg.measure.warmup_steps,
                progress=lambda sample, seconds: progress.message(
                    f"timing sample {sample + 1} of {cfg.measure.timing_samples}: {seconds:.3f} s"
                ),
            ),
        )
        sections.provenance("time")
    return sections.values


class _Sections:
    """The record's sections so far, sent on at every change."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self.values: dict[str, Any] = {
            "provenance": {"training": None, "memory": None, "time": None, "flops": None},
            "notes": [],
        }

    def put(self, name: str, values: Any) -> None:
        self.values[name] = values
        self._progress.section(name, values)

    def provenance(self, name: str) -> None:
        self.put("provenance", {**self.values["provenance"], name: "measured"})

    def note(self, *notes: str) -> None:
        self.put("notes", [*self.values["notes"], *notes])


def _train(
    cfg: RunConfig, trainer: Trainer, next_step: Any, sections: _Sections, progress: Progress
) -> None:
    """``cfg.steps`` real training steps; the section so far is sent on after each."""
    training: dict[str, Any] = {
        "loss_per_step": [],
        "grad_norm_per_step": [],
        "step_wall_time_s_samples": [],
        "tokens_per_step": cfg.batch_size * cfg.seq_len * cfg.grad_accum,
        "supervised_tokens_per_step": None,
    }
    progress.phase("training")
    sections.provenance("training")
    for step in range(1, cfg.steps + 1):
        start = time.perf_counter()
        stats: StepStats = trainer.step(next_step())
        training["loss_per_step"].append(stats.loss)
        training["grad_norm_per_step"].append(stats.grad_norm)
        training["step_wall_time_s_samples"].append(time.perf_counter() - start)
        training["supervised_tokens_per_step"] = stats.supervised_tokens
        sections.put("training", copy.deepcopy(training))
        progress.step(step, cfg.steps, loss=stats.loss, grad_norm=stats.grad_norm)


def _make_resident(trainer: Trainer) -> None:
    """Gradients of all trained parameters, and the optimizer's states, exist from here on."""
    fill_gradients(trainer.model)
    if trainer.optimizer is not None and not trainer.optimizer.state:
        trainer.update()


def _memory_step(
    trainer: Trainer, batch: Batch, cfg: RunConfig, outputs_kept: bool, around: Any
) -> None:
    """One forward and backward onto resident gradients, then the update."""
    forward_backward(
        trainer.model, batch, cfg.objective.name, keep_outputs=outputs_kept, around=around
    )
    if trainer.optimizer is not None:
        trainer.update(around)


def _outputs_kept(cfg: RunConfig) -> bool:
    """Whether the step keeps the model's outputs, the assumption simulated runs have as well."""
    return bool(cfg.device.assumptions.get("outputs_kept", False))
