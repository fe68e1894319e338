"""Turns a validated config into the run that this machine will do, or says why it cannot.

Everything here looks at the machine (GPUs, installed packages), which `config.py` does not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
from dataclasses import fields, replace
from typing import Any

from streambp.bench.checks import closest
from streambp.bench.config import MethodConfig, ModelConfig, RunConfig
from streambp.bench.data_check import check_data
from streambp.bench.errors import ConfigError
from streambp.sim.gpus import DEFAULT_GPU, resolve_gpu

_WITH_TIMELINE = ("training", "linear_example")


def resolve(config: RunConfig, *, lone: bool = False) -> tuple[RunConfig, list[str]]:
    """(the config with device, dtype and method options settled, notes for the record).

    An option that the method does not take is dropped with a note, so that one sweep over
    methods and options does not run the methods without that option several times. A timeline
    that was neither asked for nor refused is stored by a `lone` simulated run, and by measured runs
    that W&B follows; the others are the same run whether they are part of a sweep or not.

    Raises:
        ConfigError, ValueError: this machine cannot do the run; names the field, the value and
            the fix.
    """
    from streambp.bench import devices

    notes: list[str] = []
    config = replace(config, method=_method(config.method, notes))
    choice = devices.choose(config)
    notes.append(choice.reason)
    config = replace(
        config,
        device=replace(config.device, name=choice.name),
        dtype=devices.resolve_dtype(config, choice.name),
        gpu=config.gpu if choice.name == "simulated" else None,
    )
    if choice.name == "simulated":  # it reads no data
        resolve_gpu(config.gpu or DEFAULT_GPU)
    elif config.experiment.kind == "training":
        check_data(config)
    timeline = _timeline(config, lone=lone)
    config = replace(config, measure=replace(config.measure, timeline=timeline))
    if config.searches:
        from streambp.bench import search

        search.Options.parse(config, measured=choice.name != "simulated")
    if config.experiment.kind == "benchmark":
        from streambp.bench.benchmark import Options

        Options.parse(config.experiment.options)
    if config.experiment.kind == "linear_example":
        from streambp.bench import linear_example

        linear_example.Options.parse(config.experiment.options)
    if config.tuning.name == "lora":
        _needs("peft", "tuning.name", "lora", "pip install peft, or tuning=full")
        _check_targets(config)
    if config.tracking.name == "wandb":
        _needs("wandb", "tracking.name", "wandb", "pip install wandb, or tracking=none")
    return config, notes


def _method(method: MethodConfig, notes: list[str]) -> MethodConfig:
    from streambp.bench.methods import METHODS

    if method.name not in METHODS:
        near = closest(method.name, METHODS) or next(iter(METHODS))
        raise ConfigError("method.name", method.name, "no such method", f"method={near}")
    takes = METHODS[method.name].options
    changes: dict[str, Any] = {}
    for field in fields(method):
        if field.name in ("name", "options") or field.name in takes:
            continue
        value = getattr(method, field.name)
        if value != field.default:
            changes[field.name] = field.default
            notes.append(f"method.{field.name}={value} has no effect with method={method.name}")
    return replace(method, **changes)


def _timeline(config: RunConfig, *, lone: bool) -> bool | None:
    """`measure.timeline`, settled; None stays with a lone simulated run, which stores it if it has
    it."""
    if config.measure.timeline is not None:
        return config.measure.timeline
    if config.device.name == "simulated":
        return None if lone else False
    tracked = config.tracking.name == "wandb" and config.measure.memory
    return tracked and not config.searches and config.experiment.kind in _WITH_TIMELINE


def _check_targets(config: RunConfig) -> None:
    """Raise unless every name in `tuning.target_modules` is that of a part of the model."""
    targets = config.tuning.target_modules
    if targets == "all-linear" or config.experiment.kind != "training":
        return
    names = _module_names(json.dumps(dataclasses.asdict(config.model), sort_keys=True))
    for target in [targets] if isinstance(targets, str) else targets:
        if isinstance(targets, str):  # peft takes it as a pattern of whole names
            found = any(re.fullmatch(target, name) for name in names)
        else:
            found = any(name == target or name.endswith(f".{target}") for name in names)
        if not found:
            known = sorted({name.rpartition(".")[2] for name in names} - {""})
            near = closest(target, known)
            problem = f"no part of {config.model.name} is called {target}"
            fix = f"tuning.target_modules=[{near or ','.join(known)}], or all-linear"
            raise ConfigError("tuning.target_modules", targets, problem, fix)


@functools.lru_cache(maxsize=16)  # the jobs of a sweep share their models
def _module_names(model: str) -> tuple[str, ...]:
    """Names of the parts that adapters can go to. model: its ModelConfig as JSON."""
    from torch import nn

    from streambp.bench.models import build

    built = build(ModelConfig(**json.loads(model)), dtype="float32", device="meta", seed=0)
    parts = (nn.Linear, nn.Embedding)
    return tuple(name for name, part in built.named_modules() if isinstance(part, parts))


def _needs(package: str, name: str, value: str, fix: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(name, value, f"needs the package {package}, which is not installed", fix)
