"""What the simulator knows of a GPU, read from ``conf/gpu`` or given by numbers."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

#: The GPU of a simulated run that names none.
DEFAULT_GPU = "a100_80gb"
#: The numbers that tell one GPU from another.
_NUMBERS = (
    "memory_bytes",
    "sm",
    "bandwidth_bytes_per_s",
    "peak_bf16_flops_per_s",
    "peak_fp32_flops_per_s",
)
_FOLDER = Path(__file__).parent / "gpus"
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Peak rates are the data sheet's dense rates without sparsity.

    Args:
        memory_bytes: total memory the driver reports.
        usable_fraction: share of it that tensors can have: the CUDA context, and what
            fragmentation loses near the limit, taken off.
        sm: compute capability as major * 10 + minor (80: A100, 90: H100, 100: B200).
        prefer_cudnn_attention: whether PyTorch's attention picks cuDNN before flash; None: as
            recent PyTorch does (on sm90 and sm100 only).
    """

    name: str
    memory_bytes: int
    sm: int
    bandwidth_bytes_per_s: float
    peak_bf16_flops_per_s: float
    peak_fp32_flops_per_s: float
    usable_fraction: float = 0.98
    prefer_cudnn_attention: bool | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "sm", "bandwidth_bytes_per_s"):
            _check_positive(name, getattr(self, name))
        for name in ("peak_bf16_flops_per_s", "peak_fp32_flops_per_s"):
            _check_positive(name, getattr(self, name))
        if not _is_number(self.usable_fraction) or not 0 < self.usable_fraction <= 1:
            raise ValueError(
                f"gpu.usable_fraction={self.usable_fraction!r}: must be a number above 0 and at "
                "most 1. "
                "Fix: gpu.usable_fraction=0.98"
            )
        if self.prefer_cudnn_attention not in (None, True, False):
            raise ValueError(
                f"gpu.prefer_cudnn_attention={self.prefer_cudnn_attention!r}: must be true or "
                "false. Fix: gpu.prefer_cudnn_attention=null"
            )
        if not isinstance(self.name, str):
            raise ValueError(f"gpu.name={self.name!r}: must be a word. Fix: gpu.name=mine")
        if self.sm < 80:
            raise ValueError(
                f"gpu.sm={self.sm}: bf16 flash attention needs sm80 or newer, and older GPUs are "
                "not modelled. Fix: a GPU with compute capability 8.0 or higher"
            )
        object.__setattr__(self, "memory_bytes", int(self.memory_bytes))

    @property
    def usable_bytes(self) -> int:
        """Bytes of tensors that fit."""
        return int(self.memory_bytes * self.usable_fraction)

    def budget_bytes(self, budget_gib: float | None) -> int:
        """Bytes of tensors that a run may have: all that fit, or `budget_gib`.

        Raises:
            ValueError: more than fit.
        """
        if budget_gib is None:
            return self.usable_bytes
        budget = int(budget_gib * GIB)
        if budget > self.usable_bytes:
            most = math.floor(100 * self.usable_bytes / GIB) / 100
            raise ValueError(
                f"budget_gib={budget_gib:g}: {self.name} has {self.usable_bytes / GIB:.2f} GiB for "
                f"tensors. Fix: budget_gib={most:g} or less, or another gpu"
            )
        return budget

    @property
    def cudnn_attention_first(self) -> bool:
        """Whether PyTorch's attention tries cuDNN before flash on this GPU."""
        if self.prefer_cudnn_attention is not None:
            return self.prefer_cudnn_attention
        return self.sm in (90, 100)

    def to_dict(self) -> dict[str, Any]:
        """The fields, as recorded."""
        return dataclasses.asdict(self)


def gpu_names() -> list[str]:
    """The GPUs known by name."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


@cache
def gpu_named(name: str) -> Gpu:
    """The GPU called `name`, e.g. "a800_80gb". `ValueError` names the closest known one."""
    path = _FOLDER / f"{name}.yaml"
    if "/" in name or not path.is_file():
        near = difflib.get_close_matches(name, gpu_names(), n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"gpu={name!r} is unknown: {hint}Known: {', '.join(gpu_names())}; any other by "
            "numbers: gpu.name=mine gpu.memory_bytes=... gpu.sm=... gpu.bandwidth_bytes_per_s=... "
            "gpu.peak_bf16_flops_per_s=... gpu.peak_fp32_flops_per_s=..."
        )
    return Gpu(**yaml.safe_load(path.read_text(encoding="utf-8")))


def resolve_gpu(gpu: Gpu | str | Mapping[str, Any]) -> Gpu:
    """A GPU from its name, or from a mapping: fields of a known `name` overridden, or all given.

    A known one with changed numbers says so in its name: "a100_80gb with sm=90". On the command
    line a name of one's own comes with the numbers of the GPU that would be taken without it, so
    three or more of one known GPU's are taken for numbers not given.

    Raises:
        ValueError: an unknown name or field, or a number missing.
    """
    if isinstance(gpu, Gpu):
        return gpu
    if isinstance(gpu, str):
        return gpu_named(gpu)
    values = {name: value for name, value in gpu.items() if value is not None}
    known = {f.name for f in dataclasses.fields(Gpu)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"gpu.{unknown[0]}={values[unknown[0]]!r}: no such field. Fix: one of {sorted(known)}"
        )
    name = values.get("name")
    if name in gpu_names():
        return _changed(gpu_named(str(name)), values)
    required = {f.name for f in dataclasses.fields(Gpu) if f.default is dataclasses.MISSING}
    missing = sorted(required - set(values))
    if missing == sorted(required - {"name"}) and name is not None:
        gpu_named(str(name))  # only a name, and an unknown one: say so
    if missing:
        raise ValueError(
            f"gpu: {', '.join('gpu.' + field for field in missing)} not given. Fix: a known "
            f"gpu.name ({', '.join(gpu_names())}), or all the numbers"
        )
    gpu = Gpu(**values)
    base, same = closest_numbers(gpu)
    if same == list(_NUMBERS):
        raise ValueError(
            f"gpu.name={name!r} is unknown and its numbers are those of {base}. "
            f"Fix: gpu=<one of {', '.join(gpu_names())}>, or numbers of its own"
        )
    if len(same) > len(_NUMBERS) // 2:
        changes = [f for f in _NUMBERS if f not in same]
        raise ValueError(
            f"gpu.name={name!r}: {', '.join('gpu.' + f for f in same)} are not given: they would "
            f"be those of {base}. Fix: give them too, or, for a {base} with another number, "
            f"gpu={base} {' '.join(f'gpu.{f}={values[f]:g}' for f in changes)} and no gpu.name"
        )
    return gpu


def closest_numbers(gpu: Gpu) -> tuple[str, list[str]]:
    """The known GPU that shares the most numbers with this one, and which; the default wins ties.

    The compute capability alone says nothing: many GPUs share it.
    """

    def shared(name: str) -> list[str]:
        known = gpu_named(name)
        return [field for field in _NUMBERS if getattr(gpu, field) == getattr(known, field)]

    names = sorted(gpu_names(), key=lambda name: name != DEFAULT_GPU)
    best = max(names, key=lambda name: len(shared(name)))
    return best, shared(best)


def _changed(gpu: Gpu, values: Mapping[str, Any]) -> Gpu:
    """A known GPU with other numbers, named so that it is not taken for the known one."""
    changed = dataclasses.replace(gpu, **values)
    fields = [f for f in changed.to_dict() if getattr(changed, f) != getattr(gpu, f)]
    if not fields:
        return gpu
    said = ", ".join(f"{field}={_short(getattr(changed, field))}" for field in fields)
    return dataclasses.replace(changed, name=f"{gpu.name} with {said}")


def _short(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_positive(name: str, value: Any) -> None:
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"gpu.{name}={value!r}: must be a positive number")
