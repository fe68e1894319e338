"""Final norm, head and log-probabilities, one chunk of tokens at a time.

N tokens (B * T), C chunk, D hidden, V vocabulary.

No tensor of N x V elements ever exists, nor any fp32 copy of the whole sequence's hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from streambp import kernels, replay
from streambp.buffers import keeps_graph, own
from streambp.chunks import Chunk, partition
from streambp.gradients import (
    GradientSums,
    SummedLinears,
    detached_parameters,
    only_graph_matters,
)
from streambp.labels import label

Tensor = torch.Tensor


@dataclass(kw_only=True)
class HeadCall:
    """What to compute on each chunk of hidden states.

    program: (C, D) -> logits (C, V), with every transformation the model applies to them.
    modules: whose trainable parameters the program uses. labels: (N,) int64.
    temperature: logits are divided by it, in fp32. ignore_index: labels without a target.
    overwrite: the gradient may be written over the hidden states, which nobody else needs.
    """

    program: Callable[[Tensor], Tensor]
    modules: Sequence[torch.nn.Module]
    labels: Tensor
    chunk_size: int
    temperature: float = 1.0
    ignore_index: int = -100
    overwrite: bool = False
    _spent: torch.UntypedStorage | None = None  # the chunk before's logits, to be written over

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return partition(self.labels.numel(), self.chunk_size)

    def parameters(self) -> list[Tensor]:
        """The trainable tensors the program reads, each once."""
        found = {
            id(p): p
            for root in self.modules
            for module in root.modules()
            for p in module._parameters.values()
            if p is not None and p.requires_grad
        }
        return list(found.values())

    def log_softmax(self, logits: Tensor) -> Tensor:
        """(C, V) in fp32 (fp64 for fp64), fresh."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        if self.temperature != 1.0:
            logits = logits.to(dtype) / self.temperature
        return label(torch.log_softmax(logits, -1, dtype=dtype), "logits")

    def targets(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Labels (C, 1) fit for `gather`, and bool (C,): which of them count."""
        labels = self.labels[chunk.start : chunk.end]
        counts = labels != self.ignore_index
        return labels.where(counts, 0).unsqueeze(-1), counts

    @staticmethod
    def _on_cpu(tensor: Tensor) -> bool:
        """On a CPU, and not standing in for a tensor on another device."""
        return tensor.device.type == "cpu" and kernels.device_type_of(tensor) == "cpu"

    def _memory(self, rows: Tensor) -> torch.UntypedStorage | None:
        """Memory for logits by columns, maybe empty; `None` where they lie by rows, fresh.

        Fresh memory costs a CPU a tenth of the product in page faults; a GPU caches it.
        """
        if rows.device.type != "cpu" or isinstance(rows, FakeTensor) or rows.dtype.itemsize < 4:
            return None
        return rows.new_empty(0).untyped_storage() if self._spent is None else self._spent

    def chunk_gradients(
        self,
        rows: Tensor,
        chunk: Chunk,
        weights: Tensor,
        sums: GradientSums,
        leaves: list[Tensor],
        need_rows: bool,
        autocast: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (C,) of a chunk and the gradient of `(weights * log p).sum()`.

        rows: (C, D) hidden states; weights: (C,), zero where a label does not count. Parameter
        gradients go into `sums`; returns the gradient of rows (C, D), or `None` if not needed.
        """
        rows = rows.detach().requires_grad_(need_rows)
        memory = self._memory(rows)
        linears = SummedLinears(sums, by_columns=memory)
        with torch.enable_grad(), replay.autocast(autocast), linears:
            logits = label(self.program(rows), "logits")
        with torch.no_grad(), replay.autocast({**autocast, "enabled": False}):
            free = only_graph_matters(logits)
            self._spent = logits.untyped_storage() if free and memory is not None else None
            # A fresh tensor of this size costs a CPU more in page faults than the softmax.
            overwrite = free and self._on_cpu(logits) and self.temperature == 1.0
            index, _ = self.targets(chunk)
            if overwrite and logits.dtype.itemsize >= 4:
                picked, grad = _gradient_over(logits, index, weights)
            else:
                log_probs = self.log_softmax(logits)
                picked = log_probs.gather(-1, index).squeeze(-1)
                # d(w log p[y]) / dlogits = w (onehot(y) - p) / temperature
                weights = weights / self.temperature
                grad = log_probs.exp_().mul_(-weights.unsqueeze(-1))
                grad.scatter_add_(-1, index, weights.unsqueeze(-1))
                grad = label(grad.to(logits.dtype), "logits")
            inputs = [rows, *leaves] if need_rows else leaves
            grads = torch.autograd.grad(logits, inputs, grad, allow_unused=True)
        sums.add_all(grads[1:] if need_rows else grads)
        return picked, grads[0] if need_rows else None


def _gradient_over(logits: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`log p[y]` (C,) and the gradient of `(weights * log p[y]).sum()`, over the logits (C, V).

    index: y (C, 1). Elementwise steps and sums alone: softmax kernels are slow by columns.
    """
    logits.sub_(logits.amax(-1, keepdim=True))
    picked = logits.gather(-1, index).squeeze(-1)
    total = logits.exp_().sum(-1)
    logits.mul_((-weights / total).unsqueeze(-1))
    logits.scatter_add_(-1, index, weights.unsqueeze(-1))
    return picked - total.log(), logits


class StreamedCrossEntropy(torch.autograd.Function):
    """`-(log p(labels)).sum() / divisor` with its gradients formed in the forward pass.

    hidden: (..., D) with N rows; divisor: 0-dim fp32. Equivalent to
    `F.cross_entropy(program(hidden), labels, reduction="sum") / divisor`. Returns fp32, 0-dim.

    Each chunk's logits are computed once and used for loss and gradients: three products with the
    head's weight, where recomputing them in the backward pass takes four. Saved: the gradients,
    O(N D) (in place of the hidden states with `overwrite`) and one set of the head's.
    """

    @staticmethod
    def forward(
        ctx: Any, call: HeadCall, divisor: Tensor, hidden: Tensor, *params: Tensor
    ) -> Tensor:
        need_rows = ctx.needs_input_grad[2]
        autocast = replay.autocast_state(hidden.device.type)
        rows = hidden.detach().flatten(0, -2)
        dhidden = None
        if need_rows:
            dhidden = hidden.detach() if call.overwrite else hidden.new_empty(hidden.shape)
            drows = label(dhidden, "hidden_grads").view_as(rows)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=wide)
        with detached_parameters(call.modules, params) as leaves:
            sums = GradientSums(leaves, len(call.chunks))
            for chunk in call.chunks:
                span = slice(chunk.start, chunk.end)
                _, counts = call.targets(chunk)
                weights = -counts.to(wide) / divisor
                picked, grad = call.chunk_gradients(
                    rows[span], chunk, weights, sums, leaves, need_rows, autocast
                )
                loss -= picked.where(counts, 0).sum()
                if grad is not None:
                    drows[span] = grad
            call._spent = None
            grads = sums.take()
        ctx.save_for_backward(dhidden, *grads)
        return loss / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, *grads = ctx.saved_tensors
        scaled = [_scaled(t, grad) for t in (dhidden, *grads)]
        return None, None, *scaled


def _scaled(saved: Tensor | None, factor: Tensor) -> Tensor | None:
    """`saved * factor`, in place if the graph will not be used again."""
    if saved is None:
        return None
    factor = factor.to(saved.dtype)
    return own(saved * factor if keeps_graph() else saved.detach().mul_(factor))


class StreamedLogProbs(torch.autograd.Function):
    """`log_softmax(program(hidden))` at the labels, per token; logits are computed twice.

    hidden: (..., D) with N rows. Returns (N,) fp32; 0 at ignored labels. Saved: hidden, O(N D).
    """

    @staticmethod
    def forward(ctx: Any, call: HeadCall, hidden: Tensor, *params: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        out = rows.new_zeros(0)
        for chunk in call.chunks:
            log_probs = call.log_softmax(call.program(rows[chunk.start : chunk.end]))
            index, counts = call.targets(chunk)
            if chunk.start == 0:
                out = log_probs.new_empty(len(rows))
            picked = log_probs.gather(-1, index).squeeze(-1)
            out[chunk.start : chunk.end] = picked.where(counts, 0)
        ctx.save_for_backward(hidden)
        ctx.call, ctx.params = call, params
        ctx.autocast = replay.autocast_state(hidden.device.type)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        call: HeadCall = ctx.call
        need_rows = ctx.needs_input_grad[1]
        rows = hidden.detach().flatten(0, -2)
        dhidden = label(hidden.new_empty(hidden.shape), "hidden_grads") if need_rows else None
        drows = None if dhidden is None else dhidden.view_as(rows)
        with detached_parameters(call.modules, ctx.params) as leaves:
            sums = GradientSums(leaves, len(call.chunks))
            for chunk in call.chunks:
                span = slice(chunk.start, chunk.end)
                _, counts = call.targets(chunk)
                _, part = call.chunk_gradients(
                    rows[span], chunk, grad[span] * counts, sums, leaves, need_rows, ctx.autocast
                )
                if drows is not None and part is not None:
                    drows[span] = part
            call._spent = None
            grads = sums.take()
        return None, None if dhidden is None else own(dhidden), *grads
