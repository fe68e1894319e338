"""The one real training step that every pass runs.

The memory pass, the timing pass, real training and the simulator all call
:func:`forward_backward`, so that no number in a record describes a different program.

Shapes: B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = [
    "FORWARD",
    "BACKWARD",
    "IGNORED_LABEL",
    "OBJECTIVES",
    "Batch",
    "Objective",
    "StepOutput",
    "forward_backward",
    "without_phases",
    "supervised_tokens",
]

#: What a batch is: ``input_ids`` (B, T) int64, ``labels`` (B, T) int64, and where rows are padded
#: ``attention_mask`` (B, T) int64.
Batch = Mapping[str, torch.Tensor]

#: ``objective(model, batch, num_items_in_batch)`` -> a model output with a scalar ``loss``.
Objective = Callable[[nn.Module, Batch, "torch.Tensor | int | None"], Any]

FORWARD = "forward"
BACKWARD = "backward"
IGNORED_LABEL = -100


@dataclass(kw_only=True, frozen=True)
class StepOutput:
    """What one forward and backward pass leaves behind.

    ``loss``: scalar, detached. ``outputs_kept``: the model's outputs when they were kept alive
    during backward (the way a trainer that returns them does), else ``None``.
    """

    loss: torch.Tensor
    outputs_kept: Any | None


def sft(model: nn.Module, batch: Batch, num_items_in_batch: torch.Tensor | int | None) -> Any:
    """Next-token cross-entropy of the installed transformers, the key/value cache switched off.

    Equivalent: ``model(**batch, use_cache=False)``, its loss divided by ``num_items_in_batch``
    supervised tokens when given, else by the number in this batch.
    """
    extra = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
    return model(**batch, use_cache=False, **extra)


#: name -> objective. A new objective is one entry here.
OBJECTIVES: dict[str, Objective] = {"sft": sft}


@contextmanager
def without_phases(name: str) -> Iterator[None]:
    """The default of ``around``: the phase ``name`` runs with nothing around it."""
    yield


def forward_backward(
    model: nn.Module,
    batch: Batch,
    objective: str = "sft",
    *,
    keep_outputs: bool = False,
    num_items_in_batch: torch.Tensor | int | None = None,
    around: Callable[[str], Any] = without_phases,
) -> StepOutput:
    """One forward and one backward pass; gradients add onto the parameters' ``.grad``.

    Equivalent: ``model(**batch, use_cache=False).loss.backward()``.

    ``batch``: ``input_ids`` (B, T), ``labels`` (B, T), optional ``attention_mask`` (B, T).
    ``keep_outputs``: keep the model's outputs (for SFT the logits, B T V elements) alive while
    backward runs, as trainers that hold on to them do; it costs that much memory.
    ``num_items_in_batch``: supervised tokens of the whole optimizer step, under accumulation.
    ``around``: called with ``"forward"``, then ``"backward"``; returns a context manager that
    encloses the phase. This is where clocks and memory trackers attach.

    Errors: ``ValueError`` for an unknown objective, or an objective whose output has no loss.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r} is unknown: use one of {sorted(OBJECTIVES)}")
    with around(FORWARD):
        outputs = OBJECTIVES[objective](model, batch, num_items_in_batch)
        loss = outputs.loss
    if loss is None:
        raise ValueError("the model returned no loss: the batch must hold 'labels'")
    kept = outputs if keep_outputs else None
    del outputs
    with around(BACKWARD):
        loss.backward()
    return StepOutput(loss=loss.detach(), outputs_kept=kept)


def supervised_tokens(batch: Batch) -> int:
    """Labels that take part in the loss: not -100, and not the first of a row (never predicted)."""
    return int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())
