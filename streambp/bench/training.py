"""Real training steps: accumulated micro-batches, gradient clipping, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streambp.bench.config import OptimizerConfig
from streambp.bench.step import Batch, forward_backward, supervised_tokens, without_phases

__all__ = ["OPTIMIZER", "StepStats", "Trainer", "build_optimizer"]

OPTIMIZER = "optimizer"

Around = Callable[[str], Any]


@dataclass(kw_only=True, frozen=True)
class StepStats:
    """One optimizer step: mean loss over its supervised tokens, gradient norm before clipping."""

    loss: float
    grad_norm: float
    supervised_tokens: int


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer | None:
    """AdamW over the trained parameters, ``None`` for ``optimizer=none``.

    States have the parameters' dtype; the update is fused (no temporaries of parameter size).
    Errors: ``ValueError`` for what only a simulated run has, and a model with nothing to train.
    """
    if cfg.name == "none":
        return None
    if cfg.name != "adamw":
        raise ValueError(
            f"optimizer.name={cfg.name!r} exists only in simulated runs: use optimizer=adamw, or "
            "device=simulated"
        )
    if cfg.state_dtype is not None:
        raise ValueError(
            f"optimizer.state_dtype={cfg.state_dtype!r}: a real run keeps states in the "
            "parameters' dtype; use optimizer.state_dtype=null, or device=simulated"
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("tuning: the model has no parameter to train; use tuning=full")
    beta1, beta2 = cfg.betas
    return torch.optim.AdamW(
        trained,
        lr=cfg.lr,
        betas=(beta1, beta2),
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        fused=True,
    )


class Trainer:
    """Trains ``model`` one optimizer step at a time, the way Hugging Face's Trainer does.

    The loss of a step is divided by the supervised tokens of all its micro-batches, so
    accumulation gives what one large batch would. Gradients are dropped (set to ``None``) before
    a step and stay afterwards. The learning rate rises linearly over ``warmup_steps``.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: OptimizerConfig,
        *,
        objective: str = "sft",
        keep_outputs: bool = False,
    ):
        self.model = model
        self.optimizer = build_optimizer(model, cfg)
        self._cfg = cfg
        self._objective = objective
        self._keep_outputs = keep_outputs
        self._num_steps = 0

    def step(self, batches: Sequence[Batch], around: Around = without_phases) -> StepStats:
        """One optimizer step over ``batches``, the micro-batches, each on the model's device.

        ``around(name)`` encloses every "forward" and "backward", and the "optimizer" phase
        (clipping and update).
        """
        num_items = sum(supervised_tokens(batch) for batch in batches)
        self.model.zero_grad(set_to_none=True)
        losses = [
            forward_backward(
                self.model,
                batch,
                self._objective,
                keep_outputs=self._keep_outputs,
                num_items_in_batch=max(num_items, 1),
                around=around,
            ).loss
            for batch in batches
        ]
        grad_norm = self.update(around)
        return StepStats(
            loss=float(torch.stack(losses).sum()),
            grad_norm=float(grad_norm),
            supervised_tokens=num_items,
        )

    def update(self, around: Around = without_phases) -> torch.Tensor:
        """Clip the gradients there are and update the weights. Returns the norm before clipping."""
        with around(OPTIMIZER):
            grad_norm = self._clip()
            if self.optimizer is not None:
                self._set_learning_rate(self.optimizer)
                self.optimizer.step()
            self._num_steps += 1
        return grad_norm

    def _clip(self) -> torch.Tensor:
        trained = [p for p in self.model.parameters() if p.grad is not None]
        limit = self._cfg.max_grad_norm
        return torch.nn.utils.clip_grad_norm_(trained, float("inf") if limit is None else limit)

    def _set_learning_rate(self, optimizer: torch.optim.Optimizer) -> None:
        factor = min(1.0, (self._num_steps + 1) / (self._cfg.warmup_steps + 1))
        for group in optimizer.param_groups:
            group["lr"] = self._cfg.lr * factor
