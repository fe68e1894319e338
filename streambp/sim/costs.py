"""FLOPs by kind and stage, bytes moved and predicted time of the ops a program runs.

Shapes: B batch, M query length, N key length, H query heads, E head dim.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from streambp.sim.errors import SimulationError
from streambp.sim.roofline import Roofline

aten = torch.ops.aten

FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"
MATMUL, ATTENTION, OTHER = "matmul", "attention", "other"

#: Autograd nodes that run a forward again without recording it (keys and values of a layer).
_RECOMPUTING_NODES = ("StreamedLayerBackward",)


class CostKey(NamedTuple):
    """What a cost is filed under."""

    kind: str  # "matmul", "attention" or "other"
    stage: str  # "forward", "recompute" or "backward"
    in_forward: bool  # ran before `backward` was called (a head may form its gradients there)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Totals of one pass: FLOPs, bytes moved and predicted seconds."""

    flops: dict[CostKey, int]
    bytes_moved: dict[CostKey, int]
    time_s: dict[CostKey, float]

    def extended(self, other: Costs, num_steps: int) -> Costs:
        """`other` plus `num_steps` times the difference of `other` and this: costs are affine."""

        def extend(a: dict[CostKey, Any], b: dict[CostKey, Any]) -> dict[CostKey, Any]:
            return {
                key: b.get(key, 0) + num_steps * (b.get(key, 0) - a.get(key, 0))
                for key in {**a, **b}
            }

        return Costs(
            flops=extend(self.flops, other.flops),
            bytes_moved=extend(self.bytes_moved, other.bytes_moved),
            time_s=extend(self.time_s, other.time_s),
        )


def attention_pairs(m: int, n: int, causal: bool) -> int:
    """Query-key pairs a kernel scores; causal is aligned bottom-right (M <= N)."""
    if not causal:
        return m * n
    return m * (n - m) + m * (m + 1) // 2 if m <= n else n * (n + 1) // 2


def _attention_flops(num_matmuls: int, first: int) -> Callable[..., int]:
    """2 FLOPs for each of `num_matmuls` products of a scored pair; query is argument `first`."""

    def flops(args: tuple[Any, ...], kwargs: dict[str, Any], causal: bool) -> int:
        query, key = args[first], args[first + 1]
        batch, heads, m, head_dim = query.shape
        pairs = attention_pairs(m, key.shape[2], causal)
        return 2 * num_matmuls * batch * heads * pairs * head_dim

    return flops


_FORWARD_ATTENTION = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
)
_BACKWARD_ATTENTION = (
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
#: op -> (FLOPs function, runs in backward). Forward: QK^T and PV. Backward: QK^T again, dP, dV,
#: dQ and dK.
ATTENTION_FLOPS: dict[Any, tuple[Callable[..., int], bool]] = {
    **{op: (_attention_flops(2, 0), False) for op in _FORWARD_ATTENTION},
    **{op: (_attention_flops(5, 1), True) for op in _BACKWARD_ATTENTION},
}


def _matmul_flops(first: int) -> Callable[..., int]:
    """2 M N K of the (batched) product of arguments `first` and `first + 1`."""

    def flops(args: tuple[Any, ...]) -> int:
        left, right = args[first], args[first + 1]
        if left.ndim == 3 and left.shape[-1] == 1:
            return 0  # positions times rotary frequencies: elementwise in newer transformers
        return 2 * left.numel() * right.shape[-1]

    return flops


def _vector_flops(args: tuple[Any, ...]) -> int:
    """2 for each element of a matrix times a vector, or of two vectors."""
    return 2 * int(args[0].numel())


def _grouped_flops(args: tuple[Any, ...]) -> int:
    """2 M N K of every expert's product, the rows of all experts together being one dimension.

    (S, K) x (G, K, N), (M, S) x (S, N), (G, M, K) x (G, K, N): as one product over all rows. The
    rows are those of each token once for every expert it chose. (G, M, K) x (K, S): each column
    meets one expert.
    """
    left, right = args[:2]
    if left.ndim == 3 and right.ndim == 2:
        return 2 * int(left.shape[1] * right.numel())
    return 2 * int(left.numel() * right.shape[-1])


#: op -> FLOPs function. torch's own registry lacks the in-place ops, and fails on `out_dtype`.
MATMUL_FLOPS: dict[Any, Callable[..., int]] = {
    **{op: _matmul_flops(0) for op in (aten.mm, aten.bmm)},
    **{op: _matmul_flops(1) for op in (aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_)},
    **dict.fromkeys((aten.mv, aten.dot), _vector_flops),
    **({aten._grouped_mm: _grouped_flops} if hasattr(aten, "_grouped_mm") else {}),
}

#: Words in the names of ops that multiply; "mm" also ends a word (`addmm`).
_PRODUCT_WORDS = re.compile(
    r"\w*mm|matmul|conv\d?d?|convolution|linear|attention|einsum|cdist|addmv|addr|mv|v?dot"
    r"|ger|gru|lstm|rnn"
)
_KNOWN_NAMESPACES = ("aten", "prim", "prims")


def _refuse_unknown_product(func: Any) -> None:
    """Costs of 0 are counted for ops that are known to multiply nothing, and for no others."""
    name = func.overloadpacket.__name__
    words = [word for word in name.split("_") if word]
    product = any(_PRODUCT_WORDS.fullmatch(word) for word in words)
    if product or func.namespace not in _KNOWN_NAMESPACES:
        raise SimulationError(
            f"the FLOPs of {func.namespace}::{name} are not known, so neither they nor the time "
            "can be told. Fix: a model that uses matrix products and attention of torch"
        )


#: Reserve memory without touching it, or read a tensor's description.
_FREE = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, torch.ops.prim.device)


class CostCounter(TorchDispatchMode):
    """Sums what the ops cost while the mode is on.

    An op that multiplies, or may, and whose FLOPs are not known raises `SimulationError`.

    `flops`, `bytes_moved`, `time_s` are keyed by `CostKey`. `weight` multiplies everything counted
    while it is set: the chunks of a shortened loop stand for those that were left out.

    Args:
        roofline: gives an op's predicted time from FLOPs and bytes; None: no times.
    """

    def __init__(self, roofline: Roofline | None = None):
        super().__init__()
        self.flops: Counter[CostKey] = Counter()
        self.bytes_moved: Counter[CostKey] = Counter()
        self.time_s: dict[CostKey, float] = {}
        self.num_ops = 0
        self.weight = Fraction(1)
        self._in_backward = False
        self._roofline = roofline

    def totals(self) -> Costs:
        """What was counted, in whole FLOPs and bytes."""
        return Costs(
            flops={key: round(flops) for key, flops in self.flops.items()},
            bytes_moved={key: round(num) for key, num in self.bytes_moved.items()},
            time_s=dict(self.time_s),
        )

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Encloses "forward" or "backward" of a step."""
        self._in_backward = name == "backward"
        yield
        self._in_backward = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if func.is_view or packet in _FREE:
            return out
        gradients = _forms_gradients()
        if packet in ATTENTION_FLOPS:
            formula, gradients = ATTENTION_FLOPS[packet]
            kind, flops = ATTENTION, formula(args, kwargs, _is_causal(func, args, kwargs))
        elif packet in MATMUL_FLOPS:
            kind, flops = MATMUL, MATMUL_FLOPS[packet](args)
        elif packet in flop_registry:
            kind, flops = MATMUL, flop_registry[packet](*args, **kwargs, out_val=out)
        else:
            _refuse_unknown_product(func)
            kind, flops = OTHER, 0
        stage = BACKWARD if gradients else RECOMPUTE if self._in_backward else FORWARD
        key = CostKey(kind, stage, not self._in_backward)
        self._count(key, flops, args, kwargs, out)
        return out

    def _count(self, key: CostKey, flops: int, args: Any, kwargs: Any, out: Any) -> None:
        tensors = {
            id(leaf): leaf
            for leaf in tree_leaves((args, kwargs, out))
            if isinstance(leaf, torch.Tensor)
        }
        num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        self.num_ops += 1
        self.flops[key] += flops * self.weight  # type: ignore[assignment]
        self.bytes_moved[key] += num_bytes * self.weight  # type: ignore[assignment]
        if self._roofline is not None:
            # An fp32 sum of bf16 products runs at the rate of bf16.
            floats = [t.dtype for t in tensors.values() if t.is_floating_point()]
            dtype = min(floats, key=lambda dtype: dtype.itemsize, default=None)
            time_s = self._roofline.op_time_s(key.kind, flops, num_bytes, dtype)
            self.time_s[key] = self.time_s.get(key, 0.0) + time_s * float(self.weight)


def _forms_gradients() -> bool:
    """Whether the running op is part of a backward formula: autograd runs a node and is not
    recording. A recomputation records, or (`_RECOMPUTING_NODES`) runs directly in such a node."""
    node = torch._C._current_autograd_node()
    if node is None or torch.is_grad_enabled():
        return False
    return node.name() not in _RECOMPUTING_NODES


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            if position < len(args):
                return bool(args[position])
            return bool(kwargs.get("is_causal", argument.default_value))
    return False
