"""The optimizer's resident states as fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

#: Values that share one fp32 scale in blockwise 8-bit states, and the size below which
#: a parameter keeps 32-bit states.
_BLOCK = 256
_MIN_8BIT_NUMEL = 4096


def allocate_states(
    parameters: Iterable[torch.Tensor], name: str, state_dtype: torch.dtype | None
) -> Iterator[list[torch.Tensor]]:
    """The tensors an optimizer holds between steps, for each of `parameters` in turn.

    name: "none"; "adamw": two moments of `state_dtype` (None: the parameter's own), and an fp32
    master copy is not assumed; "adamw_8bit": two moments of one byte with an fp32 scale for every
    256 values, and fp32 moments for parameters under 4096 values.

    The step itself needs no further memory (a fused kernel is assumed).
    """
    if name == "none":
        return
    if name not in ("adamw", "adamw_8bit"):
        raise ValueError(
            f"optimizer.name={name!r}: its states are not modelled. "
            "Fix: one of none, adamw, adamw_8bit"
        )
    for parameter in parameters:
        shape, numel = parameter.shape, parameter.numel()
        states: list[torch.Tensor] = []
        for _ in range(2):
            if name == "adamw":
                states.append(torch.empty(shape, dtype=state_dtype or parameter.dtype))
            elif numel < _MIN_8BIT_NUMEL:
                states.append(torch.empty(shape, dtype=torch.float32))
            else:
                states.append(torch.empty(shape, dtype=torch.uint8))
                states.append(torch.empty(-(-numel // _BLOCK), dtype=torch.float32))
        yield states
