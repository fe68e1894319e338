"""Loss and every gradient in float64 against plain autograd, to 1e-10 relative."""

import pytest
import torch
from libtools import (
    FAMILIES,
    assert_close,
    batch_of,
    build,
    compare,
    double_loss,
    gradients,
    hf_loss,
    in_double,
)

import streambp

MAIN = ("qwen3", "qwen2", "llama", "mistral", "gemma3")
CHUNKS = (1, 3, 5, 64)
KEEP = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, chunk_size, padding):
    batch = blind_rows_ignored(batch_of(padding=padding, ignored=0.2), family)
    compare(build(family), batch, chunk_size=chunk_size, head_chunk_size=4)


def blind_rows_ignored(batch, family):
    """A padded row in front sees no key: zeros under SDPA and here, any key under eager attention.

    So the first real token's label, which is predicted there, has no meaning for eager models.
    """
    if family == "gemma2" and "attention_mask" in batch:
        first = batch["attention_mask"].argmax(-1, keepdim=True)
        batch["labels"] = batch["labels"].scatter(1, first, -100)
    return batch


@pytest.mark.parametrize(("keep_kv", "keep_attention"), KEEP)
@pytest.mark.parametrize("family", FAMILIES)
def test_keep_options(family, keep_kv, keep_attention):
    batch = blind_rows_ignored(batch_of(padding="left"), family)
    options = {"keep_kv": keep_kv, "keep_attention": keep_attention}
    compare(build(family), batch, chunk_size=4, head_chunk_size=7, **options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma2"])
@pytest.mark.parametrize("head_chunk_size", [1, 6, 100])
def test_recomputed_heads(head_chunk_size, family, tied):
    model = build(family, tie_word_embeddings=tied)
    batch = blind_rows_ignored(batch_of(padding="left", ignored=0.3), family)
    options = {"chunk_size": 5, "head_chunk_size": head_chunk_size, "recompute_head": True}
    compare(model, batch, upstream=-1.5, **options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", MAIN)
def test_tied_and_untied_embeddings(family, tied):
    model = build(family, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    compare(model, batch_of(length=17), chunk_size=5, head_chunk_size=6)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_supervised_padding(padding):
    """Labels on padded positions count, as they do in transformers."""
    batch = batch_of(padding=padding, mask_pads=False)
    compare(build(), batch, chunk_size=4, head_chunk_size=5)


@pytest.mark.parametrize("family", MAIN)
def test_packed_rows_by_reset_positions(family):
    """Documents in a row do not see each other; boundaries fall inside and between chunks.

    transformers isolates them where it makes no KV cache, and streaming makes none.
    """
    batch = {**batch_of(length=16), "position_ids": packed_positions(), "use_cache": False}
    for chunk_size in (1, 4, 6, 99):
        compare(build(family), batch, chunk_size=chunk_size)


def packed_positions():
    """Reset positions of documents of 4, 7, 5 and 1, 12, 3 tokens, (2, 16)."""
    lengths = [(4, 7, 5), (1, 12, 3)]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


@pytest.mark.parametrize("family", MAIN)
def test_reset_positions_beside_a_mask_do_not_isolate(family):
    """A mask says what is visible, as in transformers: positions then only turn the queries."""
    batch = {**batch_of(length=16), "position_ids": packed_positions()}
    batch["attention_mask"] = torch.ones(2, 16, dtype=torch.long)
    compare(build(family), batch, chunk_size=6)


def test_packed_rows_differ_from_unpacked_ones():
    """The reference itself isolates documents, else the test above would prove nothing."""
    batch = batch_of(batch_size=1, length=8)
    model = build()
    packed = {**batch, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}
    first = {name: t[:, 4:] for name, t in batch.items()}
    logits = [model(input_ids=b["input_ids"], position_ids=b.get("position_ids"), use_cache=False)
              .logits for b in (packed, first)]  # fmt: skip
    torch.testing.assert_close(logits[0][:, 4:], logits[1])


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", MAIN)
def test_explicit_positions(family, padding):
    batch = batch_of(padding=padding)
    positions = torch.arange(13).expand(2, -1) + torch.tensor([[3], [8]])
    if padding == "left":
        positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    compare(build(family), {**batch, "position_ids": positions}, chunk_size=5)
    compare(build(family), {**batch, "position_ids": positions[:1]}, chunk_size=5)


@pytest.mark.parametrize("family", MAIN)
def test_input_embeddings_and_their_gradient(family):
    model = build(family)
    batch = batch_of(padding="left")
    batch["inputs_embeds"] = torch.randn(2, 13, 16, dtype=torch.float64)
    del batch["input_ids"]
    model.model.embed_tokens.requires_grad_(False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    compare(model, batch, chunk_size=4, inputs=("inputs_embeds",))


def dense_masks(length=13):
    """4-D masks that are causal and more: random holes, (B or 1, 1 or H)."""
    generator = torch.Generator().manual_seed(5)
    for shape in ((2, 1), (1, 1), (2, 4), (1, 4)):
        holes = torch.rand(*shape, length, length, generator=generator) < 0.6
        yield (holes | torch.eye(length, dtype=torch.bool)).tril()
    yield torch.ones(2, 1, length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("chunk_size", [1, 4, 50])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("which", range(5))
def test_dense_masks(which, additive, chunk_size):
    mask = list(dense_masks())[which]
    if additive:
        hidden = torch.finfo(torch.float64).min
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, hidden)
    for family in ("qwen3", "mistral"):
        compare(build(family), {**batch_of(), "attention_mask": mask}, chunk_size=chunk_size)


@pytest.mark.parametrize("hidden", [-1e9, float("-inf")])
def test_additive_masks_with_weights_of_their_own(hidden):
    """Biases other than 0 and "hidden" (ALiBi and the like) are part of the scores."""
    index = torch.arange(13)
    distance = (index[None, :] - index[:, None]).double()
    slopes = torch.tensor([0.1, 0.3, 0.5, 1.0])[:, None, None]
    mask = (distance * slopes).masked_fill(distance > 0, hidden)[None].expand(2, -1, -1, -1)
    compare(build(), {**batch_of(), "attention_mask": mask}, chunk_size=4)


@pytest.mark.parametrize("num_items", [7, torch.tensor(7), torch.tensor(7.0)])
def test_number_of_items(num_items):
    compare(build(), {**batch_of(), "num_items_in_batch": num_items}, chunk_size=4)


def test_shifted_labels():
    batch = batch_of()
    shifted = torch.randint(0, 31, (2, 13)).masked_fill(torch.rand(2, 13) < 0.3, -100)
    compare(build(), {**batch, "shift_labels": shifted}, chunk_size=4, head_chunk_size=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_value_has_transformers_semantics(family):
    """fp32 models: the loss is transformers' own, in fp32."""
    model = build(family, dtype=torch.float32)
    for extra in ({}, {"num_items_in_batch": 11}):
        batch = {**batch_of(ignored=0.3), **extra}
        streambp.disable(model)
        wanted = hf_loss(model, batch)
        found = hf_loss(streambp.enable(model, chunk_size=5, head_chunk_size=4), batch)
        assert found.dtype == wanted.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)


def test_the_two_references_agree():
    model, batch = build(), batch_of(ignored=0.3)
    with in_double():
        torch.testing.assert_close(hf_loss(model, batch), double_loss(model, batch))


# ---- named cases -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("chunk_size", [1, 4, 12, 13, 14, 1000])
def test_lengths_and_chunks_that_do_not_divide(length, chunk_size):
    batch = batch_of(length=length)
    compare(build(), batch, chunk_size=chunk_size, head_chunk_size=chunk_size)


def test_default_chunk_sizes():
    compare(build(), batch_of())


@pytest.mark.parametrize("extra", [{}, {"num_items_in_batch": 5}, {"num_items_in_batch": 0}])
def test_all_labels_ignored_gives_zero_loss_and_zero_gradients(extra):
    model = streambp.enable(build(), chunk_size=4)
    batch = {**batch_of(ignored=1.1), **extra}
    assert (batch["labels"] == -100).all()
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() == 0.0
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().max() == 0, name


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3), (3, 1)])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_head_groups(heads, padding):
    model = build(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    compare(model, batch_of(padding=padding), chunk_size=4)


@pytest.mark.parametrize("upstream", [0.0, -2.5, 1e4])
def test_upstream_gradient(upstream):
    compare(build(), batch_of(), upstream=upstream, chunk_size=4)


def test_existing_gradients_are_added_to():
    plain, model = build(), streambp.enable(build(), chunk_size=4)
    for p in (*plain.parameters(), *model.parameters()):
        p.grad = torch.full_like(p, 0.25)
    with in_double():
        double_loss(plain, batch_of()).backward()
        model(**batch_of()).loss.backward()
    assert_close(gradients(model), gradients(plain))


def test_repeated_backward_accumulates():
    plain, model = build(), streambp.enable(build(), chunk_size=4)
    with in_double():
        for seed in range(3):
            double_loss(plain, batch_of(seed=seed)).backward()
            model(**batch_of(seed=seed)).loss.backward()
    assert_close(gradients(model), gradients(plain))


FREEZE = {
    "embedding": lambda name: "embed_tokens" in name,
    "head": lambda name: "lm_head" in name,
    "first layer": lambda name: "layers.0." in name or "embed_tokens" in name,
    "last layer": lambda name: "layers.1." in name,
    "values and norms": lambda name: "v_proj" in name or "norm" in name,
    "all but one matrix": lambda name: "layers.0.self_attn.k_proj" not in name,
    "all but the final norm": lambda name: name != "model.norm.weight",
    "all but the embedding": lambda name: "embed_tokens" not in name,
    "all layers": lambda name: "layers" in name,
}


@pytest.mark.parametrize("which", FREEZE)
@pytest.mark.parametrize("keep", [False, True])
def test_frozen_parameters(which, keep):
    model = build("qwen3", attention_bias=True, tie_word_embeddings=False)
    for name, p in model.named_parameters():
        p.requires_grad_(not FREEZE[which](name))
    compare(model, batch_of(), chunk_size=4, keep_kv=keep, keep_attention=keep)


def test_shared_layer_weights():
    """A parameter in two layers receives the sum of both gradients."""
    model = build()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    compare(model, batch_of(), chunk_size=4)
