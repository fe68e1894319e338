"""Tiny random models of many families, and the comparison with plain autograd in float64.

B batch, T sequence, C chunk.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from transformers import PreTrainedModel

import streambp

RELATIVE = 1e-10
VOCABULARY = 31

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
}
_WINDOW_EVERY_OTHER = ["sliding_attention", "full_attention"]
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "output_router_logits": False,
    "experts_implementation": "eager",  # the grouped product knows no float64
}

#: Family -> (prefix of its transformers classes, what its tiny configuration sets itself).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "gemma3": ("Gemma3Text", {"sliding_window": 5, "layer_types": _WINDOW_EVERY_OTHER,
                              "query_pre_attn_scalar": 4}),
    "gemma2": ("Gemma2", {"sliding_window": 5, "layer_types": _WINDOW_EVERY_OTHER,
                          "query_pre_attn_scalar": 4, "attn_logit_softcapping": 3.0,
                          "final_logit_softcapping": 5.0, "attn_implementation": "eager"}),
    "phi3": ("Phi3", {"head_dim": None}),
    "olmo2": ("Olmo2", {"head_dim": None}),
    "qwen3_moe": ("Qwen3Moe", _MOE),
}  # fmt: skip


def config_of(family: str, **overrides: Any) -> Any:
    """A tiny configuration; an override that is `None` leaves the field out."""
    prefix, own = FAMILIES[family]
    fields = {**_SMALL, **own, **overrides}
    fields = {name: value for name, value in fields.items() if value is not None}
    return getattr(transformers, prefix + "Config")(**fields)


def build(
    family: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any
) -> PreTrainedModel:
    """A tiny causal language model whose every parameter is random (norms and biases too)."""
    prefix = FAMILIES[family][0].removesuffix("Text")
    cls = getattr(transformers, prefix + "ForCausalLM")
    if overrides.pop("config", None) is not None:
        raise TypeError("pass fields")
    return randomised(cls(config_of(family, **overrides)), seed, dtype)


def randomised(model: Any, seed: int, dtype: torch.dtype) -> Any:
    """Weights large enough for sharp attention; rotary frequencies stay fp32 as in training."""
    generator = torch.Generator().manual_seed(seed)
    cast(model, dtype)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if p.ndim == 1:
                p.copy_(p.double() + 0.2 * noise)
            else:
                p.copy_(noise * 1.3 / p.shape[-1] ** 0.5)
    return model.train()


def cast(model: Any, dtype: torch.dtype) -> Any:
    """`model.to(dtype)` apart from the rotary frequencies; also inside `in_double`."""
    model.to(dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and "inv_freq" in name:
                module._buffers[name] = buffer.type(torch.float32)
    return model


def batch_of(
    batch_size: int = 2,
    length: int = 13,
    *,
    seed: int = 1,
    padding: str = "none",
    ignored: float = 0.0,
    mask_pads: bool = True,
) -> dict[str, torch.Tensor]:
    """Random tokens; with `padding` 'left' or 'right', rows of different real lengths and a mask.

    ignored: share of the labels that are -100. mask_pads: padded positions' labels are -100.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch_size, length), generator=generator)
    labels = ids.clone()
    if ignored:
        labels[torch.rand(labels.shape, generator=generator) < ignored] = -100
    batch = {"input_ids": ids, "labels": labels}
    if padding != "none":
        mask = torch.ones_like(ids)
        for row in range(batch_size):
            pads = (
                int(torch.randint(0, length, (), generator=generator)) if row or length > 1 else 0
            )
            where = slice(0, pads) if padding == "left" else slice(length - pads, length)
            mask[row, where] = 0
        ids[mask == 0] = 0
        if mask_pads:
            labels[mask == 0] = -100
        batch["attention_mask"] = mask
    return batch


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Within it, nothing rounds a float64 tensor to fp32.

    transformers' norms, softmaxes, routers and loss compute in fp32 whatever they are given: with
    them a reference is no better than 1e-7. Models under comparison both run in here.
    """
    to, as_float, softmax = torch.Tensor.to, torch.Tensor.float, F.softmax

    def keeps(x: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return x.dtype == torch.float64 and torch.float32 in (*args, kwargs.get("dtype"))

    def patched_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtypes = [a for a in args if isinstance(a, torch.dtype)]
        return self if keeps(self, *dtypes, **kwargs) else to(self, *args, **kwargs)

    def patched_float(self: torch.Tensor) -> torch.Tensor:
        return self if self.dtype == torch.float64 else as_float(self)

    def patched_softmax(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if keeps(x, **kwargs):
            kwargs["dtype"] = torch.float64
        return softmax(x, *args, **kwargs)

    with (
        mock.patch.object(torch.Tensor, "to", patched_to),
        mock.patch.object(torch.Tensor, "float", patched_float),
        mock.patch.object(F, "softmax", patched_softmax),
    ):
        yield


Gradients = dict[str, torch.Tensor]


def gradients(model: Any) -> Gradients:
    """Every trainable parameter's gradient, each asserted present."""
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, f"no gradient for {name}"
            found[name] = p.grad
        else:
            assert p.grad is None, f"a gradient for the frozen {name}"
    return found


def assert_close(found: Gradients, wanted: Gradients, relative: float = RELATIVE) -> None:
    """Per parameter, in norm. Gradients that are zero but for rounding count against the total."""
    assert found.keys() == wanted.keys()
    total = torch.stack([g.double().norm() for g in wanted.values()]).norm()
    for name, want in wanted.items():
        error = (found[name].double() - want.double()).norm()
        scale = torch.maximum(want.double().norm(), 1e-4 * total)
        assert torch.isfinite(found[name]).all(), name
        assert error <= relative * scale, f"{name}: {error / scale:.2e} relative"


def hf_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """transformers' own loss: float64 logits and cross-entropy inside `in_double`."""
    return model(**batch).loss


def double_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Cross-entropy in float64 from the logits, written out."""
    batch = dict(batch)
    labels = batch.pop("labels")
    num_items = batch.pop("num_items_in_batch", None)
    targets = batch.pop("shift_labels", None)
    if targets is None:
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    logits = model(**batch).logits.double()
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (num_items if num_items is not None else (targets != -100).sum().clamp(min=1))


def compare(
    model: Any,
    batch: dict[str, Any],
    *,
    upstream: float = 1.0,
    relative: float = RELATIVE,
    inputs: tuple[str, ...] = (),
    enable: Callable[..., Any] = streambp.enable,
    **options: Any,
) -> tuple[Any, torch.Tensor]:
    """Assert that the streamed loss and gradients of `model` equal those of a plain copy.

    inputs: names in `batch` whose gradients are compared too. Returns model and streamed loss.
    """
    plain = copy.deepcopy(model)
    batches = [
        {k: v.detach().clone().requires_grad_() if k in inputs else v for k, v in batch.items()}
        for _ in range(2)
    ]
    with in_double():
        wanted = double_loss(plain, batches[0])
        (wanted * upstream).backward()
        enable(model, **options)
        found = model(**batches[1]).loss
        (found * upstream).backward()
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=relative, atol=1e-12)
    assert_close(gradients(model), gradients(plain), relative)
    for name in inputs:
        have, want = batches[1][name].grad, batches[0][name].grad
        assert have is not None, f"no gradient for {name}"
        assert_close({name: have}, {name: want}, relative)
    return model, found
