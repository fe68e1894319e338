"""The terminal's table and the plot say what the records say."""

import dataclasses

import matplotlib.image
import pytest
from rich.console import Console

from streambp.bench.config import MethodConfig, ModelConfig, RunConfig
from streambp.bench.display import Display
from streambp.bench.quickplot import save_plot
from streambp.bench.records import RunRecord
from streambp.bench.runner import JobOutcome
from streambp.bench.tables import (
    heading,
    largest,
    loss_agreement,
    median_s,
    peak_bytes,
    record_table,
    remarks,
)


def record(method, seq_len, *, status="ok", losses=(2.0, 1.0), **memory):
    return RunRecord(
        run_id=f"{method}{seq_len}",
        fingerprint="f",
        experiment="e",
        job="j",
        status=status,
        started_at="",
        finished_at="",
        config={
            "model": {"name": "tiny"},
            "method": {"name": method, "chunk_size": None, "keep_kv": method == "streambp"},
            "tuning": {"name": "full"},
            "device": {"name": "cpu"},
            "data": {"name": "corpus"},
            "dtype": "float32",
            "seq_len": seq_len,
            "batch_size": 1,
        },
        training={"loss_per_step": list(losses)} if status == "ok" else None,
        memory={"peak_live_bytes": 2**30 * seq_len, **memory} if status == "ok" else None,
        time={"forward_backward_time_s_samples": [3.0, 1.0, 2.0]} if status == "ok" else None,
        provenance={"memory": "measured", "time": "measured"},
    )


def shown(records):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(heading(records), record_table(records), *remarks(records), sep="\n")
    return console.export_text()


def test_table_shows_values_status_provenance_and_agreement():
    text = shown(
        [
            record("standard", 1, losses=(2.0, 1.0)),
            record("streambp", 1, losses=(2.0, 1.0 + 1e-9)),
            record("standard", 2, status="oom"),
        ]
    )
    assert "streambp keep_kv" in text
    assert "2.0000 → 1.0000" in text
    assert "1.000" in text and "2.000" in text
    assert "oom" in text
    assert "memory: measured" in text
    assert "losses: 1.0e-09" in text


def searched(method, largest, outcome="found"):
    return dataclasses.replace(
        record(method, 64),
        time=None,
        training=None,
        search={"parameter": "seq_len", "outcome": outcome, "largest": largest, "message": "m"},
    )


def test_a_search_shows_its_answer_and_no_column_without_a_value():
    text = shown([searched("standard", 4928), searched("streambp", None, "nothing_fits")])
    assert "4,928" in text and "nothing" in text
    assert "seq_len searched" in text
    assert "forward" not in text and "loss" not in text
    assert largest(searched("standard", 512, "everything_fits")) == "512 or more"
    assert largest(record("standard", 1)) == "-"


def test_the_gpu_of_a_simulated_run_is_named():
    simulated = record("standard", 1, gpu={"name": "a800_80gb"})
    simulated.config["device"] = {"name": "simulated"}
    text = shown([simulated])
    assert "simulated a800_80gb" in text and "corpus" not in text  # no data is read
    assert "corpus" in shown([record("standard", 1)])


def test_what_is_not_measured_is_said_beside_its_number(tmp_path, capsys):
    simulated = dataclasses.replace(
        record("standard", 1), provenance={"memory": "simulated", "time": "predicted"}
    )
    for one in (simulated, record("standard", 1), searched("standard", 8)):
        one.path = tmp_path / "record.json"
        Display((1, 3)).ended(JobOutcome(one, skipped=False, wall_time_s=1.0))
    first, second, third = capsys.readouterr().out.splitlines()
    assert "simulated peak 1.000 GiB, predicted forward+backward 2.000 s" in first
    assert "  peak 1.000 GiB, forward+backward" in second
    assert "  m, 1 s in all" in third


@pytest.mark.parametrize(("job", "shown_"), [(None, True), ((1, 1), True), ((1, 3), False)])
def test_what_a_run_says_is_shown_unless_it_is_one_of_many(job, shown_, capsys):
    model = ModelConfig(name="m", config={"model_type": "qwen3"})
    config = RunConfig(model=model, method=MethodConfig(name="standard"))
    with Display(job).running(config, []) as on_event:
        on_event({"event": "phase", "name": "timing"})
        on_event({"event": "message", "text": "round 1/5"})
        on_event({"event": "warning", "text": "odd"})
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines == ["  round 1/5"] * shown_ + ["  odd"]


def test_a_lone_run_without_numbers_gets_no_table(capsys):
    Display(None).summary([record("standard", 1, status="error")])
    assert capsys.readouterr().out == ""
    Display(None).summary([record("standard", 1)])
    assert "1.000" in capsys.readouterr().out


def test_numbers():
    one = record("standard", 1)
    assert peak_bytes(one) == 2**30
    assert peak_bytes(record("standard", 1, peak_allocated_bytes=7)) == 7
    assert median_s(one, "forward_backward_time") == 2.0
    assert median_s(one, "forward_time") is None
    assert peak_bytes(record("standard", 1, status="oom")) is None


def test_losses_are_compared_only_between_methods_of_the_same_run():
    runs = [record("standard", 1, losses=(2.0,)), record("streambp", 2, losses=(3.0,))]
    assert loss_agreement(runs) is None
    runs.append(record("checkpointing", 1, losses=(1.0,)))
    assert loss_agreement(runs) == pytest.approx(0.5)


@pytest.mark.parametrize("lengths", [[8], [8, 16, 32]])
def test_plot_is_a_picture_also_with_runs_that_failed(tmp_path, lengths):
    runs = [record(method, t) for method in ("standard", "streambp", "new") for t in lengths]
    runs.append(record("standard", 64, status="oom"))
    path = save_plot(runs, tmp_path / "plot.png")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plot.png"]
    height, width = matplotlib.image.imread(path).shape[:2]
    assert width > 1000 and height > 400
