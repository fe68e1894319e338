"""`token_logprobs` and `linear_cross_entropy` against the expressions they stand for.

N tokens, D hidden, V vocabulary.
"""

import pytest
import torch
import torch.nn.functional as F
from libtools import assert_close, build

import streambp
from streambp import linear_cross_entropy, token_logprobs
from streambp.head import _gradient_over

N, D, V = 11, 5, 7


def tensors(dtype=torch.float64, shape=(N,)):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in ((*shape, D), (V, D), (V,))
    )
    labels = torch.randint(0, V, shape, generator=generator)
    labels.view(-1)[::4] = -100
    return hidden, weight, bias, labels


def naive_logits(hidden, weight, bias, softcap):
    logits = F.linear(hidden, weight, bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


OPTIONS = [
    {}, {"softcap": 1.5}, {"temperature": 0.6}, {"softcap": 2.0, "temperature": 3.0},
]  # fmt: skip


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 11, 100, None])
@pytest.mark.parametrize("options", OPTIONS)
def test_token_logprobs(options, chunk_size, with_bias):
    hidden, weight, bias, labels = tensors()
    bias = bias if with_bias else None
    leaves = [t for t in (hidden, weight, bias) if t is not None]
    logits = naive_logits(hidden, weight, bias, options.get("softcap"))
    logp = (logits / options.get("temperature", 1.0)).log_softmax(-1)
    counts = labels != -100
    want = logp.gather(-1, labels.where(counts, 0)[:, None])[:, 0] * counts
    found = token_logprobs(hidden, weight, labels, bias=bias, chunk_size=chunk_size, **options)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-14)
    upstream = torch.randn(N, dtype=torch.float64)
    for have, expected in zip(
        torch.autograd.grad(found, leaves, upstream),
        torch.autograd.grad(want, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(have, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(
    ("given", "scale"),
    [
        ({}, "mean"),
        ({"reduction": "sum"}, 1.0),
        ({"num_items": 3}, 3.0),
        ({"num_items": torch.tensor(5), "reduction": "sum"}, 5.0),
    ],
)
def test_linear_cross_entropy(given, scale, softcap, chunk_size, with_bias):
    hidden, weight, bias, labels = tensors(shape=(3, 4))
    bias = bias if with_bias else None
    leaves = [t for t in (hidden, weight, bias) if t is not None]
    logits = naive_logits(hidden, weight, bias, softcap).flatten(0, 1)
    total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    want = total / ((labels != -100).sum() if scale == "mean" else scale)
    found = linear_cross_entropy(
        hidden, weight, labels, bias=bias, softcap=softcap, chunk_size=chunk_size, **given
    )
    torch.testing.assert_close(found, want, rtol=1e-12, atol=0)
    for have, expected in zip(
        torch.autograd.grad(2.5 * found, leaves),
        torch.autograd.grad(2.5 * want, leaves),
        strict=True,
    ):
        torch.testing.assert_close(have, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck_of_token_logprobs(options):
    hidden, weight, bias, labels = tensors()
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, labels, bias=b, chunk_size=4, **options),
        (hidden, weight, bias),
    )


@pytest.mark.parametrize("given", [{}, {"reduction": "sum"}, {"softcap": 2.0, "num_items": 4}])
def test_gradcheck_of_linear_cross_entropy(given):
    hidden, weight, bias, labels = tensors()
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, labels, bias=b, chunk_size=4, **given),
        (hidden, weight, bias),
    )


@pytest.mark.parametrize("function", [token_logprobs, linear_cross_entropy])
def test_a_module_as_head(function):
    hidden, _, bias, labels = tensors()
    head = torch.nn.Sequential(torch.nn.LayerNorm(D), torch.nn.Linear(D, V)).double()
    by_module = function(hidden, head, labels, chunk_size=4)
    by_tensor = function(head[0](hidden), head[1].weight, labels, bias=head[1].bias)
    torch.testing.assert_close(by_module, by_tensor)
    leaves = [hidden, *head.parameters()]
    found, wanted = (torch.autograd.grad(x.sum(), leaves) for x in (by_module, by_tensor))
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want)
    with pytest.raises(ValueError, match="bias goes with"):
        function(hidden, head, labels, bias=bias)


def test_the_head_of_a_streaming_model():
    model = streambp.enable(build(), chunk_size=4)
    hidden = torch.randn(3, 16, dtype=torch.float64)
    labels = torch.tensor([1, 2, 3])
    want = model.lm_head(hidden).log_softmax(-1)[range(3), labels]
    torch.testing.assert_close(token_logprobs(hidden, model.lm_head, labels), want)


@pytest.mark.parametrize("which", ["hidden", "weight", "bias"])
def test_only_what_requires_grad_gets_one(which):
    tensors_ = dict(zip(("hidden", "weight", "bias", "labels"), tensors(), strict=True))
    wanted = linear_cross_entropy(**_call(tensors_))
    want = torch.autograd.grad(wanted, tensors_[which])[0]
    for name in ("hidden", "weight", "bias"):
        tensors_[name] = tensors_[name].detach().requires_grad_(name == which)
    linear_cross_entropy(**_call(tensors_)).backward()
    torch.testing.assert_close(tensors_[which].grad, want)
    assert sum(tensors_[n].grad is not None for n in ("hidden", "weight", "bias")) == 1


def _call(tensors_):
    return {
        "hidden": tensors_["hidden"], "head": tensors_["weight"], "labels": tensors_["labels"],
        "bias": tensors_["bias"], "chunk_size": 3,
    }  # fmt: skip


def test_a_head_that_is_the_result_of_other_operations():
    hidden, weight, _, labels = tensors()
    merged = weight * 2 + 1
    found = torch.autograd.grad(linear_cross_entropy(hidden, merged, labels), weight)[0]
    merged = weight * 2 + 1
    want = torch.autograd.grad(F.cross_entropy(F.linear(hidden, merged), labels), weight)[0]
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("function", [token_logprobs, linear_cross_entropy])
def test_the_callers_hidden_states_are_never_overwritten(function):
    hidden, weight, _, labels = tensors()
    before = hidden.detach().clone()
    function(hidden * 1, weight, labels).sum().backward()
    function(hidden, weight, labels).sum().backward()
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("function", [token_logprobs, linear_cross_entropy])
def test_every_label_ignored(function):
    hidden, weight, _, labels = tensors()
    result = function(hidden, weight, torch.full_like(labels, -100)).sum()
    result.backward()
    assert result == 0
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


@pytest.mark.parametrize("function", [token_logprobs, linear_cross_entropy])
def test_another_ignore_index(function):
    hidden, weight, _, labels = tensors()
    zero = labels.where(labels != -100, 0)
    minus = labels.where(labels > 0, -100)
    found = function(hidden, weight, zero, ignore_index=0).sum()
    torch.testing.assert_close(found, function(hidden, weight, minus).sum())


def test_without_gradients():
    hidden, weight, bias, labels = tensors()
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_size=3)
        logp = token_logprobs(hidden, weight, labels, bias=bias, chunk_size=3)
    want = F.cross_entropy(F.linear(hidden, weight, bias), labels)
    torch.testing.assert_close(found, want.detach())
    torch.testing.assert_close(-logp.sum() / (labels != -100).sum(), want.detach())
    assert not found.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_by_the_three_way_rule(dtype):
    """Against float64, no worse than plain cross-entropy on fp32 logits plus a half."""
    hidden, weight, bias, labels = tensors(dtype, shape=(97,))
    leaves = (hidden, weight, bias)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    F.cross_entropy(F.linear(*exact), labels).backward()
    F.cross_entropy(F.linear(*leaves).float(), labels).backward()
    plain = [t.grad.clone() for t in leaves]
    for t in leaves:
        t.grad = None
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_size=10)
    assert loss.dtype == torch.float32
    loss.backward()
    for t, p, e in zip(leaves, plain, exact, strict=True):
        assert t.grad.dtype == dtype
        error, allowed = ((g.double() - e.grad).norm() for g in (t.grad, p))
        assert error <= 1.5 * allowed + 1e-7 * e.grad.norm()


def test_fp16_survives_a_loss_scale():
    """Gradients too small for fp16 before the scaler's factor and fine after it."""
    hidden, weight, _, labels = tensors(torch.float16, shape=(64,))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    factor, num_items = 2.0**16, 10**7
    total = F.cross_entropy(F.linear(*exact), labels, reduction="sum")
    (factor * total / num_items).backward()
    found = linear_cross_entropy(hidden, weight, labels, num_items=num_items, chunk_size=10)
    (factor * found).backward()
    assert_close(
        {"hidden": hidden.grad, "weight": weight.grad},
        {"hidden": exact[0].grad, "weight": exact[1].grad},
        4e-3,
    )


def test_errors_name_the_argument():
    hidden, weight, _, labels = tensors()
    for function in (token_logprobs, linear_cross_entropy):
        with pytest.raises(ValueError, match="labels of shape"):
            function(hidden, weight, labels[:-1])
        with pytest.raises(ValueError, match="head of shape"):
            function(hidden, weight.T, labels)
        with pytest.raises(ValueError, match="chunk_size=0"):
            function(hidden, weight, labels, chunk_size=0)
    for temperature in (0, -1.0):
        with pytest.raises(ValueError, match="temperature="):
            token_logprobs(hidden, weight, labels, temperature=temperature)
    with pytest.raises(ValueError, match="reduction='none'"):
        linear_cross_entropy(hidden, weight, labels, reduction="none")


@pytest.mark.parametrize("by_columns", [False, True])
def test_gradient_over_the_logits(by_columns):
    torch.manual_seed(0)
    logits = torch.randn(5, 33, dtype=torch.float64) * 300 + 1e4  # exp overflows without a shift
    index = torch.randint(33, (5, 1))
    weights = torch.randn(5, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    want = leaf.log_softmax(-1).gather(-1, index).squeeze(-1)
    (weights * want).sum().backward()
    if by_columns:
        logits = logits.t().contiguous().t()
    picked, grad = _gradient_over(logits, index, weights)
    assert grad.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(picked, want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, leaf.grad, rtol=1e-10, atol=1e-12)
