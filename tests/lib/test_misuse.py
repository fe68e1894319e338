"""What cannot be computed exactly is refused with a reason, before a wrong number comes out."""

import copy

import peft
import pytest
import torch
from libtools import assert_close, batch_of, build, compare, gradients, in_double

import streambp


def streamed(family="qwen3", **overrides):
    return streambp.enable(build(family, **overrides), chunk_size=4)


@pytest.mark.parametrize("cut", ["short", "long", "rows", "shift_labels"])
@pytest.mark.parametrize("recompute_head", [False, True])
def test_labels_that_do_not_fit_the_tokens(cut, recompute_head):
    model = streambp.enable(build(), chunk_size=4, recompute_head=recompute_head)
    batch = batch_of(2, 12)
    labels = batch["labels"]
    if cut == "shift_labels":
        batch["shift_labels"] = labels[:, :-3]
    else:
        longer = torch.cat([labels, labels], 1)
        batch["labels"] = {"short": labels[:, :-1], "long": longer, "rows": labels[:1]}[cut]
    with pytest.raises(ValueError, match=r"labels of shape .* one per token"):
        model(**batch)


def test_ignore_index_is_that_of_the_call():
    batch = batch_of(2, 12)
    batch["labels"][:, ::3] = 7
    plain = build()
    model = streambp.enable(copy.deepcopy(plain), chunk_size=4)
    with in_double():
        wanted = plain(**batch, ignore_index=7).loss
        found = model(**batch, ignore_index=7).loss
        wanted.backward()
        found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
    assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("length", [4, 12])
def test_query_heads_that_do_not_divide_over_key_heads(length):
    model = streamed(num_attention_heads=7)
    with pytest.raises(ValueError, match="7 query heads don't divide over 2 key heads"):
        model(**batch_of(2, length))


def test_a_parameter_changed_between_forward_and_backward():
    model = streamed()
    loss = model(**batch_of()).loss
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()


def test_a_parameter_replaced_between_forward_and_backward():
    model = streamed()
    loss = model(**batch_of()).loss
    up_proj = model.model.layers[1].mlp.up_proj
    up_proj.weight = torch.nn.Parameter(up_proj.weight.detach().clone())
    with pytest.raises(ValueError, match="replaced between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("how", ["adapter", "resized"])
def test_a_head_replaced_after_enable(how):
    model = streamed()
    if how == "adapter":
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
        model = peft.get_peft_model(model, config)
    else:
        model.resize_token_embeddings(40)
    with pytest.raises(ValueError, match=r"call streambp.enable again"):
        model(**batch_of())
    streambp.enable(model, chunk_size=4)
    model(**batch_of()).loss.backward()


def test_one_layer_in_two_places():
    model = build()
    model.model.layers[1] = model.model.layers[0]
    batch = {**batch_of(2, 12), "use_cache": False}  # a cache would hold both places as one
    compare(model, batch, chunk_size=4)
    streambp.disable(model)
    assert "forward" not in model.model.layers[0].__dict__
    model(**batch_of()).loss.backward()


def test_a_frozen_model_still_gives_its_loss():
    plain = build().requires_grad_(False)
    model = streambp.enable(copy.deepcopy(plain), chunk_size=4)
    with in_double():
        loss = model(**batch_of()).loss
        torch.testing.assert_close(loss, plain(**batch_of()).loss, rtol=1e-10, atol=0)
    assert not loss.requires_grad


def test_a_mask_of_integers():
    batch = batch_of(2, 12)
    batch["attention_mask"] = torch.ones(2, 1, 12, 12, dtype=torch.long).tril()
    with pytest.raises(ValueError, match=r"dtype torch.int64: a 4-D mask is bool"):
        streamed()(**batch)


def left_padded():
    batch = batch_of(2, 12)
    batch["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
    batch["attention_mask"][0, :3] = 0
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def test_a_target_of_padding_under_attention_that_adds_its_mask():
    """The last pad predicts the first real token, and sees everything where it should see nothing:
    refused. Without that target, exact."""
    model = build("gemma2")
    batch = left_padded()
    with pytest.raises(ValueError, match="can't be streamed exactly: give it the label -100"):
        streambp.enable(copy.deepcopy(model), chunk_size=4)(**batch)
    batch["labels"][0, 3] = -100
    compare(model, batch, chunk_size=4)
    compare(build("qwen3"), left_padded(), chunk_size=4)  # sdpa: such a row is zero


def test_a_target_of_a_row_that_an_additive_mask_hides():
    batch = left_padded()
    visible = torch.ones(12, 12, dtype=torch.bool).tril() & batch["attention_mask"].bool()[:, None]
    hidden = torch.finfo(torch.float64).min
    batch["attention_mask"] = (
        torch.zeros(2, 1, 12, 12).double().masked_fill(~visible[:, None], hidden)
    )
    with pytest.raises(ValueError, match="can't be streamed exactly: give it the label -100"):
        streamed()(**batch)
    batch["labels"][0, 3] = -100
    compare(build(), batch, chunk_size=4)
