"""A layer's keys and values once more, from its saved input, before its backward pass.

B batch, C chunk, D hidden.

The beginning of a layer projects queries as well, which nobody reads here. Which linear layers lead
to keys or values is told by the autograd graph of the first chunk; the others' products, a good
part of this pass, are left out for the chunks after it. Where values also flow past the graph (a
detached norm of weights, as in DoRA; a condition), everything is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from streambp.gradients import linear_arguments
from streambp.kv import KVStream
from streambp.replay import RandomStates
from streambp.values import leaves_tensors, tensors

if TYPE_CHECKING:
    from streambp.layer import LayerCall

Tensor = torch.Tensor


def collect_keys(call: LayerCall, x: Tensor, kv: KVStream, random: RandomStates | None) -> None:
    """Fill `kv` for every chunk before the last. x: the layer's input, (B, T, D)."""
    kv.mode = "collect"
    calls: list[_Linear] = []
    before_last = len(call.chunks) - 1

    def collect(index: int, linears: _LinearCalls) -> None:
        if random is not None:
            random.restore(index)
        chunk = call.chunks[index]
        with torch.no_grad(), linears:
            call.collect(x[:, chunk.start : chunk.end], call.view(index, kv))

    for index in range(before_last):
        if index == 0 and before_last > 1 and not watched(call.layer):
            if random is not None:
                random.restore(index)
            calls = _collect_and_find_unread(call, x[:, : call.chunks[0].end], kv)
            continue
        linears = _LinearCalls(calls)
        collect(index, linears)
        if not linears.as_expected:  # this layer runs differently from chunk to chunk
            calls = []
            collect(index, _LinearCalls(calls))


def watched(layer: torch.nn.Module) -> bool:
    """Does a forward hook inside the layer see values, which must then be right?"""
    everywhere = torch.nn.modules.module
    return bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks) or any(
        module._forward_hooks or module._forward_pre_hooks
        for module in layer.modules()
        if module is not layer
    )


def _collect_and_find_unread(call: LayerCall, x: Tensor, kv: KVStream) -> list[_Linear]:
    """Collect the first chunk x (B, C, D); its linear calls, unread where keys and values don't
    depend on them.

    Every one is on the graph, because x requires grad.
    """
    x = x.detach().requires_grad_()
    with torch.enable_grad(), _FirstChunk(kv) as first:
        call.collect(x, call.view(0, kv))
    assert kv.current is not None
    roots = [tensor.grad_fn for tensor in kv.current]
    kv.current = None
    if first.past_graph or any(root is None for root in roots):
        return []
    needed = _nodes_behind(roots)
    return [
        made._replace(unread=node is not None and node not in needed) for made, node in first.calls
    ]


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


class _Linear(NamedTuple):
    """A call of `F.linear` with this weight, and the form of its result."""

    weight: Tensor
    features: int
    dtype: torch.dtype
    unread: bool = False


class _FirstChunk(TorchFunctionMode):
    """Notes every call of `F.linear`; keeps no tensor but weights and what the graph keeps.

    past_graph: did values go where the graph doesn't show, before `kv` had keys and values?
    """

    def __init__(self, kv: KVStream) -> None:
        super().__init__()
        self._kv = kv
        self.calls: list[tuple[_Linear, Any]] = []  # with the autograd node of the result
        self.past_graph = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._kv.current is not None:
            return out
        if func is torch.nn.functional.linear:
            _, weight, _ = linear_arguments(*args, **kwargs)
            self.calls.append((_Linear(weight, out.shape[-1], out.dtype), out.grad_fn))
        if not self.past_graph and any(t.requires_grad for t in tensors((args, kwargs))):
            recorded = torch.is_grad_enabled() and all(t.requires_grad for t in tensors(out))
            stored = recorded and out is None  # as `buffer[:] = x`: the buffer is on the graph
            self.past_graph = not recorded or (leaves_tensors(func, out) and not stored)
        return out


class _LinearCalls(TorchFunctionMode):
    """Zeros of the right form in place of the unread ones among the expected calls of `F.linear`.

    as_expected: false if what was left out, or what came after, was not called as expected.
    """

    def __init__(self, expected: list[_Linear]) -> None:
        super().__init__()
        self._expected = expected
        self._calls = 0
        self._as_expected = True

    @property
    def as_expected(self) -> bool:
        return not self._expected or (self._as_expected and self._calls == len(self._expected))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and self._expected:
            x, weight, _ = linear_arguments(*args, **kwargs)
            number, self._calls = self._calls, self._calls + 1
            if number >= len(self._expected) or self._expected[number].weight is not weight:
                self._as_expected = False
            elif self._expected[number].unread:
                _, features, dtype, _ = self._expected[number]
                return x.new_zeros(*x.shape[:-1], features, dtype=dtype)
        return func(*args, **kwargs)
