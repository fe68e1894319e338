"""The Hugging Face Trainer, unmodified, on a streaming model."""

import copy

import pytest
import torch
from libtools import VOCABULARY, build
from transformers import Trainer, TrainerCallback, TrainingArguments

import streambp


class Losses(TrainerCallback):
    def __init__(self):
        self.losses = []
        self.norms = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(float(logs["grad_norm"]))


def rows(num=12):
    """Rows of different lengths, padded to the longest on the right."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(num):
        length = int(torch.randint(4, 16, (), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        pads = 16 - length
        pad = torch.nn.functional.pad
        yield {
            "input_ids": pad(ids, (0, pads)),
            "attention_mask": pad(torch.ones_like(ids), (0, pads)),
            "labels": pad(ids, (0, pads), value=-100),
        }


def train(model, folder, **arguments):
    recorder = Losses()
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_steps=3, learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no",
        use_cpu=True, seed=0, disable_tqdm=True, **arguments,
    )  # fmt: skip
    data = list(rows())
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:4], callbacks=[recorder])
    trainer.train()
    return recorder, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("arguments", [{}, {"gradient_checkpointing": True}])
def test_training_equals_unstreamed_training(tmp_path, arguments):
    model = build(dtype=torch.float32)
    plain = copy.deepcopy(model)
    wanted, wanted_eval = train(plain, tmp_path / "plain")
    streambp.enable(model, chunk_size=5, head_chunk_size=7)
    found, found_eval = train(model, tmp_path / "streamed", **arguments)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-4)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-3)
    assert found_eval == pytest.approx(wanted_eval, rel=1e-3)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=2e-4, msg=name)
