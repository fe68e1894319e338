"""What a simulated run assumes beyond the run's own configuration: each one stated and recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MASKS = ("none", "padding", "additive")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Explicit choices that change the peak.

    Args:
        gradients_resident: every trainable parameter's gradient exists before the pass begins (as
            under accumulation, or without set_to_none). False: gradients appear during backward.
        outputs_kept: the model's outputs stay alive during backward, as a caller holding the
            output object does: 2 V bytes per token of bf16 logits.
        mask: "none": no attention mask. "padding": the batch carries a (B, T) mask with padding in
            it, which the model expands as the installed transformers does. "additive": a
            (B, 1, T, T) mask of the model's dtype exists once and all layers share it, as
            transformers 4.51 made it from any attention mask.
        cublas_workspace: count the cuBLAS workspaces, which live from the first matmul on.
        attention_workspace: count the transient buffers of attention backward kernels.
    """

    gradients_resident: bool = True
    outputs_kept: bool = False
    mask: str = "none"
    cublas_workspace: bool = True
    attention_workspace: bool = True

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "mask":
                if value not in MASKS:
                    choices = ", ".join(MASKS)
                    raise ValueError(f"device.assumptions.mask={value!r}: must be one of {choices}")
            elif not isinstance(value, bool):
                raise ValueError(f"device.assumptions.{f.name}={value!r}: must be true or false")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | Assumptions | None) -> Assumptions:
        """From `device.assumptions`. `ValueError` names an unknown entry or an impossible value."""
        if isinstance(values, Assumptions):
            return values
        known = [f.name for f in dataclasses.fields(cls)]
        for name, value in (values or {}).items():
            if name not in known:
                raise ValueError(
                    f"device.assumptions.{name}={value!r}: no such assumption. "
                    f"Fix: one of {', '.join(known)}"
                )
        return cls(**(values or {}))

    def to_dict(self) -> dict[str, bool | str]:
        """The choices, as recorded."""
        return dataclasses.asdict(self)


#: The choices under which the published baselines are met (see the fidelity report).
PAPER = Assumptions(gradients_resident=True, outputs_kept=True, mask="additive")
#: A streamed pass makes no outputs to keep, and hands no T x T mask to its layers.
PAPER_STREAMED = Assumptions(gradients_resident=True, outputs_kept=False, mask="none")


def paper_assumptions(method: str) -> Assumptions:
    """The paper's setting for a method: its baselines run the model's own forward."""
    return PAPER if method in ("standard", "checkpointing") else PAPER_STREAMED
