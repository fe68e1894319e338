"""A layer's keys and values once more, from its saved input, before its backward pass.

B batch, C chunk, D hidden.

The beginning of a layer projects queries as well, which nobody reads here. Which linear layers lead
to keys or values is told by the autograd graph of the first chunk; the others' products, a good
part of this pass, are left out for the chunks after it. Where values also flow past the graph (a
detached norm of weights, as in DoRA), everything is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from streambp.kv import KVStream
from streambp.replay import RandomStates

if TYPE_CHECKING:
    from streambp.layer import LayerCall

Tensor = torch.Tensor


def collect_keys(call: LayerCall, x: Tensor, kv: KVStream, random: RandomStates | None) -> None:
    """Fill `kv` for every chunk before the last. x: the layer's input, (B, T, D)."""
    kv.mode = "collect"
    unread: dict[int, _Result] = {}
    before_last = len(call.chunks) - 1
    for index in range(before_last):
        chunk = call.chunks[index]
        if random is not None:
            random.restore(index)
        part = x[:, chunk.start : chunk.end]
        if index == 0 and before_last > 1 and not watched(call.layer):
            unread = _collect_and_find_unread(call, part, kv)
        else:
            with torch.no_grad(), _ZerosInstead(unread):
                call.collect(part, call.view(index, kv))


def watched(layer: torch.nn.Module) -> bool:
    """Does a forward hook inside the layer see values, which must then be right?"""
    return any(
        module._forward_hooks or module._forward_pre_hooks
        for module in layer.modules()
        if module is not layer
    )


def _collect_and_find_unread(call: LayerCall, x: Tensor, kv: KVStream) -> dict[int, _Result]:
    """Collect the first chunk x (B, C, D); the linear calls that keys and values don't depend on.

    Every one is on the graph, because x requires grad.
    """
    x = x.detach().requires_grad_()
    with torch.enable_grad(), _LinearResults(kv) as linears:
        call.collect(x, call.view(0, kv))
    assert kv.current is not None
    roots = [tensor.grad_fn for tensor in kv.current]
    kv.current = None
    if linears.past_graph or any(root is None for root in roots):
        return {}
    needed = _nodes_behind(roots)
    return {
        number: result
        for number, (result, node) in enumerate(linears.results)
        if node is not None and node not in needed
    }


def _nodes_behind(roots: list[Any]) -> dict[Any, None]:
    """The autograd nodes `roots` and all that their gradients flow to.

    A dict as an ordered set: the graph goes, and its memory with it, in the same order every time.
    """
    found, waiting = dict.fromkeys(roots), list(roots)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found[node] = None
                waiting.append(node)
    return found


class _Result(NamedTuple):
    """Number and dtype of the features that a call of `F.linear` gave."""

    features: int
    dtype: torch.dtype


#: What turns a tensor's values into Python's.
_READS = frozenset(
    ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")
)


class _LinearResults(TorchFunctionMode):
    """Notes the result of every call of `F.linear`; keeps no tensor but what the graph keeps.

    past_graph: did values with a gradient lead to anything without one, before `kv` had them?
    """

    def __init__(self, kv: KVStream) -> None:
        super().__init__()
        self._kv = kv
        self.results: list[tuple[_Result, Any]] = []  # with its autograd node
        self.past_graph = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.nn.functional.linear:
            self.results.append((_Result(out.shape[-1], out.dtype), out.grad_fn))
        collected = self._kv.current is not None
        if not (collected or self.past_graph) and _any_on_graph((args, kwargs)):
            lost = any(not tensor.requires_grad for tensor in _tensors(out))
            self.past_graph = lost or getattr(func, "__name__", "") in _READS
        return out


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _any_on_graph(values: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(values))


class _ZerosInstead(TorchFunctionMode):
    """The calls of `F.linear` with these numbers, counted from 0, give zeros of the same shape."""

    def __init__(self, unread: dict[int, _Result]) -> None:
        super().__init__()
        self._unread = unread
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            result = self._unread.get(self._calls)
            self._calls += 1
            if result is not None:
                x = args[0] if args else kwargs["input"]
                return x.new_zeros(*x.shape[:-1], result.features, dtype=result.dtype)
        return func(*args, **kwargs)
