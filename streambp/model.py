"""Turning streaming on and off for one model instance.

B batch, T sequence, D hidden, V vocabulary.

`enable` replaces `forward` on the instance's modules by bound methods, so that hooks (DDP, FSDP,
PEFT) stay outside, a deep copy streams on its own, and no other instance is affected.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from streambp import attention, structure
from streambp.blocked_head import BlockedHeadCall
from streambp.buffers import owned_alone
from streambp.chunks import partition
from streambp.config import StreamConfig
from streambp.head import HeadCall
from streambp.layer import (
    ORIGINAL,
    LayerCall,
    StreamedLayer,
    attention_implementation,
    check_arguments,
    original_forward,
)
from streambp.loss import cross_entropy
from streambp.masks import ChunkMask, DenseMask
from streambp.structure import bound_arguments

Tensor = torch.Tensor
Model = TypeVar("Model", bound=torch.nn.Module)

STATE = "_streambp"
_CACHE_NAMES = ("cache", "past_key_values", "past_key_value")
_OUTPUT_REQUESTS = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass(kw_only=True)
class StreamState:
    """What the replaced forwards of one model share. Holds no module, so that copies are clean."""

    config: StreamConfig
    hf_configs: list[Any]
    active: bool = False  # inside a streamed forward of the base model
    fold_norm: bool = True  # leave the final norm to the head's chunks
    folding: bool = False
    norm_calls: int = 0  # of the final norm while `folding`
    padded: bool = False  # the caller gave a 2-D mask, so some mask must reach the layers
    unnormed: Tensor | None = None
    masks: dict[int, DenseMask] = field(default_factory=dict)

    def dense_mask(self, mask: Tensor) -> DenseMask:
        """One `DenseMask` per 4-D mask and forward pass: its values are looked at once."""
        return self.masks.setdefault(id(mask), DenseMask(mask))


def enable(model: Model, config: StreamConfig | None = None, **options: Any) -> Model:
    """Stream this model's backward pass: `model(input_ids, labels=...).loss.backward()`.

    config, or its fields as keyword arguments (`StreamConfig`). Enabling again changes the
    settings. Returns the model, which keeps its class, parameters and `state_dict`.

    While gradients are enabled and no KV cache is asked for, decoder layers run chunk by chunk and
    keep only their input, and a call with `labels` returns the loss without logits. Otherwise
    (`torch.no_grad`, `generate`, `use_cache=True`) the model's own code runs.

    Memory for activations and logits: O(T D) per layer for its input plus O(chunk_size).

    Raises `ValueError` for unknown options and for models that can't be streamed exactly, with the
    reason. Source: arXiv 2506.03077.
    """
    settings = _settings(config, options)
    disable(model)
    parts = structure.find(model)
    modules = [module for layer in parts.layers for module in layer.modules()]
    configs = {id(c): c for m in [parts.base, *modules] if _switchable(c := _config_of(m))}
    state = StreamState(
        config=settings, hf_configs=list(configs.values()), fold_norm=parts.norm is not None
    )
    for module, role in parts.patched():
        if "forward" in module.__dict__:
            setattr(module, ORIGINAL, module.__dict__["forward"].__func__)
        setattr(module, STATE, state)
        method = types.MethodType(_replacement(role, original_forward(module)), module)
        module.forward = method  # type: ignore[method-assign]
    return model


def disable(model: Model) -> Model:
    """Put the model's own forward back everywhere; does nothing if it was not streamed."""
    for module in model.modules():
        if STATE not in module.__dict__:
            continue
        original = module.__dict__.pop(ORIGINAL, None)
        module.__dict__.pop("forward", None)
        if original is not None:
            module.forward = types.MethodType(original, module)  # type: ignore[method-assign]
        delattr(module, STATE)
    return model


def _settings(config: StreamConfig | None, options: dict[str, Any]) -> StreamConfig:
    known = [f.name for f in fields(StreamConfig)]
    for name in options:
        if name not in known:
            raise ValueError(f"unknown option {name!r}: streambp.enable takes {', '.join(known)}.")
    if config is None:
        return StreamConfig(**options)
    if not isinstance(config, StreamConfig):
        raise ValueError(f"config={config!r}: pass a streambp.StreamConfig.")
    if options:
        raise ValueError("pass either a StreamConfig or its fields as keyword arguments, not both.")
    return config


def _config_of(module: torch.nn.Module) -> Any:
    return getattr(module, "config", None)


def _switchable(config: Any) -> bool:
    return hasattr(config, "_attn_implementation_internal")


@functools.cache
def _replacement(role: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The streamed forward for a role, with the name and signature of the original."""
    streamed = _FORWARDS[role]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return streamed(self, *args, **kwargs)

    return forward


# ---- the replaced forwards -------------------------------------------------------------------


def _causal_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    state: StreamState = self.__dict__[STATE]
    named = bound_arguments(self, args, kwargs)
    if not _streams(named) or named.get("labels") is None or _keeps_some(named):
        return original_forward(self)(self, *args, **kwargs)
    if getattr(self.loss_function, "__name__", "") != "ForCausalLMLoss":
        raise ValueError(
            f"{type(self).__name__} has a loss function of its own; streambp computes the loss of "
            "causal language models. Leave out `labels` and apply yours to the logits."
        )
    head = self.get_output_embeddings()
    if STATE not in head.__dict__:
        raise ValueError(
            "the head was replaced after streambp.enable (by an adapter on it, or by resizing the "
            "embeddings): call streambp.enable again."
        )
    shifted = _shifted_labels(named)
    return_dict = named.pop("return_dict", None)
    named.pop("logits_to_keep", None)
    _refuse_targets_of_blind_rows(self, named, shifted)
    if _padding_never_matters(named, shifted):
        named["attention_mask"] = None
    hidden, norm = _hidden_states(self, state, named)
    overwrite = owned_alone(hidden, sys.getrefcount(hidden)) and hidden.is_contiguous()
    call = HeadCall(
        program=functools.partial(_logits, self, norm, head),
        modules=[head] if norm is None else [norm, head],
        labels=shifted.to(hidden.device).flatten(),
        chunk_size=state.config.head_chunk,
        overwrite=overwrite,
    )
    blocked = _blocked(self, norm, head, call) if state.config.recompute_head else None
    num_items = named.get("num_items_in_batch")
    # Through __call__, so that the hooks of sharded training gather the head's weight.
    loss = head(hidden, streambp_loss=lambda h: cross_entropy(call, h, num_items, blocked))
    use_tuple = return_dict is False or not getattr(self.config, "return_dict", True)
    return (loss,) if use_tuple else CausalLMOutputWithPast(loss=loss)


def _base_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    state: StreamState = self.__dict__[STATE]
    named = bound_arguments(self, args, kwargs)
    if not _streams(named):
        return original_forward(self)(self, *args, **kwargs)
    for request in _OUTPUT_REQUESTS:
        if named.get(request) or (named.get(request) is None and getattr(self.config, request, 0)):
            raise ValueError(
                f"{request}=True: a streamed pass keeps neither attention weights nor inner "
                f"states. Call with {request}=False, or streambp.disable(model) first."
            )
    named["use_cache"] = False
    mask = named.get("attention_mask")
    state.padded = isinstance(mask, torch.Tensor) and mask.ndim == 2
    with _active(self, state):
        return original_forward(self)(self, **named)


def _layer_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    state: StreamState = self.__dict__[STATE]
    if not state.active or not torch.is_grad_enabled():
        return original_forward(self)(self, *args, **kwargs)
    named = bound_arguments(self, args, kwargs)
    x = named.pop("hidden_states")
    mask = _chunk_mask(state, named.pop("attention_mask", None))
    for name in _CACHE_NAMES:
        named.pop(name, None)
    check_arguments(named)
    params = [p for p in self.parameters() if p.requires_grad]
    _refuse_sharded(self, params)
    call = LayerCall(
        layer=self,
        kwargs=named,
        mask=mask,
        chunks=partition(x.shape[1], state.config.layer_chunk),
        configs=state.hf_configs,
        keep_kv=state.config.keep_kv,
        keep_attention=state.config.keep_attention,
        split_sums=state.config.split_sums,
    )
    out = StreamedLayer.apply(call, x, *params)
    return out if call.tuple_length is None else (out, *[None] * (call.tuple_length - 1))


def _norm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    state: StreamState = self.__dict__[STATE]
    if state.folding:
        state.norm_calls += 1
        state.unnormed = args[0] if args else kwargs["hidden_states"]
        return state.unnormed
    return original_forward(self)(self, *args, **kwargs)


def _head_forward(self: Any, *args: Any, streambp_loss: Any = None, **kwargs: Any) -> Any:
    if streambp_loss is None:
        return original_forward(self)(self, *args, **kwargs)
    return streambp_loss(args[0])


_FORWARDS = {
    "causal": _causal_forward,
    "base": _base_forward,
    "layer": _layer_forward,
    "norm": _norm_forward,
    "head": _head_forward,
}


# ---- their parts -----------------------------------------------------------------------------


def _streams(named: dict[str, Any]) -> bool:
    """Does this call stream? Only with gradients, and not if it reads or asks for a KV cache."""
    if not torch.is_grad_enabled() or named.get("use_cache"):
        return False
    return all(named.get(name) is None for name in _CACHE_NAMES)


def _keeps_some(named: dict[str, Any]) -> bool:
    keep = named.get("logits_to_keep", 0)
    return isinstance(keep, torch.Tensor) or bool(keep)


def _shifted_labels(named: dict[str, Any]) -> Tensor:
    """Each token's target (B, T), -100 where it has none. Takes the loss's arguments out.

    Raises `ValueError` unless there is one label per token.
    """
    labels, shifted = named.pop("labels"), named.pop("shift_labels", None)
    ignored = named.pop("ignore_index", -100)
    tokens, embedded = named.get("input_ids"), named.get("inputs_embeds")
    if tokens is not None:
        shape = tokens.shape
    else:  # without either the model has its own error
        shape = labels.shape if embedded is None else embedded.shape[:2]
    if shifted is None:
        if labels.shape != shape:
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} for {tuple(shape)} tokens: one per token."
            )
        shifted = torch.nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    elif shifted.numel() != shape.numel():
        raise ValueError(
            f"shift_labels of shape {tuple(shifted.shape)} for {tuple(shape)} tokens: "
            "one per token."
        )
    shifted = shifted.reshape(shape)
    return shifted if ignored == -100 else shifted.masked_fill(shifted == ignored, -100)


def _refuse_targets_of_blind_rows(causal: Any, named: dict[str, Any], shifted: Tensor) -> None:
    """Refuse a target of a token whose mask hides every key, where attention makes it see all.

    That happens to padding on the left, and only under masks that are added to the scores: a row of
    equal, hugely negative scores is a row of equal weights, of later tokens too.
    """
    mask = named.get("attention_mask")
    if not isinstance(mask, Tensor) or isinstance(mask, FakeTensor):
        return
    if mask.ndim == 4 and mask.is_floating_point():
        seen = (mask > torch.finfo(mask.dtype).min / 2).any(-1).any(1)  # (B or 1, T)
    elif mask.shape == shifted.shape and causal.config._attn_implementation == "eager":
        seen = mask.to(torch.bool).cummax(-1).values
    else:
        return
    if bool(((shifted != -100) & ~seen.to(shifted.device)).any()):
        raise ValueError(
            "attention_mask hides every key of a token that has a target (the first token after "
            "padding on the left is predicted by padding). Such a row attends to all tokens, later "
            "ones too, and can't be streamed exactly: give it the label -100"
            + (", or load the model with attn_implementation='sdpa'." if mask.ndim == 2 else ".")
        )


def _padding_never_matters(named: dict[str, Any], shifted: Tensor) -> bool:
    """True where padding is on the right and no padded token's output reaches the loss.

    Real tokens never see what comes after them, so such a mask changes nothing. With explicit
    position ids the mask stays: without it, transformers reads resets in them as packed rows.
    One transfer to the host.
    """
    mask = named.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return False
    if named.get("position_ids") is not None or mask.shape != shifted.shape:
        return False
    if isinstance(mask, FakeTensor):  # simulation: padding as training batches have it
        return True
    real = mask.to(device=shifted.device, dtype=torch.bool)
    on_the_right = (real[:, 1:] <= real[:, :-1]).all()
    unsupervised = ((shifted == -100) | real).all()
    return bool(on_the_right & unsupervised)


def _hidden_states(
    causal: Any, state: StreamState, named: dict[str, Any]
) -> tuple[Tensor, torch.nn.Module | None]:
    """The base model's output (B, T, D) and the final norm if the head's chunks are to apply it.

    The norm stays where it is if hooks watch it or the base model: they would see other states.
    """
    base = getattr(causal, causal.base_model_prefix)
    norm = structure.final_norm(base) if state.fold_norm else None
    if norm is not None and (_has_hooks(norm) or base._forward_hooks):
        norm = None
    state.folding, state.unnormed, state.norm_calls = norm is not None, None, 0
    try:
        outputs = base(**named)
        hidden = outputs[0]  # last_hidden_state, in a tuple too
        if state.folding and (hidden is not state.unnormed or state.norm_calls != 1):
            # Something follows the norm in this model, or the norm runs elsewhere in it too:
            # leave it where it is from now on.
            state.folding = state.fold_norm = False
            del outputs, hidden
            return _hidden_states(causal, state, named)
        return cast(Tensor, hidden), norm
    finally:
        state.folding, state.unnormed = False, None


def _has_hooks(module: torch.nn.Module) -> bool:
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(tables) or bool(module._backward_pre_hooks)


def _logits(causal: Any, norm: Any, head: Any, rows: Tensor) -> Tensor:
    """Logits (C, V) of hidden states (C, D), as the model computes them."""
    if norm is not None:
        rows = original_forward(norm)(norm, rows)
    return structure.finish_logits(causal, original_forward(head)(head, rows))


def _blocked(causal: Any, norm: Any, head: Any, call: HeadCall) -> BlockedHeadCall | None:
    """The call for `recompute_head`, if the head is a plain trainable matrix."""
    if type(head) is not torch.nn.Linear or head.bias is not None:
        return None
    if not head.weight.requires_grad or not structure.plain_logits(causal):
        return None
    return BlockedHeadCall(
        norm=None if norm is None else functools.partial(original_forward(norm), norm),
        norm_modules=[] if norm is None else [norm],
        weight=head.weight,
        labels=call.labels,
        chunk_size=call.chunk_size,
        overwrite=call.overwrite,
    )


@contextmanager
def _active(base: Any, state: StreamState) -> Iterator[None]:
    """Inside: layers stream, attention and masks are ours, no module checkpoints."""
    checkpointing = [m for m in base.modules() if getattr(m, "gradient_checkpointing", False)]
    with ExitStack() as stack:
        stack.enter_context(attention_implementation(state.hf_configs, attention.NAME))
        for module in checkpointing:
            module.gradient_checkpointing = False
            stack.callback(setattr, module, "gradient_checkpointing", True)
        state.active = True
        try:
            yield
        finally:
            state.active = False
            state.masks.clear()


def _chunk_mask(state: StreamState, mask: Any) -> ChunkMask | None:
    """The layer's mask as one that answers by block; `None` is plain causal."""
    if isinstance(mask, torch.Tensor):
        if mask.ndim != 4:
            raise ValueError(f"streambp: a layer got an attention mask of {mask.ndim} dimensions.")
        return state.dense_mask(mask)
    if mask is None and state.padded:
        raise ValueError("streambp: this model drops its padding mask under custom attention.")
    if mask is not None and not isinstance(mask, ChunkMask):
        raise ValueError(f"streambp: can't stream an attention mask of type {type(mask).__name__}.")
    return mask


def _refuse_sharded(layer: torch.nn.Module, params: list[torch.nn.Parameter]) -> None:
    for param in params:
        if hasattr(param, "device_mesh"):
            raise ValueError(
                f"a parameter of {type(layer).__name__} is still sharded when the layer runs: "
                "apply fully_shard to whole decoder layers, not to modules inside them."
            )
