"""A decoder layer's forward and backward pass, one chunk of the sequence at a time.

B batch, T sequence, C chunk, D hidden, K key/value heads, E head dim.

The layer's own `forward` is the chunk program: run on a chunk with a KV cache it does what every
model does when it prefills a prompt in pieces. Source: arXiv 2506.03077 section 3, reorganised as
an ordinary autograd function per layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from streambp import attention, replay
from streambp.attention import ChunkView, KeptAttention
from streambp.buffers import own, reusable
from streambp.chunks import Chunk
from streambp.collect import collect_keys, watched
from streambp.gradients import (
    GradientSums,
    LinearCalls,
    SummedLinears,
    detached_parameters,
    resident_gradients,
)
from streambp.kv import KeysCollected, KVStream
from streambp.labels import label
from streambp.masks import ChunkMask

Tensor = torch.Tensor

ORIGINAL = "_streambp_original"  # where a forward that somebody set on an instance is kept


@dataclass(kw_only=True)
class LayerCall:
    """One call of a decoder layer, to be run chunk by chunk.

    kwargs: the layer's own keyword arguments, whole sequence; mask: `None` is plain causal.
    configs: the configurations whose attention implementation the layer's modules read.
    """

    layer: torch.nn.Module
    kwargs: dict[str, Any]
    mask: ChunkMask | None
    chunks: tuple[Chunk, ...]
    configs: list[Any]
    keep_kv: bool
    keep_attention: bool
    split_sums: bool

    def __post_init__(self) -> None:
        self.blocks = attention.plan(self.mask, self.chunks)
        self.length = self.chunks[-1].end
        self.tuple_length: int | None = None  # of the layer's output; None: a bare tensor

    def view(self, index: int, kv: KVStream) -> ChunkView:
        """What attention needs to know about chunk `index`."""
        return ChunkView(kv=kv, chunk=self.chunks[index], blocks=self.blocks[index], mask=self.mask)

    def run(self, x: Tensor, view: ChunkView) -> Tensor:
        """The layer's output (B, C, D) for the chunk's input x (B, C, D)."""
        kwargs = {k: _slice(k, v, view.chunk, self.length) for k, v in self.kwargs.items()}
        kwargs[cache_argument(self.layer)] = view.kv
        view.kv.begin(view.chunk)
        out = original_forward(self.layer)(self.layer, x, attention_mask=view, **kwargs)
        if view.kv.updates == 0:
            raise ValueError(
                f"streambp: {type(self.layer).__name__} does not use its KV cache; "
                "it can't be streamed exactly."
            )
        if isinstance(out, tuple):
            self.tuple_length = len(out)
            return first_output(out, self.layer)
        return out

    def collect(self, x: Tensor, view: ChunkView) -> None:
        """Store the chunk's keys and values without running attention and MLP."""
        try:
            self.run(x, view)
        except KeysCollected:
            return

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Attention through `streambp.attention`, and no checkpointing inside the layer.

        A layer with `gradient_checkpointing` set drops its cache without a word, and with it the
        gradients that flow through earlier chunks.
        """
        layer: Any = self.layer
        flag = getattr(layer, "gradient_checkpointing", False)
        with attention_implementation(self.configs, attention.NAME):
            if flag:
                layer.gradient_checkpointing = False
            try:
                yield
            finally:
                if flag:
                    layer.gradient_checkpointing = flag


def original_forward(module: torch.nn.Module) -> Any:
    """The function behind `module.forward` without streaming, unbound."""
    return module.__dict__.get(ORIGINAL, type(module).forward)


@contextmanager
def attention_implementation(configs: list[Any], name: str) -> Iterator[None]:
    """Let the modules that read `configs` use the attention function `name` inside the block."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config._attn_implementation_internal = value


def cache_argument(layer: torch.nn.Module) -> str:
    """The name of the layer's KV cache argument: it changed in transformers 5.24."""
    parameters = inspect.signature(type(layer).forward).parameters
    for name in ("cache", "past_key_values", "past_key_value"):
        if name in parameters:
            return name
    raise ValueError(f"streambp: {type(layer).__name__}.forward takes no KV cache.")


def first_output(out: tuple[Any, ...], layer: torch.nn.Module) -> Tensor:
    """The hidden states in a layer's output; anything beside them would be lost."""
    if any(item is not None for item in out[1:]):
        raise ValueError(
            f"streambp: {type(layer).__name__} returns more than hidden states (attention "
            "weights or router logits); it can't be streamed exactly."
        )
    return out[0]


def _slice(name: str, value: Any, chunk: Chunk, length: int) -> Any:
    """A chunk's part of one keyword argument of the layer."""
    if name.startswith("position_embeddings"):
        if isinstance(value, tuple):
            return tuple(t[..., chunk.start : chunk.end, :] for t in value)
        return value[..., chunk.start : chunk.end, :]
    if name in ("position_ids", "cache_position"):
        return None if value is None else value[..., chunk.start : chunk.end]
    if isinstance(value, torch.Tensor) and length > 1 and length in value.shape:
        raise ValueError(
            f"streambp: don't know how to cut the layer argument {name} of shape "
            f"{tuple(value.shape)} into chunks."
        )
    return value


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse layer arguments that would need gradients of their own."""
    for name, value in kwargs.items():
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                raise ValueError(f"streambp: the layer argument {name} requires grad.")


class StreamedLayer(torch.autograd.Function):
    """`layer(x)` that keeps x alone and computes everything else again, chunk by chunk.

    Equivalent to `layer(x, attention_mask=causal)`. x: (B, T, D). `params` are the layer's
    trainable parameters, explicit so that each receives its whole gradient once.

    Saved: x, O(B T D), and by request K and V or the attention output. Recomputed: the rest.
    Working memory of the backward pass: K, V and their gradients for one layer, O(B T K E), one
    chunk's activations, one layer's weight gradients.
    """

    @staticmethod
    def forward(ctx: Any, call: LayerCall, x: Tensor, *params: Tensor) -> Tensor:
        kv = KVStream(call.length)
        random = replay.RandomStates(x)
        out: Tensor | None = None
        kept = KeptAttention(call.length) if call.keep_attention else None
        with call.streaming():
            for index, chunk in enumerate(call.chunks):
                random.before_chunk()
                view = call.view(index, kv)
                view.kept = kept
                part = _guessing(call, x[:, chunk.start : chunk.end], view, params)
                if len(call.chunks) == 1:
                    out = part
                    break
                if out is None:
                    out = part.new_empty(part.shape[0], call.length, part.shape[2])
                out[:, chunk.start : chunk.end] = part
        assert out is not None
        keys = (kv.keys, kv.values) if call.keep_kv else (None, None)
        attended = (None, None) if kept is None else (kept.out, kept.lse)
        ctx.save_for_backward(label(x, "saved_inputs"), *keys, *attended)
        ctx.call, ctx.params = call, params
        ctx.versions = [param._version for param in params]
        ctx.random = random.finish()
        ctx.autocast = replay.autocast_state(x.device.type)
        return own(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, keys, values, *attended = ctx.saved_tensors
        call: LayerCall = ctx.call
        if [param._version for param in ctx.params] != ctx.versions:
            raise RuntimeError(
                f"streambp: a parameter of {type(call.layer).__name__} was changed in place "
                "between forward and backward; the gradients would be those of another model."
            )
        kept = KeptAttention(call.length, *attended)
        kv = KVStream(call.length)
        kv.keys, kv.values = keys, values
        need_x = ctx.needs_input_grad[1]
        dx = None
        if need_x:
            # Chunks are read from the end and written once read: one buffer serves both.
            dx = grad if reusable(grad) else torch.empty_like(x)
            label(dx, "hidden_grads")
        with ExitStack() as stack:
            stack.enter_context(call.streaming())
            random: replay.RandomStates | None = ctx.random
            stack.enter_context(random.fork() if random is not None else nullcontext())
            leaves = stack.enter_context(detached_parameters([call.layer], ctx.params))
            resident = resident_gradients(ctx.params) if call.split_sums else ()
            sums = GradientSums(leaves, len(call.chunks), resident)
            stored = kv.keys is not None
            if not stored:
                with replay.autocast(ctx.autocast):
                    collect_keys(call, x, kv, random)
            last = len(call.chunks) - 1
            for index in reversed(range(last + 1)):
                # The last chunk runs first and brings its own keys: they need no collecting.
                kv.mode = "write" if index == last and not stored else "read"
                view = call.view(index, kv)
                view.kept = kept
                chunk_x = x[:, view.span].detach().requires_grad_(need_x)
                with torch.enable_grad(), replay.autocast(ctx.autocast):
                    out = _run_again(call, chunk_x, view, sums, random, index)
                if index == last:
                    kv.start_gradients(len(call.chunks))
                inputs = [chunk_x, *leaves] if need_x else leaves
                grads = torch.autograd.grad(out, inputs, grad[:, view.span], allow_unused=True)
                del out
                if dx is not None:
                    dx[:, view.span] = grads[0]
                sums.add_all(grads[1:] if need_x else grads)
            weight_grads = sums.take()
        return None, None if dx is None else own(dx), *weight_grads


def _run_again(
    call: LayerCall,
    x: Tensor,
    view: ChunkView,
    sums: GradientSums,
    random: replay.RandomStates | None,
    index: int,
) -> Tensor:
    """The chunk's output with its graph, its values only where the graph needs them.

    Most layers end in `residual + linear(x)`, whose value no gradient depends on. Which linear
    call that is, is a guess from the last chunk of such a layer, or from its first forward pass;
    the graph then tells whether it holds, and if it does not the chunk runs in full.
    """
    kind = (type(call.layer), len(sums))
    guess = None if watched(call.layer) else _unread_linear.get(kind)
    for unread in (guess, None):
        if random is not None:
            random.restore(index)
        with SummedLinears(sums, unread) as linears:
            out = call.run(x, view)
        _unread_linear[kind] = linears.adds_last(out)
        if not linears.skipped or unread == _unread_linear[kind]:
            break
    return out


#: By kind of layer and number of its trainable parameters.
_unread_linear: dict[tuple[type, int], int | None] = {}


def _guessing(call: LayerCall, x: Tensor, view: ChunkView, params: Sequence[Tensor]) -> Tensor:
    """`call.run`, which for the first chunk of a kind of layer makes the first guess."""
    kind = (type(call.layer), len(params))
    if kind in _unread_linear:
        return call.run(x, view)
    with LinearCalls(params) as calls:
        out = call.run(x, view)
    _unread_linear[kind] = calls.count - 1 if calls.last_makes(out) else None
    return out
