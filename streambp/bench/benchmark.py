"""How much faster and smaller is a streamed backward pass than the others, on this machine?

Clocks drift (turbo, neighbours), so absolute seconds of two runs do not compare. Here all variants
live in one process and take turns: every round times one forward+backward of each, starting with
a different one each time, and the ratio of the medians is what counts. Before the measurement the
multiplication rate of the machine is printed: the floor under every time below.

Memory is the activation peak: live tensor bytes of one forward+backward over weights, gradients
and whatever else was there before, read in a pass of its own.

Terms. variant: a method with its options. ratio: median of the variant / median of `over`.
target: the ratio that must not be exceeded; the record says whether it was met.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streambp.bench.config import ConfigError, MethodConfig, RunConfig
from streambp.bench.data import batches
from streambp.bench.devices.targets import Target, target_of
from streambp.bench.memory import fill_gradients
from streambp.bench.methods import apply_method
from streambp.bench.models import build
from streambp.bench.progress import Progress
from streambp.bench.step import BACKWARD, FORWARD, Batch, forward_backward

GIB = 2**30
MEASURES = ("time", "memory")
_RATE_SIZE = 2048  # square matrices for the multiplication rate


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One ratio that must not exceed `at_most`."""

    measure: str
    seq_len: int
    variant: str
    over: str
    at_most: float


@dataclass(frozen=True, kw_only=True)
class Options:
    """`experiment.options` of kind benchmark, checked."""

    rounds: int
    time_seq_lens: list[int]
    memory_seq_lens: list[int]
    variants: dict[str, MethodConfig]
    time_variants: list[str]  # those that are timed, all unless given
    targets: list[Goal]

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Raises ConfigError for what is missing or does not fit together."""
        try:
            parsed = cls(
                rounds=options["rounds"],
                time_seq_lens=list(options["time_seq_lens"]),
                memory_seq_lens=list(options["memory_seq_lens"]),
                variants={k: MethodConfig(**v) for k, v in options["variants"].items()},
                time_variants=list(options.get("time_variants") or options["variants"]),
                targets=[Goal(**target) for target in options["targets"]],
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(
                "experiment.options", dict(options), f"{error}", "see experiment=cpu_benchmark"
            ) from None
        if not isinstance(parsed.rounds, int) or parsed.rounds < 1:
            raise ConfigError(
                "experiment.options.rounds", parsed.rounds, "must be at least 1", "rounds: 5"
            )
        if not set(parsed.time_variants) <= set(parsed.variants):
            fix = f"some of {', '.join(parsed.variants)}"
            raise ConfigError(
                "experiment.options.time_variants", parsed.time_variants, "no such variant", fix
            )
        for goal in parsed.targets:
            if goal.measure not in MEASURES:
                fix = f"one of {', '.join(MEASURES)}"
                raise ConfigError("experiment.options.targets", vars(goal), "no such measure", fix)
            lengths = parsed.time_seq_lens if goal.measure == "time" else parsed.memory_seq_lens
            if goal.seq_len not in lengths:
                problem, fix = "this length is not measured", f"seq_len one of {lengths}"
                raise ConfigError("experiment.options.targets", vars(goal), problem, fix)
            known = parsed.time_variants if goal.measure == "time" else list(parsed.variants)
            if not {goal.variant, goal.over} <= set(known):
                fix = f"one of {', '.join(known)}"
                raise ConfigError("experiment.options.targets", vars(goal), "no such variant", fix)
        return parsed


def run(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """Time and memory of every variant; returns the record's sections."""
    options = Options.parse(config.experiment.options)
    target = target_of(config)
    target.prepare()
    rate = _multiplication_rate(target.device, config)
    progress.message(f"multiplication rate {rate / 1e9:,.0f} GFLOP/s: the floor under the times")
    models = {name: _model(config, method, target) for name, method in options.variants.items()}
    benchmark: dict[str, Any] = {
        "multiplication_rate_flops_per_s": rate,
        "forward_backward_time_s_samples": {},
        "activation_peak_bytes": {},
        "targets": [],
        "summary": [],
    }
    provenance = {"memory": "measured", "time": "measured", "training": None, "flops": None}
    progress.section("provenance", provenance)
    for seq_len in options.memory_seq_lens:
        progress.phase(f"memory at {seq_len} tokens")
        batch = _batch(config, models, seq_len, target)
        benchmark["activation_peak_bytes"][str(seq_len)] = {
            name: _activation_peak_bytes(model, batch, target, config, progress, name)
            for name, model in models.items()
        }
    for seq_len in options.time_seq_lens:
        progress.phase(f"time at {seq_len} tokens")
        batch = _batch(config, models, seq_len, target)
        benchmark["forward_backward_time_s_samples"][str(seq_len)] = _alternate(
            {name: models[name] for name in options.time_variants},
            batch,
            target,
            config,
            options.rounds,
            progress,
        )
        progress.section("benchmark", benchmark)
    benchmark["targets"] = [_judge(goal, benchmark) for goal in options.targets]
    benchmark["summary"] = _summary(benchmark)
    return {"benchmark": benchmark, "provenance": provenance}


def _model(config: RunConfig, method: MethodConfig, target: Target) -> nn.Module:
    model = build(
        config.model,
        dtype=config.dtype,
        device=target.device,
        seed=config.seed,
        tuning=config.tuning,
    )
    apply_method(model, method)
    fill_gradients(model)
    return model


def _batch(
    config: RunConfig, models: Mapping[str, nn.Module], seq_len: int, target: Target
) -> Batch:
    vocab_size = next(iter(models.values())).get_input_embeddings().weight.shape[0]  # type: ignore[operator,union-attr]
    source = batches(
        config.data,
        vocab_size=vocab_size,
        batch_size=config.batch_size,
        seq_len=seq_len,
        seed=config.seed,
    )
    return {name: tensor.to(target.device) for name, tensor in next(source).items()}


def _activation_peak_bytes(
    model: nn.Module,
    batch: Batch,
    target: Target,
    config: RunConfig,
    progress: Progress,
    name: str,
) -> int:
    def step(around: Any) -> None:
        forward_backward(model, batch, config.objective.name, around=around)

    peak = target.memory_pass(model, batch, None, step).memory["activation_peak_bytes"]
    progress.message(
        f"T={batch['input_ids'].shape[1]} {name}: activation peak {peak / GIB:.3f} GiB"
    )
    return peak


def _alternate(
    models: Mapping[str, nn.Module],
    batch: Batch,
    target: Target,
    config: RunConfig,
    rounds: int,
    progress: Progress,
) -> dict[str, list[float]]:
    """Seconds of one forward+backward for each variant and round; a warm-up round is dropped."""
    samples: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    clock = target.clock()
    for round_ in range(rounds + 1):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            forward_backward(models[name], batch, config.objective.name, around=clock.around)
            phases = dict(clock.take())
            if round_:
                samples[name].append(phases[FORWARD] + phases[BACKWARD])
        if round_:
            last = "  ".join(f"{name} {times[-1]:.2f} s" for name, times in samples.items())
            seq_len = batch["input_ids"].shape[1]
            progress.message(f"T={seq_len} round {round_}/{rounds}: {last}")
    return samples


def _judge(goal: Goal, benchmark: Mapping[str, Any]) -> dict[str, Any]:
    """The ratio of a target and whether it was met."""

    def value(variant: str) -> float:
        if goal.measure == "memory":
            return benchmark["activation_peak_bytes"][str(goal.seq_len)][variant]
        samples = benchmark["forward_backward_time_s_samples"][str(goal.seq_len)][variant]
        return statistics.median(samples)

    ratio = value(goal.variant) / value(goal.over)
    return {**vars(goal), "ratio": ratio, "met": ratio <= goal.at_most}


def _summary(benchmark: Mapping[str, Any]) -> list[str]:
    """What a person reads: absolute medians, then each ratio with its target."""
    lines = []
    for seq_len, samples in benchmark["forward_backward_time_s_samples"].items():
        medians = (f"{name} {statistics.median(times):.2f} s" for name, times in samples.items())
        lines.append(f"T={seq_len} forward+backward, median: {', '.join(medians)}")
    for seq_len, peaks in benchmark["activation_peak_bytes"].items():
        found = (f"{name} {peak / GIB:.3f} GiB" for name, peak in peaks.items())
        lines.append(f"T={seq_len} activation peak: {', '.join(found)}")
    for goal in benchmark["targets"]:
        lines.append(
            f"{'met   ' if goal['met'] else 'MISSED'} {goal['measure']} at T={goal['seq_len']}: "
            f"{goal['variant']} / {goal['over']} = {goal['ratio']:.3f} "
            f"(at most {goal['at_most']:.2f})"
        )
    return lines


def _multiplication_rate(device: torch.device, config: RunConfig) -> float:
    """FLOP/s of a large square matrix product in the run's dtype, best of three."""
    dtype = getattr(torch, config.dtype)
    left = torch.randn(_RATE_SIZE, _RATE_SIZE, device=device).to(dtype)
    best_s = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        float((left @ left)[0, 0])  # reading a value waits for the device
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * _RATE_SIZE**3 / best_s
