"""Every decoder family at hand is streamed exactly, or refused by name: never anything between."""

import copy

import pytest
import torch
import transformers
from libtools import (
    VOCABULARY,
    assert_close,
    batch_of,
    double_loss,
    gradients,
    in_double,
    randomised,
)

import streambp

_LATENT = {
    "n_routed_experts": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 6, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 8,
    "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip

#: Class prefix -> fields beside the common ones. Those that must stream, and those that may.
MUST = {
    "Qwen3": {}, "Qwen2": {}, "Llama": {}, "Mistral": {"sliding_window": 6}, "Gemma": {},
    "Gemma2": {"sliding_window": 6}, "Gemma3": {"sliding_window": 6}, "Phi": {}, "Phi3": {},
    "Olmo": {}, "Olmo2": {}, "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2,
                                         "moe_intermediate_size": 12},
}  # fmt: skip
MAY = {
    "DeepseekV2": _LATENT, "DeepseekV3": _LATENT,
    "Cohere": {}, "Cohere2": {"sliding_window": 6}, "Granite": {"logits_scaling": 2.0}, "Glm": {},
    "Glm4": {}, "Starcoder2": {"sliding_window": 6}, "StableLm": {}, "SmolLM3": {}, "Helium": {},
    "Ministral": {"sliding_window": 6}, "Olmo3": {"sliding_window": 6}, "SeedOss": {},
    "Ernie4_5": {}, "Arcee": {}, "Nemotron": {}, "Persimmon": {}, "Exaone4": {}, "Apertus": {},
    "HunYuanDenseV1": {}, "Mixtral": {"num_local_experts": 4, "sliding_window": 6},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2}, "GraniteMoe": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4}, "GPT2": {}, "GPTNeoX": {}, "GPTJ": {}, "OPT": {},
    "Bloom": {}, "Falcon": {}, "Mpt": {}, "CodeGen": {}, "Llama4": {}, "Gemma3n": {},
    "Qwen3Next": {}, "Zamba2": {}, "Jamba": {}, "Mamba": {}, "FalconH1": {}, "Lfm2": {},
    "BitNet": {}, "DiffLlama": {}, "Bamba": {}, "XGLM": {}, "Dbrx": {}, "Jais2": {},
    "VaultGemma": {"sliding_window": 6}, "Doge": {}, "FlexOlmo": {}, "NanoChat": {},
}  # fmt: skip

#: SDPA leaves their soft-cap out without a word; streaming does not.
SOFT_CAPPED = ("Gemma2", "VaultGemma")

COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
    "experts_implementation": "eager", "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "ffn_dim": 20, "word_embed_proj_dim": 16, "hidden_dropout": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0, "residual_dropout": 0.0,
    "embedding_dropout": 0.0, "resid_dropout": 0.0, "head_dim": 4,
}  # fmt: skip


def make(prefix, fields):
    """A tiny random model, or `None` where this transformers has none that small settings fit."""
    cls = getattr(transformers, prefix + "ForCausalLM", None) or getattr(
        transformers, prefix + "LMHeadModel", None
    )
    if cls is None:
        return None
    try:
        config = cls.config_class(**{**COMMON, **fields})
        config._attn_implementation = "eager" if prefix in SOFT_CAPPED else "sdpa"
        if sum(p.numel() for p in _on_meta(cls, config).parameters()) > 500_000:
            return None
        return randomised(cls(config), 0, torch.float64)
    except Exception:  # whatever a family's configuration says to these fields
        return None


def _on_meta(cls, config):
    with torch.device("meta"):
        return cls(copy.deepcopy(config))


@pytest.mark.parametrize("prefix", [*MUST, *MAY])
def test_exact_or_refused(prefix):
    model = make(prefix, MUST.get(prefix, MAY.get(prefix)))
    if model is None:
        assert prefix not in MUST
        pytest.skip(f"no tiny {prefix} in transformers {transformers.__version__}")
    plain = copy.deepcopy(model)
    try:
        streambp.enable(model, chunk_size=4, head_chunk_size=5)
    except ValueError as refusal:
        assert prefix not in MUST, refusal
        assert "stream" in str(refusal) or "layer" in str(refusal)
        return
    relative = 1e-9 if prefix in MUST else 1e-6  # some round to fp32 where `in_double` can't see
    for padding in ("none", "right"):
        batch = batch_of(padding=padding)
        with in_double():
            try:
                wanted = double_loss(plain, batch)
            except (RuntimeError, ValueError, AttributeError, TypeError) as error:
                assert prefix not in MUST, error
                pytest.skip(f"transformers' own {prefix} fails on a tiny batch: {error}")
            try:
                found = model(**batch).loss
            except ValueError as refusal:
                assert prefix not in MUST, refusal
                return
            torch.testing.assert_close(found, wanted, rtol=relative, atol=0)
            for m, loss in ((plain, wanted), (model, found)):
                m.zero_grad()
                loss.backward()
        unused = {n for n, p in plain.named_parameters() if p.requires_grad and p.grad is None}
        for m in (plain, model):
            for name, p in m.named_parameters():
                if name in unused:
                    assert p.grad is None or p.grad.abs().max() == 0, name
                    p.requires_grad_(False)
                    p.grad = None
        assert_close(gradients(model), gradients(plain), relative)
