"""An fp32 sum kept as two 16-bit halves: a bf16 gradient and the bits it has no room for."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from streambp.chunks import partition
from streambp.labels import label

Tensor = torch.Tensor

#: Elements that are fp32 at a time: 32 MiB, which a data-centre GPU's cache holds.
BLOCK_ELEMENTS = 2**23
_UPPER, _LOWER = (1, 0) if sys.byteorder == "little" else (0, 1)


def can_split(tensor: Tensor) -> bool:
    """bf16 is the upper half of fp32. Vectors are small, and fp16 has fewer exponent bits."""
    return tensor.dtype == torch.bfloat16 and tensor.ndim > 1


class SplitSum:
    """A running sum that starts from `total` (bf16, two or more dimensions) and ends up in it.

    Equivalent to `wide = total.float(); wide += ...; total.copy_(wide)`, bit for bit. Between
    updates `total` holds the upper 16 bits of `wide`, the sum rounded towards zero, and a tensor
    of as many bytes the lower ones: 2 bytes an element are added, not 4. Each update passes over
    both, so few large updates are cheaper than many small ones.
    """

    def __init__(self, total: Tensor) -> None:
        self._total = total
        self._upper = total.view(torch.int16)
        self._lower: Tensor | None = None  # zero
        rows = BLOCK_ELEMENTS // max(1, total[:1].numel())
        self._blocks = partition(len(total), max(1, rows))

    def update(self, change: Callable[[Tensor, slice], object]) -> None:
        """`change(wide, rows)` changes rows of the sum in place; it is called for all of them."""
        first = self._lower is None
        if self._lower is None:
            self._lower = label(torch.empty_like(self._upper), "weight_grad_buffers")
        for block in self._blocks:
            rows = slice(block.start, block.end)
            wide, halves = self._joined(rows, with_lower=not first)
            change(wide, rows)
            self._upper[rows] = halves[..., _UPPER]
            self._lower[rows] = halves[..., _LOWER]
            del wide, halves  # before the next block's

    def finish(self) -> None:
        """Round `total` to the nearest and forget the lower half."""
        if self._lower is None:
            return
        for block in self._blocks:
            rows = slice(block.start, block.end)
            self._total[rows] = self._joined(rows, with_lower=True)[0]
        self._lower = None

    def _joined(self, rows: slice, *, with_lower: bool) -> tuple[Tensor, Tensor]:
        """Rows of the sum in fp32, and their halves (..., 2): a view of the same memory."""
        part = self._total[rows]
        wide = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        label(wide, "weight_grad_buffers").copy_(part)
        halves = wide.view(torch.int16).unflatten(-1, (-1, 2))
        if with_lower and self._lower is not None:
            halves[..., _LOWER] = self._lower[rows]
        return wide, halves
