"""bf16: no worse than plain bf16, and no worse with more chunks."""

import copy

import pytest
import torch
from libtools import batch_of, build, cast, double_loss, gradients

import streambp
from streambp.gradients import GradientSums

CHUNKS = (1, 4, 16, 64, 256)
ALLOWANCE = 1.25  # on plain bf16's error
LENGTH = 256


def errors(model, wanted):
    """Relative error of all gradients together, and of each parameter's against the total."""
    total = torch.stack([g.norm() for g in wanted.values()]).norm()
    each = {n: (g.double() - wanted[n]).norm() / total for n, g in gradients(model).items()}
    return torch.stack(list(each.values())).norm().item(), each


@pytest.fixture(scope="module")
def setting():
    """(bf16 model, float64 gradients, error of plain bf16 autograd) on one long batch."""
    model = build(dtype=torch.bfloat16, hidden_size=32, head_dim=8, max_position_embeddings=LENGTH)
    batch = batch_of(1, LENGTH)
    exact, plain = cast(copy.deepcopy(model), torch.float64), copy.deepcopy(model)
    double_loss(exact, batch).backward()
    wanted = gradients(exact)
    plain(**batch).loss.backward()
    return model, batch, wanted, errors(plain, wanted)


def streamed(setting, num_chunks, **options):
    model, batch, wanted, _ = setting
    model.zero_grad()
    size = LENGTH // num_chunks
    streambp.enable(model, chunk_size=size, head_chunk_size=size, **options)
    model(**batch).loss.backward()
    assert all(g.dtype == torch.bfloat16 for g in gradients(model).values())
    return errors(model, wanted)


@pytest.fixture(scope="module")
def found(setting):
    """num_chunks -> errors, for a range of chunks."""
    return {num_chunks: streamed(setting, num_chunks) for num_chunks in CHUNKS}


def check_three_way(errors_found, plain):
    total, each = errors_found
    plain_total, plain_each = plain
    assert 0 < total <= ALLOWANCE * plain_total
    for name, error in each.items():
        assert error <= 1.5 * plain_each[name] + 0.2 * plain_total, name


@pytest.mark.parametrize("num_chunks", CHUNKS)
def test_three_way_rule(setting, found, num_chunks):
    """Against float64, at most plain bf16's error plus a quarter, for every parameter."""
    check_three_way(found[num_chunks], setting[3])


@pytest.mark.parametrize("num_chunks", [1, 16])
def test_three_way_rule_with_everything_kept(setting, num_chunks):
    check_three_way(streamed(setting, num_chunks, keep_kv=True, keep_attention=True), setting[3])


def test_the_error_does_not_grow_with_the_number_of_chunks(found):
    few, many = (max(found[n][0] for n in chunks) for chunks in (CHUNKS[:2], CHUNKS[2:]))
    assert many <= 1.1 * few


def test_a_bf16_running_sum_would_fail_that_rule(setting, found, monkeypatch):
    """The rule is sharp enough to see the mistake it is there for."""
    monkeypatch.setattr(GradientSums, "_dtype", lambda self, leaf: leaf.dtype)
    bad, _ = streamed(setting, CHUNKS[-1])
    assert bad > ALLOWANCE * setting[3][0]
    assert bad > 1.1 * max(found[n][0] for n in CHUNKS[:2])
