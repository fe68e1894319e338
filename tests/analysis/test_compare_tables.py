"""Published numbers stand beside ours with the right ratio; OOM and provenance are never lost."""

import csv
import io
import shutil
import subprocess

import pytest
from made_up import GIB, make_paper_records, make_record, make_search

from analysis import compare, headlines, load, tables
from analysis.tables.__main__ import main
from analysis.tables.latex import latex_escape
from streambp.bench import paper
from streambp.bench.records import RunRecord


@pytest.fixture(scope="module")
def records():
    return make_paper_records()


def test_every_published_number_is_read():
    counts = {}
    for cell in paper.cells():
        counts[cell.experiment] = counts.get(cell.experiment, 0) + 1
    assert counts == {
        "bp_memory_figure": 97,
        "max_seq_len_table": 54,
        "bp_time_table": 32,
        "batch_table": 12,
        "linear_example": 18,
        "other_models": 24,
    }
    by_label = {(c.experiment, c.quantity, c.label): c.value for c in paper.cells()}
    label = "qwen3_8b full checkpointing T 20000 batch 1"
    assert by_label["bp_memory_figure", "peak_bytes", label] == 77.0 * GIB
    label = "grpo qwen3_8b full streambp batch 1"
    assert by_label["max_seq_len_table", "max_seq_len_tokens", label] is None


def test_a_record_finds_its_published_cell():
    record = make_record("bp_memory_figure", method={"name": "checkpointing"}, seq_len=20000)
    (row,) = paper.comparison(record)
    assert row["published"] == 77.0 * GIB
    assert row["ratio"] == pytest.approx(record.memory["peak_allocated_bytes"] / (77.0 * GIB))
    assert (row["source"], row["unit"]) == ("figure 3", "bytes")
    assert row["provenance"] == "simulated"
    for change in ({"seq_len": 20001}, {"tuning": {"name": "lora"}}, {"device": {"name": "cpu"}}):
        other = {"method": {"name": "checkpointing"}, "seq_len": 20000, **change}
        assert paper.comparison(make_record("bp_memory_figure", **other)) == []


def test_a_search_compares_with_lengths_only():
    record = make_search("max_seq_len_table", "seq_len", 36000)
    (row,) = paper.comparison(record)
    assert (row["quantity"], row["published"], row["ratio"]) == ("max_seq_len_tokens", 72000, 0.5)
    assert paper.comparison(make_search("batch_table", "batch_size", 5)) == []


@pytest.mark.parametrize("experiment", paper.EXPERIMENTS)
def test_every_table_renders_in_every_format(records, experiment):
    built = tables.tables(records, experiment)
    assert built
    for table in built:
        assert sum(span for _, span in table.groups) == len(table.columns)
        assert all(len(row) == len(table.columns) for row in table.rows)
        markdown = table.to_markdown().splitlines()
        assert {line.count(" | ") for line in markdown if line.startswith("| ")} == {
            len(table.columns) - 1
        }
        lines = list(csv.DictReader(io.StringIO(table.to_csv())))
        assert len(lines) == len(table.data)
        assert {"quantity", "provenance", "ours", "published", "ratio"} <= set(lines[0])
        assert table.to_latex().count(r"\\") >= len(table.rows) + 1
        for word in ("torch 2.13.0", "transformers 5.24.0", "streambp 0.1.0"):
            assert word in table.caption


@pytest.mark.parametrize("experiment", paper.EXPERIMENTS)
def test_measured_and_simulated_never_share_a_table(records, experiment):
    for table in tables.tables(records, experiment):
        run = table.data[table.data["device_label"].notna()]
        assert run["device_label"].nunique() == 1
        for quantity, group in run.groupby("quantity"):
            assert group["provenance"].nunique() == 1, quantity
            (kind,) = group["provenance"].unique()
            assert kind in table.caption
            assert any(kind in column for column in table.columns)


def test_the_memory_table_shows_numbers_ratios_and_oom(records):
    table = tables.tables(records, "bp_memory_figure")[0]
    rows = {row[2]: row for row in table.rows}
    columns = table.columns
    assert columns[3:6] == ["published", "simulated", "ratio"]
    peak = 30.5 * GIB + 10e6 * 1000
    assert rows["1,000"][3:6] == ["40.14", f"{peak / GIB:.2f}", f"{peak / GIB / 40.14:.3f}"]
    need = (30.5 * GIB + 10e6 * 20000) / GIB
    assert rows["20,000"][3:6] == ["–", f"OOM ({need:.2f})", "–"]
    assert "simulated, chunk 500, head 100" in columns
    published = 77.00 / 39.19
    assert rows["20,000"][-2] == f"{published:.2f}"


def test_our_options_name_our_column_and_never_the_published_one(records):
    table = tables.tables(records, "other_models")[0]
    heads = table.to_markdown().splitlines()[2]
    assert (
        "| streambp published | streambp simulated, chunk 500, head 100 | streambp ratio" in heads
    )
    assert "streambp" in [heading for heading, _ in table.groups]


def test_options_that_all_runs_share_stand_in_a_heading_of_ours_alone():
    method = {"name": "streambp", "chunk_size": 64}
    found = [make_record("other_models", method=method, device={"name": "cpu"})]
    (table,) = tables.tables(found, "other_models")
    assert table.groups[1] == ("streambp (chunk 64)", 1)
    assert table.columns[3:] == ["measured", "ours"]


def test_a_published_time_of_what_does_not_fit_here_has_a_note():
    found = [
        make_record("batch_table", model={"name": "qwen3_4b"}, seq_len=9000, **settings)
        for settings in (
            {"method": {"name": "checkpointing"}, "batch_size": 4, "memory": OVER},
            {"method": {"name": "checkpointing"}, "batch_size": 16, "memory": OVER},  # in both
            {"method": {"name": "streambp"}, "batch_size": 4},
        )
    ]
    (table,) = tables.tables(found, "batch_table")
    assert table.caption.endswith(
        "Published, but out of memory here: checkpointing at T = 9,000, batch 4 "
        "(published 7.04 s, simulated peak 93.79 GiB of 78.14 usable)."
    )
    assert "out of memory here" not in tables.tables(found[1:], "batch_table")[0].caption


OVER = {
    "peak_allocated_bytes": 100_706_000_000,
    "budget_bytes": 83_900_000_000,
    "fits": False,
    "gpu": {"name": "a800_80gb"},
}


def test_a_published_oom_is_shown(records):
    table = tables.tables(records, "bp_time_table")[0]
    row = next(row for row in table.rows if row[1] == "27,000")
    heading = [head for head, span in table.groups for _ in range(span)]
    cells = {
        (h, c): v for h, c, v in zip(heading, table.columns, row, strict=True) if c == "published"
    }
    assert cells["checkpointing", "published"] == "OOM"
    assert cells["streambp", "published"] == "25.80"
    assert cells["mst", "published"] == "31.80"


def test_searches_show_their_outcome():
    found = [
        make_search("max_seq_len_table", "seq_len", None, outcome="nothing_fits"),
        make_search(
            "max_seq_len_table",
            "seq_len",
            4_000_000,
            outcome="everything_fits",
            method={"name": "checkpointing"},
        ),
    ]
    (table,) = tables.tables(found, "max_seq_len_table")
    text = table.to_markdown()
    assert "none fits" in text
    assert "≥ 4,000,000" in text


def test_a_caption_says_which_model_took_what_for_granted():
    kept, masked = (
        {"outputs_kept": True, "mask": "none"},
        {"outputs_kept": True, "mask": "additive"},
    )
    found = [
        make_record(
            "other_models",
            model={"name": model},
            method={"name": method},
            device={"assumptions": assumptions},
        )
        for model, assumptions in (("llama_3_1_8b", masked), ("gemma_3_1b", kept))
        for method in ("standard", "checkpointing", "streambp")
    ]
    (table,) = tables.tables(found, "other_models")
    outputs = "model outputs kept alive in backward"
    runs = "standard and checkpointing of {}"
    assert f"{runs.format('gemma_3_1b')} with {outputs}" in table.caption
    assert f"{runs.format('llama_3_1_8b')} with an additive mask, {outputs}" in table.caption
    (table,) = tables.tables(found[:2], "other_models")
    assert f"Simulated standard and checkpointing with an additive mask, {outputs}" in table.caption


def test_a_failed_run_is_named_in_its_cell():
    found = [make_record("bp_memory_figure", status="error", detail="x")]
    (table,) = tables.tables(found, "bp_memory_figure")
    assert "error" in table.rows[0]


def test_a_simulated_peak_over_the_budget_is_oom_whatever_the_status():
    record = make_record("bp_memory_figure", method={"name": "standard"}, seq_len=20000)
    record.status = "ok"
    numbers = compare.comparison([record], "bp_memory_figure")
    (row,) = numbers[numbers["device_label"].notna()].to_dict("records")
    assert row["cell"] == "oom"
    assert row["ratio"] is None or row["ratio"] != row["ratio"]


def test_the_largest_batch_has_its_own_table(records):
    time_table, batch_table = tables.tables(records, "batch_table")
    assert batch_table.rows[0][-4:] == ["8", "37", "4.50", f"{37 / 8:.2f}"]
    assert batch_table.columns[-2:] == ["published claim", "ours"]
    assert "4.5" in batch_table.caption
    per_sample = SPEED_STREAMBP * 9000
    assert any(f"{per_sample:.2f}" in cell for row in time_table.rows for cell in row)


SPEED_STREAMBP = 3.6e-4


def test_headlines_put_ours_beside_the_published(records):
    lines = headlines.headlines(records)
    longest = next(line for line in lines if line.setting.startswith("sft, qwen3_8b, full"))
    assert longest.published == pytest.approx(72000 / 15700)
    assert longest.ours == pytest.approx(2.3 / 0.43, rel=1e-3)
    assert longest.provenance == "simulated"
    (batch,) = (line for line in lines if line.what == "Larger batch than checkpointing")
    assert (batch.published, batch.ours) == (4.5, 37 / 8)
    assert {line.device_label for line in lines} >= {"CPU (Some CPU, 2 cores)"}
    assert headlines.headlines([]) == []


def test_a_headline_is_of_a_length_that_the_paper_has_too():
    config = {"model": {"name": "qwen3_4b"}, "memory": {"fits": True, "gpu": {"name": "a800_80gb"}}}
    found = [
        make_record("bp_time_table", method={"name": name}, seq_len=seq_len, **config)
        for name in ("checkpointing", "streambp")
        for seq_len in (6000, 24000, 27000)  # published at 27,000: checkpointing is OOM
    ]
    shorter = [record for record in found if record.config["seq_len"] <= 24000]
    for records in (found, shorter):
        (line,) = headlines.headlines(records)
        assert "T = 24,000" in line.setting
        assert line.published == pytest.approx(24.3 / 21.2)
    only = [record for record in found if record.config["seq_len"] == 27000]
    (line,) = headlines.headlines(only)
    assert ("T = 27,000" in line.setting, line.published) == (True, None)


def test_an_unknown_experiment_is_refused(records):
    with pytest.raises(ValueError, match=r"bp_memory_figur.*Fix: one of bp_memory_figure"):
        tables.tables(records, "bp_memory_figur")


def test_no_records_no_tables():
    assert all(tables.tables([], experiment) == [] for experiment in paper.EXPERIMENTS)


def test_latex_is_accepted_by_latex(records, tmp_path):
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex on this machine")
    body = "".join(t.to_latex() for t in tables.tables(records, "bp_memory_figure"))
    text = r"\documentclass{article}\usepackage{booktabs}\begin{document}" + body
    (tmp_path / "t.tex").write_text(text + r"\end{document}")
    subprocess.run(
        ["pdflatex", "-interaction=batchmode", "t.tex"], cwd=tmp_path, check=True, timeout=60
    )


def test_latex_escapes_what_latex_reads():
    assert latex_escape("a_b & 5% ≥ 10⁹") == r"a\_b \& 5\% $\geq$ $10^9$"


def test_the_command_writes_every_table(paper_runs, tmp_path, capsys):
    assert main([str(paper_runs), "--out", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    for experiment in paper.EXPERIMENTS:
        assert {f"{experiment}.{suffix}" for suffix in ("md", "csv", "tex")} <= names
    assert "bp_memory_figure_2.md" in names
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_records_written_by_real_runs_compare_too(paper_runs):
    found = load.records(paper_runs)
    assert all(isinstance(record, RunRecord) for record in found)
    assert compare.comparison(found, "other_models")["ratio"].notna().any()
