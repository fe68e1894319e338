"""Telling, from the functions a piece of code calls, where values of tensors go.

Leaving out a product is exact only if nobody looks at its values: not even Python, which may decide
by them what to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

#: Functions that describe a tensor without its values. "__get__" reads a property, as `.shape`.
_DESCRIPTIONS = frozenset(
    (
        "__get__",
        "__len__",
        "__hash__",
        "data_ptr",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_same_size",
        "is_set_to",
        "is_signed",
        "ndimension",
        "nelement",
        "numel",
        "size",
        "storage_offset",
        "stride",
        "type",
        "untyped_storage",
    )
)


def tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in a structure of arguments or results."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def leaves_tensors(func: Any, out: Any) -> bool:
    """Did a call with result `out` hand values to something else than a tensor it returns?

    True for `item`, `bool`, `torch.equal`, and for `buffer[:] = x`, which returns nothing.
    """
    return not tensors(out) and getattr(func, "__name__", "") not in _DESCRIPTIONS
