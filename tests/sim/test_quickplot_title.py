"""What the picture at the end of a simulated sweep says it shows."""

from types import SimpleNamespace

import pytest

from streambp.bench.quickplot import _title


def record(gpu=None, tuning="full", device="simulated"):
    config = {
        "model": {"name": "m"},
        "device": {"name": device},
        "tuning": {"name": tuning, "rank": 8},
        "dtype": "bfloat16",
        "batch_size": 1,
    }
    memory = {"gpu": {"name": gpu}} if gpu else None
    return SimpleNamespace(config=config, memory=memory, provenance={"memory": "simulated"})


@pytest.mark.parametrize(
    ("records", "title"),
    [
        (
            [record("h100_80gb", "lora")],
            "m, on a simulated h100_80gb, LoRA of rank 8, bfloat16, batch 1, memory simulated",
        ),
        ([record("b200"), record("h100_80gb")], "on several, bfloat16"),
        ([record("b200", "lora"), record("b200")], "on a simulated b200, several, bfloat16"),
        ([record()], "on a simulated a100_80gb, bfloat16"),  # the default, before any number
        ([record(device="cpu")], "on cpu, bfloat16"),
    ],
)
def test_the_title_names_the_gpu_and_the_adapters(records, title):
    assert title in _title(records)
