"""Weight gradients summed over chunks, and linear layers that add straight into the sum.

N tokens of a chunk, I input features, O output features.

Sums of 16-bit gradients over several chunks are kept in fp32: a bf16 running sum stops growing once
its steps fall below half a unit in the last place, and its error grows with the number of chunks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from streambp import kernels
from streambp.labels import label
from streambp.split_sum import SplitSum, can_split
from streambp.values import leaves_tensors, tensors

Tensor = torch.Tensor


class GradientSums:
    """Running gradient sums of the given leaves, fp32 for 16-bit ones if `num_chunks > 1`.

    Holds at most one buffer per leaf, so O(parameters of one layer) memory, taken on first use.

    resident: by leaf, a gradient that its sum may be added to in place, or `None`. Several chunks
    of a bf16 matrix are summed there, as `SplitSum`; an exception in between leaves part of them.
    """

    def __init__(
        self, leaves: Sequence[Tensor], num_chunks: int, resident: Sequence[Tensor | None] = ()
    ) -> None:
        self._leaves = list(leaves)
        self._index = {id(leaf): i for i, leaf in enumerate(self._leaves)}
        self._sums: list[Tensor | SplitSum | None] = [None] * len(self._leaves)
        self._several = num_chunks > 1
        for i, grad in enumerate(resident):
            if self._several and grad is not None and can_split(grad):
                self._sums[i] = SplitSum(grad)

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, leaf: object) -> bool:
        return id(leaf) in self._index

    def _dtype(self, leaf: Tensor) -> torch.dtype:
        return torch.float32 if self._several and leaf.dtype.itemsize < 4 else leaf.dtype

    def add(self, leaf: Tensor, grad: Tensor, *, fresh: bool = False) -> None:
        """`sum += grad`. A `fresh` gradient, which nothing else refers to, may become the sum."""
        i = self._index[id(leaf)]
        total = self._sums[i]
        if isinstance(total, SplitSum):
            total.update(lambda wide, rows: wide.add_(grad[rows]))
        elif total is None:
            start = grad.to(self._dtype(leaf), copy=not fresh)
            self._sums[i] = label(start, "weight_grad_buffers")
        else:
            total.add_(grad)

    def add_all(self, grads: Sequence[Tensor | None]) -> None:
        """`add` one gradient per leaf, in the leaves' order; `None` adds nothing."""
        for leaf, grad in zip(self._leaves, grads, strict=True):
            if grad is not None:
                self.add(leaf, grad)

    def add_product(self, leaf: Tensor, grad: Tensor, x: Tensor) -> None:
        """`sum += grad^T @ x` for grad (N, O), x (N, I), without a product of its own if it can."""
        i = self._index[id(leaf)]
        total = self._sums[i]
        if isinstance(total, SplitSum):
            total.update(lambda wide, rows: product(grad[:, rows], x, wide))
        elif self._dtype(leaf) != torch.promote_types(grad.dtype, torch.float32):
            self.add(leaf, grad.t() @ x, fresh=True)  # one chunk: the sum stays 16-bit
        elif total is None:
            self._sums[i] = label(product(grad, x), "weight_grad_buffers")
        else:
            product(grad, x, total)

    def take(self) -> list[Tensor | None]:
        """Every leaf's gradient in the leaf's dtype, `None` where nothing is left to deliver.

        Hands each sum over and forgets it, so that no more than one is held twice at a time.
        """
        grads: list[Tensor | None] = [None] * len(self._leaves)
        # The smallest first: a sum and its copy are held together until the next one is taken.
        for i in sorted(range(len(grads)), key=lambda i: self._leaves[i].numel()):
            total, self._sums[i] = self._sums[i], None
            if isinstance(total, SplitSum):
                total.finish()
            elif total is not None:
                grads[i] = total.to(self._leaves[i].dtype)
        return grads


def _has_wide_addmm(tensor: Tensor) -> bool:
    """Can the tensor's device add a product of 16-bit matrices into an fp32 one?"""
    if tensor.device.type == "cuda":
        return _try_wide_addmm(tensor.device)
    return kernels.device_type_of(tensor) == "cuda"  # simulated


@functools.cache
def _try_wide_addmm(device: torch.device) -> bool:
    total = torch.zeros(16, 16, device=device)
    ones = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # no kernel, or no such argument
        return False
    return bool((total == 16).all())


def product(grad: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
    """`total + grad^T @ x` for grad (N, O), x (N, I); fp32 for 16-bit ones, in place if it can."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    if dtype != grad.dtype and not _has_wide_addmm(grad):
        fresh = (grad.t() @ x).to(dtype)
        return fresh if total is None else total.add_(fresh)
    if total is None:
        return (
            torch.mm(grad.t(), x) if dtype == grad.dtype else torch.mm(grad.t(), x, out_dtype=dtype)
        )
    if dtype == grad.dtype:
        return total.addmm_(grad.t(), x)
    return torch.addmm(total, grad.t(), x, out_dtype=dtype, out=total)


def adds_in_place(param: Tensor) -> bool:
    """Inside a backward pass: may it add to `param.grad` itself and deliver nothing?

    Only if there is a gradient to add to, this pass would add to it, and nobody is to be told:
    no hook on the parameter and no process group, whose hooks can't be seen from here.
    """
    grad = param.grad
    if not param.is_leaf or grad is None or grad.is_sparse or grad.dtype != param.dtype:
        return False
    if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad asks for the parameter's gradient
        return False


def resident_gradients(params: Sequence[Tensor]) -> list[Tensor | None]:
    """Inside a backward pass: each parameter's gradient if it may be added to in place."""
    return [param.grad if adds_in_place(param) else None for param in params]


class _Linear(torch.autograd.Function):
    """`F.linear(x, weight, bias)` whose parameter gradients go into `sums`, not to autograd.

    unread: nobody reads the values, only the graph counts; zeros take their place.
    by_columns: memory for a result laid out by columns, taken if it is large enough, or `None`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sums: GradientSums,
        unread: bool,
        by_columns: torch.UntypedStorage | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leaves, ctx.sums = (weight, bias), sums
        if unread:
            return x.new_zeros(1).expand(*x.shape[:-1], weight.shape[0])
        if by_columns is not None and bias is None and x.ndim == 2:
            size = (x.shape[0], weight.shape[0])
            if by_columns.nbytes() < size[0] * size[1] * x.dtype.itemsize:
                by_columns = x.new_empty(size).untyped_storage()
            # Not a view: autograd must not tie the result to what was here before.
            out = x.new_empty(0).set_(by_columns, 0, size, (1, size[0]))
            return torch.mm(x, weight.t(), out=out)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight_leaf, bias_leaf = ctx.leaves
        rows = grad.reshape(-1, grad.shape[-1])
        if weight_leaf in ctx.sums:
            ctx.sums.add_product(weight_leaf, rows, x.reshape(-1, x.shape[-1]))
        if bias_leaf in ctx.sums:
            ctx.sums.add(bias_leaf, rows.sum(0), fresh=True)
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


class SummedLinears(TorchFunctionMode):
    """While active, `F.linear` with a leaf of `sums` as weight adds its gradient into `sums`.

    Saves a fresh (O, I) tensor and a pass over it per chunk. Under autocast, and for tensor
    subclasses, linear layers are left to autograd.

    unread: number of the call (from 0) whose product is not computed, because only the graph
    behind its output is wanted. `adds_last` tells, once the layer ran, whether that was right.
    by_columns: lay results (N, O) of calls without bias out by columns, stride (1, N), in this
    memory nobody needs any more, if it is large enough. A CPU's product of a wide layer (O much
    larger than N) is up to a fifth faster that way.
    """

    def __init__(
        self,
        sums: GradientSums,
        unread: int | None = None,
        by_columns: torch.UntypedStorage | None = None,
    ) -> None:
        super().__init__()
        self._sums = sums
        self._unread = unread
        self._by_columns = by_columns
        self._calls = 0
        self.skipped = False
        self._last: Tensor | None = None
        self._made_with_last: Callable[[], Any] | None = None  # a weak reference
        self._last_is_read = False

    def adds_last(self, out: Tensor) -> int | None:
        """The number of the last call if `out` is its result plus something, and nothing else
        used the result or looked at the sum; `None` otherwise."""
        if self._last is None or out.grad_fn is None or out.grad_fn.name() != "AddBackward0":
            return None
        if self._last_is_read or self._made_with_last is None or self._made_with_last() is not out:
            return None
        last = self._last.grad_fn
        if not any(node is last for node, _ in out.grad_fn.next_functions):
            return None
        return self._calls - 1 if _uses(last, out.grad_fn) == 1 else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            x, weight, bias = linear_arguments(*args, **kwargs)
            if self._takes(x, weight, bias):
                unread = self._calls == self._unread
                self._calls += 1
                self.skipped |= unread
                self._last = _Linear.apply(x, weight, bias, self._sums, unread, self._by_columns)
                self._made_with_last, self._last_is_read = None, False
                return self._last
        out = func(*args, **kwargs)
        if self._last is not None:
            self._watch_last(func, args, kwargs, out)
        return out

    def _watch_last(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Follow the last result into the one tensor made of it; any other use is a reading."""
        last = self._last
        made = last if self._made_with_last is None else self._made_with_last()
        values = (*args, *kwargs.values()) if kwargs else args
        for value in values:  # called for every function of a layer: plain and quick
            if value is last or value is made:
                break
            if type(value) in (tuple, list) and any(v is last or v is made for v in value):
                break
        else:
            return
        if not (isinstance(out, Tensor) or tensors(out) or leaves_tensors(func, out)):
            return
        if self._made_with_last is None and isinstance(out, Tensor):
            self._made_with_last = weakref.ref(out)
        else:
            self._last_is_read = True

    def _takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        return (
            weight in self._sums
            and (bias is None or not bias.requires_grad or bias in self._sums)
            and x.dtype == weight.dtype
            and not torch.is_autocast_enabled(x.device.type)
        )


class LinearCalls(TorchFunctionMode):
    """Counts the calls of `F.linear` with one of `params` as weight.

    Keeps no tensor alive.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self._params = {id(param) for param in params}
        self.count = 0
        self._last: Callable[[], Any] = lambda: None
        self._made_with_last: Callable[[], Any] = lambda: None

    def last_makes(self, out: Tensor) -> bool:
        """Is `out` what the last function made that was given the last such call's result?"""
        return self._made_with_last() is out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.nn.functional.linear:
            _, weight, _ = linear_arguments(*args, **kwargs)
            if id(weight) in self._params:
                self.count += 1
                self._last = weakref.ref(result)
        elif isinstance(result, Tensor):
            last = self._last()
            if last is not None and any(argument is last for argument in args):
                self._made_with_last = weakref.ref(result)
        return result


def only_graph_matters(out: Tensor) -> bool:
    """True for the result of a summed linear layer: no gradient depends on its values."""
    return out.grad_fn is not None and out.grad_fn.name() == _Linear.__name__ + "Backward"


def _uses(wanted: Any, root: Any) -> int:
    """How often the outputs of node `wanted` are used in the graph behind node `root`."""
    found, seen, waiting = 0, {root}, [root]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            found += node is wanted
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return found


def linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments of a call of `F.linear`, however they were passed."""
    return input, weight, bias


@contextmanager
def detached_parameters(
    modules: Sequence[torch.nn.Module], params: Sequence[Tensor]
) -> Iterator[list[Tensor]]:
    """Within the block, `params` of `modules` are fresh leaves that share their storage.

    Yields the leaves in the order of `params`. A hook on a parameter then sees the whole gradient
    once, when the outer backward pass delivers it, and never a chunk's share.
    """
    leaves: dict[int, torch.nn.Parameter] = {}
    places: list[tuple[dict[str, Any], str, Any]] = []
    wanted = {id(p) for p in params}
    for module in _all_modules(modules):
        for name, param in module._parameters.items():
            if param is None or id(param) not in wanted:
                continue
            if id(param) not in leaves:
                leaves[id(param)] = torch.nn.Parameter(param.detach())
            places.append((module._parameters, name, param))
    if not wanted <= leaves.keys():
        raise ValueError(
            "streambp: a parameter was replaced between forward and backward (functional_call, or "
            "an assignment); it can't be streamed exactly."
        )
    for table, name, param in places:
        table[name] = leaves[id(param)]
    try:
        yield [leaves[id(p)] for p in params]
    finally:
        for table, name, param in places:
            table[name] = param


def _all_modules(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield module
