"""Training steps: the same numbers for every method, accumulation, clipping, warm-up."""

import pytest
import torch

import streambp
from streambp.bench.config import DataConfig, MethodConfig, OptimizerConfig, TuningConfig
from streambp.bench.data import batches
from streambp.bench.methods import apply_method
from streambp.bench.models import build
from streambp.bench.training import Trainer, build_optimizer

STREAMED = [
    {"chunk_size": 16, "head_chunk_size": 10},
    {"chunk_size": 16, "keep_kv": True, "keep_attention": True},
]


def train(model_cfg, method_cfg, *, dtype, steps=3, tuning=None, **optimizer):
    model = build(model_cfg, dtype=dtype, device="cpu", seed=0, tuning=tuning)
    apply_method(model, method_cfg)
    source = batches(DataConfig(name="corpus"), vocab_size=260, batch_size=2, seq_len=50, seed=0)
    settings = {"lr": 1e-2, "weight_decay": 0.01, "max_grad_norm": 0.5, **optimizer}
    trainer = Trainer(model, OptimizerConfig(**settings))
    return [trainer.step([next(source), next(source)]) for _ in range(steps)]


def methods():
    yield MethodConfig(name="checkpointing")
    for options in STREAMED:
        yield MethodConfig(name="streambp", **options)


@pytest.mark.parametrize("method", methods(), ids=lambda m: f"{m.name}-{m.keep_kv}")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-6), ("float32", 2e-5)])
def test_methods_agree_step_by_step(tiny_cfg, method, dtype, tolerance):
    if method.name == "streambp" and not hasattr(streambp, "enable"):
        pytest.skip("the streamed backward isn't there")
    expected = train(tiny_cfg, MethodConfig(name="standard"), dtype=dtype)
    got = train(tiny_cfg, method, dtype=dtype)
    assert expected[-1].loss < expected[0].loss - 0.05  # it does train
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=tolerance)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=20 * tolerance)
        assert ours.supervised_tokens == theirs.supervised_tokens == 2 * 2 * 49


def test_methods_agree_with_lora(tiny_cfg):
    tuning = TuningConfig(name="lora", rank=2)
    expected = train(tiny_cfg, MethodConfig(name="standard"), dtype="float32", tuning=tuning)
    got = train(tiny_cfg, MethodConfig(name="checkpointing"), dtype="float32", tuning=tuning)
    assert [s.loss for s in got] == pytest.approx([s.loss for s in expected], rel=2e-5)


def test_accumulation_equals_one_large_batch(tiny_cfg, tiny_batch):
    labels = tiny_batch["labels"].clone()
    labels[0, :15] = -100  # the two rows have different numbers of supervised tokens
    rows = [
        {"input_ids": tiny_batch["input_ids"][i : i + 1], "labels": labels[i : i + 1]}
        for i in range(2)
    ]
    results = []
    for micro_batches in ([{**tiny_batch, "labels": labels}], rows):
        model = build(tiny_cfg, dtype="float64", device="cpu", seed=0)
        trainer = Trainer(model, OptimizerConfig(lr=1e-3))
        stats = trainer.step(micro_batches)
        results.append((stats, [p.grad for p in model.parameters()], list(model.parameters())))
    (whole, whole_grads, whole_weights), (parts, part_grads, part_weights) = results
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)
    assert parts.supervised_tokens == whole.supervised_tokens == 9 + 23
    for a, b in zip(part_grads + part_weights, whole_grads + whole_weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)  # HF's loss is float32


def test_clipping_limits_the_update_but_not_the_reported_norm(tiny_model, tiny_batch):
    trainer = Trainer(tiny_model, OptimizerConfig(max_grad_norm=0.1))
    stats = trainer.step([tiny_batch])
    clipped = torch.stack([p.grad.norm() for p in tiny_model.parameters()]).norm()
    assert stats.grad_norm > 0.1
    assert float(clipped) == pytest.approx(0.1, rel=1e-3)


def test_no_clipping_leaves_the_gradients(tiny_model, tiny_batch):
    stats = Trainer(tiny_model, OptimizerConfig(max_grad_norm=None)).step([tiny_batch])
    norm = torch.stack([p.grad.norm() for p in tiny_model.parameters()]).norm()
    assert float(norm) == pytest.approx(stats.grad_norm, rel=1e-5)


def test_learning_rate_rises_over_the_warm_up(tiny_model, tiny_batch):
    trainer = Trainer(tiny_model, OptimizerConfig(lr=1.0e-3, warmup_steps=3))
    rates = []
    for _ in range(5):
        trainer.step([tiny_batch])
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_optimizer_none_updates_nothing(tiny_model, tiny_batch):
    before = [p.detach().clone() for p in tiny_model.parameters()]
    stats = Trainer(tiny_model, OptimizerConfig(name="none")).step([tiny_batch])
    assert stats.grad_norm > 0
    assert all(a.equal(b) for a, b in zip(before, tiny_model.parameters(), strict=True))


def test_all_labels_ignored_is_a_step_without_effect_on_the_loss(tiny_model, tiny_batch):
    batch = {**tiny_batch, "labels": torch.full_like(tiny_batch["labels"], -100)}
    stats = Trainer(tiny_model, OptimizerConfig(name="none")).step([batch])
    assert (stats.loss, stats.grad_norm, stats.supervised_tokens) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"name": "adamw_8bit"}, "optimizer.name"),
        ({"state_dtype": "bf16"}, "optimizer.state_dtype"),
    ],
)
def test_what_only_a_simulated_run_has(tiny_model, settings, field):
    with pytest.raises(ValueError, match=rf"{field}=.*device=simulated"):
        build_optimizer(tiny_model, OptimizerConfig(**settings))


def test_nothing_to_train(tiny_model):
    tiny_model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        build_optimizer(tiny_model, OptimizerConfig())
