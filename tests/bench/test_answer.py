"""One simulated run answers everything at once, beside gradient checkpointing."""

import pytest
from rich.console import Console

from streambp.bench.answer import answer_heading, answer_lines, answer_table, has_answer
from streambp.bench.display import Display
from streambp.bench.records import RunRecord

GIB = 2**30


def memory(fits, peak_gib, **categories):
    return {
        "peak_allocated_bytes": peak_gib * GIB,
        "peak_reserved_bytes": (peak_gib + 1) * GIB,
        "peak_reserved_expandable_bytes": None,
        "peak_phase": "forward/head",
        "peak_op": "_to_copy.default",
        "peak_by_category_bytes": {name: int(gib * GIB) for name, gib in categories.items()},
        "fits": fits,
        "headroom_bytes": (78 - peak_gib) * GIB,
    }


def record(**changes):
    largest = [
        {"name": name, "bytes": num, "shape": [9, 4], "dtype": "float32", "category": category}
        for name, num, category in (
            ("embed", 2 * GIB, "weights"),
            ("lm_head", 2 * GIB, "weights"),
            ("weight_grad_buffers", 4 * GIB, "weight_grad_buffers"),
            ("mm.default", GIB, "activations"),
        )
    ]
    time = {f"{name}_time_s_samples": [1.5] for name in ("forward", "backward", "forward_backward")}
    flops = {"total_flops": 3 * 10**15, "matmul_forward_flops": 10**15}
    values = {
        "run_id": "r",
        "fingerprint": "f",
        "experiment": "e",
        "job": "j",
        "status": "ok",
        "started_at": "",
        "finished_at": "",
        "config": {
            "model": {"name": "qwen3_8b"},
            "method": {"name": "streambp"},
            "tuning": {"name": "full"},
            "device": {"name": "simulated"},
            "seq_len": 32768,
            "batch_size": 1,
        },
        "memory": {
            **memory(True, 70, weights=60, saved_inputs=9.99, inputs=0.01),
            "gpu": {"name": "a800_80gb"},
            "budget_bytes": 78 * GIB,
            "peak_largest": largest,
            "beside": {"method": "checkpointing", **memory(False, 100, weights=60, logits=40)},
        },
        "time": {**time, "beside": {"method": "checkpointing", **time}},
        "flops": {**flops, "beside": {"method": "checkpointing", **flops}},
        "provenance": {"memory": "simulated", "time": "predicted", "flops": "simulated"},
        "notes": ["assumptions: mask none", "predicted time: a roofline", "something else"],
    }
    return RunRecord(**{**values, **changes})


def shown(one):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(answer_table(one))
    return console.export_text()


def cells(text, name):
    line = next(line for line in text.splitlines() if name in line)
    return [cell.strip() for cell in line.split("│")[2:-1]]


def test_the_table_has_every_answer_of_both_methods():
    said = answer_heading(record())
    assert "qwen3_8b, seq_len 32768" in said
    assert "simulated a800_80gb" in said and "78.00 GiB usable; no GPU was used" in said
    text = shown(record())
    assert cells(text, "fits") == ["yes, 8.00 GiB to spare", "no, 22.00 GiB too much"]
    assert cells(text, "simulated peak") == ["70.00", "100.00"]
    assert cells(text, "reached in") == ["forward/head", "forward/head"]
    assert cells(text, "by the op") == ["_to_copy", "_to_copy"]
    assert cells(text, "reserved, default") == ["71.00", "101.00"]
    assert cells(text, "reserved, expandable") == ["-", "-"]
    assert cells(text, "saved inputs") == ["9.99", "0.00"]
    assert cells(text, "logits") == ["0.00", "40.00"]
    assert cells(text, "other") == ["0.01", "0.00"]
    assert cells(text, "FLOPs") == ["3.00e+15", "3.00e+15"]
    assert cells(text, "matmul")[0].split() == ["1.00e+15", "0.00e+00", "0.00e+00"]
    assert cells(text, "predicted time, s: forward and backward") == ["1.500", "1.500"]


def test_checkpointing_itself_stands_alone():
    one = record()
    del one.memory["beside"]
    assert len(cells(shown(one), "fits")) == 1


def test_tensors_are_listed_by_name_the_largest_first():
    title, first, second, third, *notes = answer_lines(record())
    assert title == "largest tensors at the simulated peak (forward/head):"
    assert first == "  4.00 GiB  weight grad buffers  float32 [9, 4]"
    assert second == "  2 x 2.00 GiB  weights: embed, lm_head  float32 [9, 4]"
    assert third == "  1.00 GiB  activations: mm  float32 [9, 4]"
    assert notes == ["assumptions: mask none", "predicted time: a roofline"]


@pytest.mark.parametrize(
    "changes",
    [{"memory": None}, {"search": {"largest": 8}}, {"provenance": {"memory": "measured"}}],
)
def test_other_records_have_no_such_answer(changes):
    assert has_answer(record()) and not has_answer(record(**changes))


def test_a_lone_run_prints_it_and_a_sweep_its_table(tmp_path, capsys):
    one = record()
    one.path = tmp_path / "record.json"
    Display(None).summary([one])
    assert "GiB to spare" in capsys.readouterr().out
    assert not (tmp_path / "timeline.png").exists()  # it stored no timeline
