"""Every plot draws, says what it shows, and lets no text run over another or out of the picture."""

import itertools
import json

import pytest
from made_up import GIB, make_paper_records, make_record, make_timeline, write_all
from matplotlib.text import Text

from analysis import plots, style, timeline
from analysis.plots.__main__ import main
from analysis.tables.__main__ import main as tables_main
from streambp.bench import paper


def texts_inside(figure):
    """Visible texts that hold something, with their extent in pixels."""
    figure.canvas.draw()
    found, out_of_view = [], set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                out_of_view |= {tick.label1, tick.label2}
    for text in figure.findobj(Text):
        if text in out_of_view:
            continue
        box = text.get_window_extent() if text.get_visible() and text.get_text().strip() else None
        if box is not None and box.width > 0:
            found.append((text.get_text(), box))
    return found


def check_layout(figure):
    width, height = figure.canvas.get_width_height()
    inside = texts_inside(figure)
    for text, box in inside:
        assert box.x0 >= -2 and box.y0 >= -2, (text, box)
        assert box.x1 <= width + 2 and box.y1 <= height + 2, (text, box)
    around = [t for t in figure.findobj(Text) if t.get_gid() == style.AROUND]
    assert len(around) == 2
    for own in around:
        box = own.get_window_extent()
        for text, other in inside:
            if text != own.get_text():
                assert not box.overlaps(other), (own.get_text()[:40], text)
    for legend in figure.legends:
        box = legend.get_window_extent()
        for axes in figure.axes:
            assert not box.overlaps(axes.get_tightbbox()), legend.get_texts()[0].get_text()


@pytest.mark.parametrize("experiment", paper.EXPERIMENTS)
def test_every_plot_draws_and_fits(experiment, tmp_path):
    pictures = plots.plots(make_paper_records(), experiment)
    assert pictures
    for picture in pictures:
        check_layout(picture.figure)
        assert "torch 2.13.0" in picture.caption
        assert ("simulated" in picture.title) != ("CPU" in picture.title)
        assert ("measured" in picture.caption) or ("simulated" in picture.caption)
        files = style.save(picture.figure, tmp_path / picture.name)
        assert [file.suffix for file in files] == [".png", ".svg", ".pdf"]
        assert all(file.stat().st_size > 5000 for file in files)


def test_legends_name_the_provenance():
    (picture, cpu) = plots.plots(make_paper_records(), "bp_time_table")
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert "streambp, predicted" in labels
    assert "streambp, published" in labels
    labels = [text.get_text() for text in cpu.figure.legends[0].get_texts()]
    assert "streambp, measured" in labels
    assert not any("published" in label for label in labels)


def test_what_does_not_fit_is_marked():
    picture = plots.plots(make_paper_records(), "bp_memory_figure")[0]
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert "OOM: does not fit" in labels
    crosses = [line for line in picture.figure.axes[0].lines if line.get_marker() == "x"]
    assert sum(len(line.get_xdata()) for line in crosses) > 0


def test_what_the_paper_could_not_fit_is_a_hollow_cross():
    picture, cpu = plots.plots(make_paper_records(), "bp_time_table")
    crosses = [line for line in picture.figure.axes[0].lines if line.get_marker() == "X"]
    found = {(line.get_color(), length / 1000) for line in crosses for length in line.get_xdata()}
    standard, checkpointing = (style.METHODS[name][0] for name in ("standard", "checkpointing"))
    lengths = (9, 12, 15, 18, 21, 24, 27)
    assert found == {(checkpointing, 27), *((standard, length) for length in lengths)}
    assert {line.get_markerfacecolor() for line in crosses} == {"white"}
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert "OOM, published" in labels
    assert all(line.get_marker() != "X" for line in cpu.figure.axes[0].lines)


def test_crosses_of_ours_and_of_the_paper_stand_apart():
    figure = plots.plots(make_paper_records(), "bp_time_table")[0].figure
    figure.canvas.draw()
    rows = {
        line.get_transform().transform((line.get_xdata()[0], line.get_ydata()[0]))[1]
        for line in figure.axes[0].lines
        if line.get_marker() in ("x", "X")
    }
    heights = sorted(rows)
    points = 72 / figure.dpi
    assert len(heights) >= 3
    assert all((b - a) * points > 7 for a, b in itertools.pairwise(heights))


@pytest.mark.parametrize("resident", [3.72, 30.0, 60.0])
def test_labels_of_levels_cover_no_data(resident):
    records = []
    for method, slope in (("standard", 6.5e-3), ("checkpointing", 3.6e-3), ("streambp", 1e-4)):
        for seq_len in (3000, 6000, 9000, 18000):
            peak = int((resident + 0.6 + slope * seq_len) * GIB)
            memory = {
                "peak_allocated_bytes": peak,
                "weights_bytes": int(resident / 2 * GIB),
                "gradients_bytes": int(resident / 2 * GIB),
                "budget_bytes": 83_900_000_000,
                "fits": peak < 83_900_000_000,
                "gpu": {"name": "a800_80gb"},
            }
            config = {"model": {"name": "gemma_3_1b"}, "method": {"name": method}}
            records.append(make_record("other_models", memory=memory, seq_len=seq_len, **config))
    (picture,) = plots.plots(records, "other_models")
    picture.figure.canvas.draw()
    (axes,) = picture.figure.axes
    boxes = {
        text: box
        for text, box in texts_inside(picture.figure)
        if text.endswith("usable") or text.startswith("weights, gradients")
    }
    assert len(boxes) == 2
    budget = axes.transData.transform((0, 83_900_000_000 / GIB))[1]
    assert 0 < boxes["78.1 GiB usable"].y0 - budget < 15  # pixels over its line
    for text, box in boxes.items():
        for line in axes.lines:
            if line.get_marker() not in ("None", None):
                path = line.get_transform().transform_path(line.get_path())
                assert not any(box.contains(x, y) for x, y in path.vertices), (text, line)
                assert not path.intersects_bbox(box, filled=False), (text, line)


def test_long_legend_entries_are_wrapped_and_fit():
    long = {"chunk_size": 500, "head_chunk_size": 100, "recompute_head": True, "split_sums": True}
    records = [
        make_record("bp_memory_figure", method={"name": "streambp", **options}, seq_len=seq_len)
        for options in ({}, long)
        for seq_len in (1000, 20000)
    ]
    (picture,) = plots.plots(records, "bp_memory_figure")
    check_layout(picture.figure)
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    (wrapped,) = (label for label in labels if "split" in label)
    name = "streambp (chunk 500, head 100, recompute head, split sums), simulated"
    assert wrapped.replace("\n", " ") == name
    assert max(map(len, wrapped.splitlines())) <= 48
    columns = style.legend_columns(labels, style.CAPTION_WIDTH)
    assert columns > 1


def test_a_picture_is_the_same_file_twice(tmp_path):
    records = make_paper_records()
    for folder in ("a", "b"):
        picture = plots.plots(records, "linear_example")[0]
        style.save(picture.figure, tmp_path / folder / "p", ["svg"])
    assert (tmp_path / "a/p.svg").read_bytes() == (tmp_path / "b/p.svg").read_bytes()


def test_no_numbers_no_pictures():
    assert plots.plots([], "bp_memory_figure") == []
    assert plots.plots([make_record("bp_memory_figure", status="killed")], "bp_memory_figure") == []
    with pytest.raises(ValueError, match="Fix: one of"):
        plots.plots([], "figure_nine")


@pytest.fixture
def timed(tmp_path):
    records = [make_record("t", method={"name": name}) for name in ("standard", "streambp")]
    write_all(tmp_path, records)
    for record in records:
        (record.path.parent / "timeline.json").write_text(json.dumps(make_timeline()))
    return records


def test_a_timeline_shows_the_pass_by_category(timed):
    figure = timeline.timelines_figure(timed)
    check_layout(figure)
    words = [text for text, _ in texts_inside(figure)]
    assert {"forward", "backward", "mystery", "other", "keys and values"} <= set(words)
    values = make_timeline()
    peak = max(values["live_bytes"]) / GIB
    assert words.count(f"peak {peak:.2f} GiB") == 2
    assert "qwen3_8b, streambp, T = 1,000 (simulated)" in words


def test_what_came_before_the_pass_is_cut(timed):
    figure = timeline.timeline_figure(timed[0])
    (line,) = (line for line in figure.axes[0].lines if len(line.get_xdata()) > 2)
    assert len(line.get_xdata()) == 115
    assert line.get_xdata()[0] == 0


def test_the_timeline_command(timed, tmp_path, capsys):
    folder = str(timed[0].path.parent)
    assert timeline.main([folder, "-o", str(tmp_path / "pic")]) == 0
    assert (tmp_path / "pic.pdf").stat().st_size > 0
    (timed[0].path.parent / "timeline.json").unlink()
    assert timeline.main([folder, "--out", str(tmp_path / "pic")]) == 2
    assert "measure.timeline=true" in capsys.readouterr().err


def test_the_plots_command(timed, tmp_path):
    tables = [r for r in make_paper_records() if r.experiment == "linear_example"]
    write_all(tmp_path, tables)
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    names = {path.stem for path in (tmp_path / "out").iterdir()}
    assert names == {"linear_example", *(f"timeline_{record.job}" for record in timed)}
    assert main([str(tmp_path / "nowhere")]) == 2


def test_a_broken_timeline_is_skipped_by_name_and_the_rest_drawn(timed, tmp_path, capsys):
    broken, whole = timed
    (broken.path.parent / "timeline.json").write_text('{"live_bytes": [1]}')
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert f"warning: skipped {broken.path.parent / 'timeline.json'}" in capsys.readouterr().err
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {f"timeline_{whole.job}"}


def test_records_of_no_experiment_of_the_paper_are_said_to_be_none(tmp_path, capsys):
    write_all(tmp_path / "runs", [make_record("default")])
    for command in (main, tables_main):
        assert command([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
        assert "none of 1 records is of an experiment of the paper" in capsys.readouterr().out
