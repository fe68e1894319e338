"""Bytes in words."""

from __future__ import annotations

_MIB, _GIB = 2**20, 2**30


def size_text(num_bytes: int) -> str:
    """GiB with two decimals, or MiB below a tenth of one, so that small budgets can be told
    apart."""
    if num_bytes < 0.1 * _GIB:
        return f"{num_bytes / _MIB:.2f} MiB"
    return f"{num_bytes / _GIB:.2f} GiB"
