"""Full-size models without storage, and running them without reading a value."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from streambp.sim.errors import SimulationError

_NEEDS_DATA = tuple(
    getattr(fake_tensor, name)
    for name in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedFakeTensorException",
        "UnsupportedOperatorException",
    )
    if hasattr(fake_tensor, name)
)


class _FakeMode(FakeTensorMode):
    """Fake tensors that also know products of 16-bit matrices into fp32 (torch 2.8 does not)."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        if func is torch.ops.aten.mm.dtype:
            left, right, dtype = args
            return left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
        if func is torch.ops.aten.addmm.dtype_out:
            return kwargs["out"]
        return super().__torch_dispatch__(func, types, args, kwargs)


def fake_mode() -> FakeTensorMode:
    """A mode under which tensors have shapes, dtypes and strides but no storage."""
    return _FakeMode(allow_non_fake_inputs=True)


def to_fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Replace the parameters and buffers of a model on `meta` by fake CPU tensors, in place.

    A tensor that occurs twice (tied embeddings) stays one tensor. CPU, because autograd on fake
    CUDA tensors needs a CUDA build; what runs on CUDA is decided by the routing, not the device.
    """
    converted: dict[int, torch.Tensor] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in converted:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            converted[id(tensor)] = fake
        return converted[id(tensor)]

    with mode:
        for module in model.modules():
            for registry in (module._parameters, module._buffers):
                for name, tensor in list(registry.items()):
                    if tensor is not None:
                        registry[name] = convert(tensor)  # type: ignore[assignment]
    return model


@contextlib.contextmanager
def without_data(*, padding: bool) -> Iterator[None]:
    """Within it, transformers' choices that read a batch are answered by what is known of it.

    Rows hold one document each; masks have padding in them iff `padding` (without, none is given).
    """
    with contextlib.ExitStack() as stack:
        masking = _masking_utils()
        if masking is None and padding:  # transformers 4.51
            from transformers.modeling_attn_mask_utils import AttentionMaskConverter

            needed = staticmethod(lambda *args, **kwargs: False)
            stack.enter_context(
                mock.patch.object(AttentionMaskConverter, "_ignore_causal_mask_sdpa", needed)
            )
        if masking is not None:
            answers: dict[str, Any] = {
                "find_packed_sequence_indices": lambda position_ids: None,
                "_is_packed_sequence": lambda position_ids, batch_size: False,
                "fast_all": lambda tensor: not padding,
            }
            for name, answer in answers.items():
                if hasattr(masking, name):
                    stack.enter_context(mock.patch.object(masking, name, answer))
        yield


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn "this op needs data" into a `SimulationError` naming the op and where it was called."""
    try:
        yield
    except _NEEDS_DATA as error:
        op = getattr(error, "func", None) or str(error).splitlines()[0]
        frame = _caller(error)
        raise SimulationError(
            f"{what} can't be simulated: {op} needs the values of a tensor, called at {frame}. "
            "Fix: avoid reading tensor values (.item(), bool(tensor), nonzero) on this path, or "
            "run on a real device"
        ) from error


def _caller(error: BaseException) -> str:
    """The innermost line outside torch and the simulator that led to the op."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (Path(torch.__file__).parent, Path(__file__).parent)
    outside = [f for f in frames if not any(p in Path(f.filename).parents for p in ours)]
    frame = (outside or frames)[-1]
    path = "/".join(Path(frame.filename).parts[-3:])
    return f"{path}:{frame.lineno} in {frame.name}: {frame.line}"


def _masking_utils() -> ModuleType | None:
    try:
        from transformers import masking_utils
    except ImportError:
        return None
    return masking_utils
