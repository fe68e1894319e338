"""Where a Hugging Face model keeps what streaming needs, and which models are refused."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from streambp.layer import cache_argument, original_forward

Tensor = torch.Tensor

_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f")
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(kw_only=True)
class Structure:
    """The parts of a model. `causal`, `head` and `norm` are `None` where the model has none.

    causal: the model with the head; base: the stack of decoder layers; norm: the final norm.
    """

    causal: PreTrainedModel | None
    base: PreTrainedModel
    layers: list[torch.nn.Module]
    norm: torch.nn.Module | None
    head: torch.nn.Module | None

    def patched(self) -> list[tuple[torch.nn.Module, str]]:
        """The modules whose forward streaming replaces, with their role."""
        parts: list[tuple[torch.nn.Module | None, str]] = [(self.causal, "causal")]
        parts += [(self.base, "base"), (self.norm, "norm"), (self.head, "head")]
        parts += [(layer, "layer") for layer in dict.fromkeys(self.layers)]  # one may serve twice
        return [(module, role) for module, role in parts if module is not None]


def find(model: torch.nn.Module) -> Structure:
    """Take a model apart. Raises `ValueError` naming why a model can't be streamed exactly."""
    model = _unwrap(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is not a Hugging Face model (PreTrainedModel).")
    base = getattr(model, model.base_model_prefix, model)
    names = [name for name in _LAYERS if isinstance(getattr(base, name, None), torch.nn.ModuleList)]
    if not names or not isinstance(base, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} has no list of decoder layers to stream.")
    head = model.get_output_embeddings() if base is not model else None
    structure = Structure(
        causal=model if head is not None else None,
        base=base,
        layers=list(getattr(base, names[0])),
        norm=final_norm(base) if head is not None else None,
        head=head,
    )
    _refuse_inexact(structure)
    _refuse_foreign_forwards(structure)
    if structure.causal is not None:
        _check_head(structure)
    return structure


def final_norm(base: torch.nn.Module) -> torch.nn.Module | None:
    """The norm after the last decoder layer, under the names models give it."""
    for name in _NORMS:
        module = getattr(base, name, None)
        if isinstance(module, torch.nn.Module):
            return module
    return None


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model inside PEFT's wrapper, or the model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def _refuse_inexact(structure: Structure) -> None:
    base, config = structure.base, structure.base.config
    name = type(structure.causal or base).__name__

    def refuse(reason: str) -> None:
        raise ValueError(f"{name} can't be streamed exactly: {reason}.")

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    if not getattr(base, "_supports_attention_backend", False):
        refuse("its attention does not go through transformers' AttentionInterface")
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    if bidirectional or not getattr(config, "is_causal", True):
        refuse("its attention is bidirectional")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if other:
        refuse(f"it has layers of type {', '.join(other)}; known are {', '.join(_LAYER_TYPES)}")
    if getattr(config, "output_router_logits", False):
        refuse("its router's auxiliary loss would be lost (config.output_router_logits=True)")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("layers share keys and values")
    for layer in structure.layers:
        if any(getattr(module, "is_causal", True) is False for module in layer.modules()):
            refuse("its attention is bidirectional")
        if any(hasattr(module, "sinks") for module in layer.modules()):
            refuse("its attention has sinks")
        cache_argument(layer)


def _refuse_foreign_forwards(structure: Structure) -> None:
    for module, _ in structure.patched():
        forward = module.__dict__.get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not module:
            raise ValueError(
                f"the forward of {type(module).__name__} was replaced by something else (device "
                "hooks or a wrapper). Call streambp.enable first."
            )


def logit_factor(causal: PreTrainedModel) -> float:
    """What the model multiplies its logits by (Cohere, Granite)."""
    config = causal.config
    scale = getattr(causal, "logit_scale", None) or getattr(config, "logit_scale", None) or 1.0
    return float(scale) / float(getattr(config, "logits_scaling", None) or 1.0)


def logit_softcap(causal: PreTrainedModel) -> float | None:
    """The model's cap on its logits (Gemma)."""
    return getattr(causal.config, "final_logit_softcapping", None)


def plain_logits(causal: PreTrainedModel) -> bool:
    """True where the head's output is the logits, with nothing done to it."""
    return logit_factor(causal) == 1.0 and logit_softcap(causal) is None


def finish_logits(causal: PreTrainedModel, logits: Tensor) -> Tensor:
    """Everything the model does to its head's output before the loss."""
    factor, softcap = logit_factor(causal), logit_softcap(causal)
    if factor != 1.0:
        logits = logits * factor
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


class _AnyOutput(BaseModelOutputWithPast):
    """Hidden states, and `None` for whatever else a model expects of its base."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _FixedHidden(torch.nn.Module):
    """Stands in for the base model and returns given hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        return _AnyOutput(last_hidden_state=self.hidden)


def _check_head(structure: Structure) -> None:
    """Compare the model's logits with ours on one random token: an unknown step is refused.

    Skipped where the weights hold no values (meta, simulated or sharded parameters).
    """
    causal, head = structure.causal, structure.head
    assert causal is not None and head is not None
    weight = getattr(head, "weight", None)
    if weight is None or weight.ndim != 2 or weight.is_meta or isinstance(weight, FakeTensor):
        return
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 1, weight.shape[1], generator=generator).to(weight)
    if not hidden.is_floating_point():
        return
    prefix = causal.base_model_prefix
    base = causal._modules[prefix]
    with torch.no_grad():
        ours = finish_logits(causal, original_forward(head)(head, hidden))
        causal._modules[prefix] = _FixedHidden(hidden)
        try:
            ids = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
            theirs = original_forward(causal)(causal, input_ids=ids, use_cache=False).logits
        finally:
            causal._modules[prefix] = base
    same = ours.shape == theirs.shape
    if not same or not torch.allclose(ours, theirs.to(ours), rtol=1e-3, atol=1e-5):
        raise ValueError(
            f"{type(causal).__name__} can't be streamed exactly: it changes its logits after the "
            "head in a way streambp does not know."
        )


def signature(module: torch.nn.Module) -> inspect.Signature:
    """The signature of the module's own forward, `self` included."""
    return inspect.signature(original_forward(module))


def bound_arguments(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of a call by name, whether it was passed by position or keyword."""
    bound = signature(module).bind(module, *args, **kwargs)
    named = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
    named.pop("self", None)
    return named
