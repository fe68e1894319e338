"""The validated configuration of one run, built from Hydra's config before any work starts.

Every dataclass is keyword-only and frozen. A value that cannot work raises `ConfigError` (a
`ValueError`) whose message names the field, the value and the fix. Nothing here imports torch:
what needs a look at the machine (is there a GPU?) is in `preflight.py`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streambp.bench.checkpoints import config_of_checkpoint
from streambp.bench.checks import (
    check_bool,
    check_choice,
    check_int,
    check_mapping,
    check_name,
    check_number,
    check_optional_int,
    check_path,
    check_text,
    closest,
)
from streambp.bench.errors import ConfigError
from streambp.bench.sizes import check_sizes
from streambp.sim.settings import Assumptions

DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
    "fp64": "float64",
    "float64": "float64",
}
DEVICES = ("auto", "cuda", "cpu", "simulated")
OBJECTIVES = ("sft",)
TUNINGS = ("full", "lora")
DATA_SOURCES = ("corpus", "random", "file")
OPTIMIZERS = ("adamw", "adamw_8bit", "none")
TRACKERS = ("none", "wandb")
EXPERIMENT_KINDS = ("training", "benchmark", "linear_example", "fidelity")
OFFLOADS = ("none",)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model: inline HF configuration, path of a config.json, or checkpoint with weights.

    Where a path is given, `name` and `config` are taken from there.
    """

    name: str
    config: dict[str, Any] = field(
        default_factory=dict
    )  # keys of HF's config.json, "model_type" too
    hf_config: str | None = None  # path of a config.json; random weights
    checkpoint: str | None = None  # folder written by save_pretrained, or id of a cached model

    def __post_init__(self) -> None:
        check_name("model.name", self.name)
        if self.hf_config is not None and self.checkpoint is not None:
            raise ConfigError(
                "model.hf_config",
                self.hf_config,
                "excludes model.checkpoint",
                "give one of the two",
            )
        check_mapping("model.config", self.config)
        if self.checkpoint is not None:
            check_text("model.checkpoint", self.checkpoint, fix="model.checkpoint=<folder>")
        check_path("model.hf_config", self.hf_config, kind="file")
        if self.hf_config is not None or self.checkpoint is not None:
            self._read_path()
        elif "model_type" not in self.config:
            raise ConfigError(
                "model.config",
                self.config,
                "names no model_type",
                "model=qwen3_tiny, or model.hf_config=<config.json>, or model.checkpoint=<folder>",
            )
        path = self.checkpoint if self.checkpoint is not None else self.hf_config
        check_sizes(self.config, "model.config." if path is None else f"{path}: ")

    def _read_path(self) -> None:
        """Name the model after its file or folder, and keep what its configuration says."""
        field_name = "model.checkpoint" if self.checkpoint is not None else "model.hf_config"
        given = Path(str(self.checkpoint or self.hf_config)).expanduser().absolute()
        file = given if self.checkpoint is None else config_of_checkpoint(self.checkpoint)
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                field_name,
                str(given),
                f"{file.name} can't be read as JSON ({error})",
                "a HF config.json",
            ) from None
        if not isinstance(values, dict) or "model_type" not in values:
            raise ConfigError(
                field_name, str(given), f"{file.name} names no model_type", "a HF config.json"
            )
        source = file.parent if file.name == "config.json" else file
        source = given if self.checkpoint is not None else source  # the cache's folder is a hash
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", source.stem if source is file else source.name)
        object.__setattr__(self, "name", name.strip("._-") or "model")
        object.__setattr__(self, "config", values)


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """How the backward pass is organised, with that method's options. None: the method chooses."""

    name: str
    chunk_size: int | None = None  # tokens per layer chunk
    head_chunk_size: int | None = None  # tokens per chunk of the output head
    keep_kv: bool = False
    keep_attention: bool = False
    recompute_head: bool = False
    split_sums: bool = False
    offload: str = "none"
    options: dict[str, Any] = field(default_factory=dict)  # of methods other than streambp

    def __post_init__(self) -> None:
        check_name("method.name", self.name)
        for name in ("chunk_size", "head_chunk_size"):
            check_optional_int(
                f"method.{name}", getattr(self, name), at_least=1, fix=f"method.{name}=512"
            )
        check_bool("method.keep_kv", self.keep_kv)
        check_bool("method.keep_attention", self.keep_attention)
        check_bool("method.recompute_head", self.recompute_head)
        check_bool("method.split_sums", self.split_sums)
        check_choice("method.offload", self.offload, OFFLOADS)
        check_mapping("method.options", self.options)


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The training objective. `sft`: next-token cross-entropy over the supervised tokens."""

    name: str = "sft"

    def __post_init__(self) -> None:
        check_choice("objective.name", self.name, OBJECTIVES)


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Which parameters train: all of them, or LoRA adapters (needs `peft`)."""

    name: str = "full"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    adapter_dtype: str = "float32"

    def __post_init__(self) -> None:
        check_choice("tuning.name", self.name, TUNINGS)
        check_int("tuning.rank", self.rank, at_least=1, fix="tuning.rank=16")
        check_number("tuning.alpha", self.alpha, above=0, fix="tuning.alpha=32")
        check_number("tuning.dropout", self.dropout, at_least=0, fix="tuning.dropout=0.0")
        if self.dropout >= 1:
            raise ConfigError(
                "tuning.dropout", self.dropout, "must be below 1", "tuning.dropout=0.1"
            )
        targets = self.target_modules
        listed = [targets] if isinstance(targets, str) else targets
        if (
            not isinstance(listed, (list, tuple))
            or not listed
            or not all(isinstance(target, str) and target for target in listed)
        ):
            problem = "must be all-linear, a pattern, or a list of names of linear layers"
            fix = "tuning.target_modules=[q_proj,v_proj]"
            raise ConfigError("tuning.target_modules", targets, problem, fix)
        check_choice("tuning.adapter_dtype", self.adapter_dtype, DTYPES)
        object.__setattr__(self, "adapter_dtype", DTYPES[self.adapter_dtype])


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where the run happens. `auto`: a GPU if there is one, else cpu or simulated by size."""

    name: str = "auto"
    index: int = 0  # which visible GPU
    num_threads: int | None = None  # CPU threads; None leaves torch's default
    assumptions: dict[str, Any] = field(default_factory=dict)  # what a simulated run assumes

    def __post_init__(self) -> None:
        check_choice("device.name", self.name, DEVICES)
        check_int("device.index", self.index, at_least=0, fix="device.index=0")
        check_optional_int(
            "device.num_threads", self.num_threads, at_least=1, fix="device.num_threads=2"
        )
        check_mapping("device.assumptions", self.assumptions)
        given = {name: value for name, value in self.assumptions.items() if value is not None}
        Assumptions.from_mapping(given)
        object.__setattr__(self, "assumptions", given)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The tokens: this Python's standard library, random ids, or local text or dataset."""

    name: str = "corpus"
    path: str | None = None  # of data=file: .txt, .jsonl, or a folder saved by `datasets`
    tokenizer: str | None = None  # folder of a HF tokenizer; None: bytes
    text_field: str = "text"  # column or JSON key that holds the text

    def __post_init__(self) -> None:
        check_choice("data.name", self.name, DATA_SOURCES)
        if self.name == "file" and self.path is None:
            raise ConfigError(
                "data.path", None, "data=file needs a path", "data.path=<file or folder>"
            )
        unread = f"is not read by data={self.name}"
        if self.name != "file":
            for name, default in (("path", None), ("text_field", "text")):
                value = getattr(self, name)
                if value != default:
                    raise ConfigError(f"data.{name}", value, unread, "add data=file")
        if self.name == "random" and self.tokenizer is not None:
            fix = "data=corpus, or data.tokenizer=null"
            raise ConfigError("data.tokenizer", self.tokenizer, unread, fix)
        check_text("data.text_field", self.text_field, fix="data.text_field=text")
        check_path("data.path", self.path)
        check_path("data.tokenizer", self.tokenizer)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer. `none`: gradients only. `adamw_8bit`: only its memory, in a simulated run."""

    name: str = "adamw"
    lr: float = 1e-4
    warmup_steps: int = 0  # the learning rate rises linearly over them
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    state_dtype: str | None = None  # None: the parameters' own

    def __post_init__(self) -> None:
        check_choice("optimizer.name", self.name, OPTIMIZERS)
        check_number("optimizer.lr", self.lr, at_least=0, fix="optimizer.lr=1e-4")
        check_int(
            "optimizer.warmup_steps",
            self.warmup_steps,
            at_least=0,
            fix="optimizer.warmup_steps=0",
        )
        check_number(
            "optimizer.weight_decay", self.weight_decay, at_least=0, fix="optimizer.weight_decay=0"
        )
        check_number("optimizer.eps", self.eps, above=0, fix="optimizer.eps=1e-8")
        pair = isinstance(self.betas, (list, tuple)) and len(self.betas) == 2
        if not pair or not all(
            isinstance(beta, (int, float)) and not isinstance(beta, bool) and 0 <= beta < 1
            for beta in self.betas
        ):
            raise ConfigError(
                "optimizer.betas",
                self.betas,
                "must be two numbers in [0, 1)",
                "optimizer.betas=[0.9,0.999]",
            )
        if self.max_grad_norm is not None:
            check_number(
                "optimizer.max_grad_norm",
                self.max_grad_norm,
                above=0,
                fix="optimizer.max_grad_norm=1.0 or null",
            )
        if self.state_dtype is not None:
            check_choice("optimizer.state_dtype", self.state_dtype, DTYPES)
            object.__setattr__(self, "state_dtype", DTYPES[self.state_dtype])


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where metrics go besides the record. mode `auto`: online given a key, else offline."""

    name: str = "none"
    project: str = "streambp"
    entity: str | None = None
    mode: str = "auto"
    group: str | None = None  # None: the experiment's name
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice("tracking.name", self.name, TRACKERS)
        check_choice("tracking.mode", self.mode, ("auto", "online", "offline"))
        check_text("tracking.project", self.project, fix="tracking.project=streambp")
        for name in ("entity", "group"):
            if getattr(self, name) is not None:
                fix = f"tracking.{name}=my_name, or tracking.{name}=null"
                check_text(f"tracking.{name}", getattr(self, name), fix=fix)
        if not isinstance(self.tags, (list, tuple)) or not all(
            isinstance(tag, (str, int, float)) for tag in self.tags
        ):
            fix = f"tracking.tags=[{self.tags}]" if isinstance(self.tags, str) else "[one,two]"
            raise ConfigError("tracking.tags", self.tags, "must be a list of words", fix)


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """The experiment a run belongs to: its folder under `runs_dir`, and the kind of its jobs."""

    name: str = "default"
    kind: str = "training"
    description: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # read by kinds other than training

    def __post_init__(self) -> None:
        check_name("experiment.name", self.name)
        check_choice("experiment.kind", self.kind, EXPERIMENT_KINDS)
        check_mapping("experiment.options", self.options)


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """The two passes after training: memory (instrumented) and timing (not instrumented)."""

    memory: bool = True
    # Store live bytes by category over one step, in timeline.json. None: a lone simulated run does,
    # where it costs seconds, and a measured run with tracking=wandb, for the table there.
    timeline: bool | None = None
    warmup_steps: int = 1  # untimed forward+backward passes before the first sample
    timing_samples: int = 5  # timed forward+backward passes; 0 skips the timing pass

    def __post_init__(self) -> None:
        check_bool("measure.memory", self.memory)
        if self.timeline is not None:
            check_bool("measure.timeline", self.timeline)
        check_int(
            "measure.warmup_steps", self.warmup_steps, at_least=0, fix="measure.warmup_steps=1"
        )
        check_int(
            "measure.timing_samples",
            self.timing_samples,
            at_least=0,
            fix="measure.timing_samples=5",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides one run.

    `gpu` (the simulated device) and `search` (the maximum search) are checked by their own modules.
    """

    model: ModelConfig
    method: MethodConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    gpu: dict[str, Any] | None = None
    search: dict[str, Any] | None = None
    seq_len: int = 1024  # tokens per sequence
    batch_size: int = 1  # sequences per forward pass
    grad_accum: int = 1  # forward+backward passes per optimizer step
    steps: int = 3  # optimizer steps of training; 0: only the memory and timing passes
    seed: int = 0
    dtype: str = "auto"  # of weights and activations; auto: float32 on a CPU, else bfloat16
    budget_gib: float | None = None  # device memory the run may use; None: all there is
    force: bool = False  # run even if an identical finished record exists
    runs_dir: str = "runs"
    timeout_s: float | None = None  # wall time after which the worker is ended
    paper: bool = False  # the paper's sizes and settings where an experiment has smaller ones

    def __post_init__(self) -> None:
        check_int("seq_len", self.seq_len, at_least=2, fix="seq_len=1024 (tokens per sequence)")
        check_int("batch_size", self.batch_size, at_least=1, fix="batch_size=1")
        check_int("grad_accum", self.grad_accum, at_least=1, fix="grad_accum=1")
        check_int(
            "steps", self.steps, at_least=0, fix="steps=3, or steps=0 to measure without training"
        )
        check_int("seed", self.seed, at_least=0, fix="seed=0")
        if self.dtype != "auto":
            check_choice("dtype", self.dtype, DTYPES)
            object.__setattr__(self, "dtype", DTYPES[self.dtype])
        if self.budget_gib is not None:
            check_number(
                "budget_gib", self.budget_gib, above=0, fix="budget_gib=80, or budget_gib=null"
            )
        if self.timeout_s is not None:
            check_number(
                "timeout_s", self.timeout_s, above=0, fix="timeout_s=600, or timeout_s=null"
            )
        check_bool("force", self.force)
        check_bool("paper", self.paper)
        if not isinstance(self.runs_dir, str) or not self.runs_dir:
            raise ConfigError("runs_dir", self.runs_dir, "must be a folder", "runs_dir=runs")
        if self.device.name in ("cpu", "cuda"):
            problem = f"exists only in simulated runs, and device={self.device.name}"
            fix = "optimizer=adamw, or device=simulated"
            if self.optimizer.name == "adamw_8bit":
                raise ConfigError("optimizer.name", self.optimizer.name, problem, fix)
            if self.optimizer.state_dtype is not None:
                raise ConfigError("optimizer.state_dtype", self.optimizer.state_dtype, problem, fix)

    @classmethod
    def from_hydra(cls, config: Any) -> RunConfig:
        """The run that a composed Hydra config (or an equal plain mapping) describes.

        Raises:
            ConfigError: an unknown key (names the closest known one), an impossible value or
                combination of values.
        """
        from omegaconf import DictConfig, OmegaConf

        if isinstance(config, DictConfig):
            config = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        return cls.from_dict(config)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """`from_hydra` for a plain mapping; the inverse of `to_dict`."""
        return _build(cls, values, prefix="")

    @property
    def searches(self) -> bool:
        """True when the run is a maximum search (`search` names one)."""
        return bool(self.search) and (self.search or {}).get("name") not in (None, "none")

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, as stored in config.yaml and in the record."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with top-level fields changed; validated again."""
        return dataclasses.replace(self, **changes)


GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "method": MethodConfig,
    "objective": ObjectiveConfig,
    "tuning": TuningConfig,
    "device": DeviceConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "tracking": TrackingConfig,
    "experiment": ExperimentConfig,
    "measure": MeasureConfig,
}


def _build(cls: type, values: Any, *, prefix: str) -> Any:
    """An instance of dataclass `cls` from a mapping, nested groups too; refuses unknown keys."""
    if not isinstance(values, Mapping):
        name = prefix.rstrip(".")
        raise ConfigError(
            name, values, "must be a group of settings", f"leave {name} out, or name a group"
        )
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in known:
            near = closest(str(key), known)
            fix = f"did you mean {prefix}{near}?" if near else f"one of {', '.join(known)}"
            raise ConfigError(f"{prefix}{key}", value, "no such setting", fix)
    for name, f in known.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and values.get(name) is None:
            raise ConfigError(f"{prefix}{name}", None, "is missing", f"set {prefix}{name}")
    arguments = dict(values)
    if cls is RunConfig:
        for name, group in GROUPS.items():
            if name in arguments:
                arguments[name] = _build(group, arguments[name], prefix=f"{name}.")
    return cls(**arguments)
