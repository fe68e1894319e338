"""The one real step: what it returns, keeps alive and refuses."""

import weakref
from contextlib import contextmanager

import pytest
import torch

from streambp.bench.step import OBJECTIVES, forward_backward, supervised_tokens


def test_it_is_the_plain_step(tiny_model, tiny_batch):
    out = forward_backward(tiny_model, tiny_batch, "sft")
    got = {name: p.grad.clone() for name, p in tiny_model.named_parameters()}
    tiny_model.zero_grad()
    loss = tiny_model(**tiny_batch, use_cache=False).loss
    loss.backward()
    assert out.loss.equal(loss.detach())
    assert not out.loss.requires_grad
    for name, parameter in tiny_model.named_parameters():
        assert got[name].equal(parameter.grad)


@pytest.mark.parametrize("keep", [False, True])
def test_outputs_live_through_backward_only_when_kept(tiny_model, tiny_batch, keep):
    alive = []

    def objective(model, batch, num_items_in_batch):
        outputs = model(**batch, use_cache=False)
        logits = weakref.ref(outputs.logits)
        outputs.loss.register_hook(lambda grad: alive.append(logits() is not None))
        return outputs

    OBJECTIVES["watched"] = objective
    try:
        out = forward_backward(tiny_model, tiny_batch, "watched", keep_outputs=keep)
    finally:
        del OBJECTIVES["watched"]
    assert alive == [keep]
    assert (out.outputs_kept is not None) == keep


def test_phases_enclose_forward_then_backward(tiny_model, tiny_batch):
    seen = []

    @contextmanager
    def around(name):
        seen.append(name)
        yield
        seen.append(f"end of {name}")

    forward_backward(tiny_model, tiny_batch, around=around)
    assert seen == ["forward", "end of forward", "backward", "end of backward"]


def test_num_items_divides_the_loss_sum(tiny_model, tiny_batch):
    num_items = supervised_tokens(tiny_batch)
    mean = forward_backward(tiny_model, tiny_batch).loss
    half = forward_backward(tiny_model, tiny_batch, num_items_in_batch=2 * num_items).loss
    torch.testing.assert_close(half * 2, mean)


def test_supervised_tokens_leave_out_first_and_ignored():
    labels = torch.tensor([[1, 2, -100, 4], [-100, -100, 3, 4]])
    assert supervised_tokens({"labels": labels}) == 4


def test_unknown_objective_and_missing_labels(tiny_model, tiny_batch):
    with pytest.raises(ValueError, match=r"objective='dpoo'.*sft"):
        forward_backward(tiny_model, tiny_batch, "dpoo")
    with pytest.raises(ValueError, match="'labels'"):
        forward_backward(tiny_model, {"input_ids": tiny_batch["input_ids"]})
