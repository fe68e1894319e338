"""The paper's figures with our numbers beside the published ones.

Ours are solid lines with filled markers, published numbers dashed with hollow ones; what did not
fit is a cross labelled OOM at the top. `plots(records, experiment)` gives a `Picture` per device
and dtype; `python -m analysis.plots runs --out plots` writes them all as PNG, SVG and PDF.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.captions import caption
from analysis.compare import ANSWERED, Context, comparison, contexts, method_order, within
from analysis.load import GIB, records
from analysis.timeline import timeline_figure
from streambp.bench import paper
from streambp.bench.records import RunRecord

GB = 1e9
_HEADROOM = 1.2  # of the y axis: room for the crosses of what did not fit


@dataclass(frozen=True)
class Picture:
    """A figure that is ready to be saved under `name`."""

    name: str
    title: str
    caption: str
    figure: Figure = field(repr=False, compare=False)


def plots(found: Iterable[RunRecord], experiment: str) -> list[Picture]:
    """The pictures of one experiment, none without numbers.

    Raises:
        ValueError: not one of the paper's experiments.
    """
    if experiment not in _BUILDERS:
        known = ", ".join(_BUILDERS)
        raise ValueError(f"experiment={experiment!r}: not one of the paper's. Fix: one of {known}")
    numbers = comparison(found, experiment)
    pictures = []
    for index, context in enumerate(contexts(numbers)):
        rows = within(numbers, context)
        run = rows[rows["device_label"].notna()]
        if not (run["ours"].notna() & run["cell"].isin(ANSWERED)).any():
            continue
        with style.styled():
            for name, title, text, figure in _BUILDERS[experiment](rows, context):
                suffix = f"_{index + 1}" if index else ""
                pictures.append(Picture(f"{name}{suffix}", title, text, figure))
    return pictures


_Drawn = tuple[str, str, str, Figure]


def _variants(rows: pd.DataFrame) -> list[str]:
    """Our variants in the order of the paper's methods, the plainest first."""
    run = rows[rows["device_label"].notna()]
    names = dict.fromkeys(zip(run["method"], run["variant"], strict=True))
    ordered = sorted(names, key=lambda pair: (method_order(pair[0]), len(pair[1]), pair[1]))
    return [variant for _, variant in ordered]


# Further variants of a method, one after the other: dash pattern and marker fill.
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.2)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def _draw_lines(
    axes: Axes, rows: pd.DataFrame, x: str, scale: float, *, published: bool = True
) -> None:
    """A line per variant, and a dashed one per published method."""
    methods = sorted(dict.fromkeys(rows["method"]), key=method_order)
    for method in methods:
        own = rows[rows["method"] == method]
        colour, marker = style.method_style(method, methods)
        known = own[own["published"].notna()].drop_duplicates(x).sort_values(x)
        if published and len(known):
            axes.plot(
                known[x],
                known["published"] / scale,
                color=colour,
                marker=marker,
                markerfacecolor="white",
                markersize=6.5,
                linestyle=":",
                linewidth=1.1,
                zorder=3,
            )
        for index, variant in enumerate(v for v in _variants(own)):
            line = own[(own["variant"] == variant) & own["cell"].isin(ANSWERED)]
            line = line[line["ours"].notna()].sort_values(x)
            axes.plot(
                line[x],
                line["ours"] / scale,
                color=colour,
                marker=marker,
                markersize=3.5,
                linestyle=_LINES[index % len(_LINES)],
                zorder=3.5,
            )


def _mark_oom(axes: Axes, rows: pd.DataFrame, x: str) -> None:
    """Crosses along the top for the settings that did not fit, a row per variant."""
    lost = rows[rows["cell"] == "oom"]
    if lost.empty:
        return
    variants = [v for v in _variants(rows) if (lost["variant"] == v).any()]
    methods = list(dict.fromkeys(rows["method"]))
    for height, variant in enumerate(variants):
        found = lost[lost["variant"] == variant]
        colour, _ = style.method_style(found["method"].iloc[0], methods)
        axes.plot(
            found[x],
            [0.985 - 0.042 * height] * len(found),
            color=colour,
            marker="x",
            markersize=6,
            markeredgewidth=1.8,
            linestyle="none",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            zorder=4,
        )


def _legend(rows: pd.DataFrame, *, published: bool = True) -> tuple[list[Any], list[str]]:
    """A handle per variant with its provenance, per published method, and for OOM."""
    handles, labels = [], []
    methods = sorted(dict.fromkeys(rows["method"]), key=method_order)
    for method in methods:
        own = rows[rows["method"] == method]
        colour, marker = style.method_style(method, methods)
        for index, variant in enumerate(_variants(own)):
            kinds = own.loc[own["variant"] == variant, "provenance"].dropna()
            kinds = " / ".join(sorted(set(kinds)))
            line = _LINES[index % len(_LINES)]
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle=line))
            labels.append(f"{variant}, {kinds}" if kinds else variant)
        if published and own["published"].notna().any():
            handles.append(
                Line2D(
                    [],
                    [],
                    color=colour,
                    marker=marker,
                    markerfacecolor="white",
                    linestyle=":",
                    linewidth=1.1,
                )
            )
            labels.append(f"{method}, published")
    if (rows["cell"] == "oom").any():
        handles.append(
            Line2D([], [], color="#555555", marker="x", linestyle="none", markeredgewidth=1.8)
        )
        labels.append("OOM: does not fit")
    return handles, labels


def _text(rows: pd.DataFrame) -> str:
    return caption(rows, published=bool(rows["published"].notna().any()))


def _panels(count: int, height: float, columns: int = 3) -> tuple[Figure, list[Axes]]:
    columns = min(columns, count)
    lines = -(-count // columns)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(style.WIDTH, height * lines + 0.4),
        layout="constrained",
        squeeze=False,
    )
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def _memory(rows: pd.DataFrame, context: Context) -> list[_Drawn]:
    """Peak memory over sequence length, a panel per model (figure 3, table 9)."""
    run = rows[rows["device_label"].notna()]
    settings = list(dict.fromkeys(zip(run["model"], run["tuning"], strict=True)))
    figure, panels = _panels(len(settings), 3.6 if len(settings) > 1 else 3.9)
    for axes, (model, tuning) in zip(panels, settings, strict=True):
        own = rows[(rows["model"] == model) & (rows["tuning"] == tuning)]
        _draw_lines(axes, own, "seq_len_tokens", GIB)
        _mark_oom(axes, own, "seq_len_tokens")
        _mark_budget(axes, own)
        axes.set_title(f"{model}, {tuning}", loc="left")
        axes.set_xlabel("Sequence length (tokens)")
        axes.set_xlim(left=0)
        highest = own[["ours", "published", "budget_bytes"]].where(own["cell"] != "oom").max().max()
        axes.set_ylim(0, highest / GIB * _HEADROOM)
        style.tokens(axes.xaxis)
    panels[0].set_ylabel("Peak memory (GiB)")
    experiment = run["experiment"].iloc[0]
    title = f"Peak memory over sequence length, {context.device_label}"
    text = _text(rows)
    return [(experiment, title, text, style.finish(figure, title, text, legend=_legend(rows)))]


def _mark_budget(axes: Axes, rows: pd.DataFrame) -> None:
    """A line at the memory that tensors may have, and one at what is resident in any method."""
    budgets = rows["budget_bytes"].dropna().unique()
    if len(budgets) == 1:
        _level(axes, budgets[0] / GIB, f"{budgets[0] / GIB:.1f} GiB usable", above=True)
    resident = (rows["weights_bytes"] + rows["gradients_bytes"]).dropna().unique()
    if len(resident) == 1:
        _level(axes, resident[0] / GIB, f"weights, gradients {resident[0] / GIB:.3g} GiB")


def _level(axes: Axes, height: float, label: str, *, above: bool = False) -> None:
    """A thin labelled line across; above: label over it, else under it."""
    style_ = "-" if above else "--"
    axes.axhline(height, color="#999999", linewidth=0.9, linestyle=style_, zorder=1)
    axes.annotate(
        label,
        (0.99, height),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2 if above else -2.5),
        textcoords="offset points",
        ha="right",
        va="bottom" if above else "top",
        fontsize=7.5,
        color="#666666",
    )


def _bars(axes: Axes, rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Grouped bars, a group per setting, ours solid and the published ones hatched beside.

    Wants the limits of the y axis set. Returns the labels of the series.
    """
    run = rows[rows["device_label"].notna()]
    settings = list(dict.fromkeys(run[list(keys)].itertuples(index=False, name=None)))
    series: list[tuple[str, str | None]] = []
    for method in sorted(dict.fromkeys(run["method"]), key=method_order):
        own = rows[rows["method"] == method]
        if own["published"].notna().any():
            series.append((method, None))
        series += [(method, variant) for variant in _variants(own)]
    width = 0.84 / len(series)
    for index, (method, variant) in enumerate(series):
        colour, _ = style.method_style(method)
        for place, setting in enumerate(settings):
            same = np.logical_and.reduce(
                [rows[key] == value for key, value in zip(keys, setting, strict=True)]
            )
            own = rows[same & (rows["method"] == method)]
            value, label = _bar_value(own, variant)
            x = place - 0.42 + width * (index + 0.5)
            if value is not None:
                axes.bar(
                    x,
                    value,
                    width * 0.92,
                    facecolor=colour if variant else "white",
                    edgecolor=colour,
                    hatch=None if variant else "////",
                    linewidth=0.9,
                )
            axes.annotate(
                label,
                (x, value or axes.get_ylim()[0]),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90 if len(series) * len(settings) > 6 else 0,
                fontsize=7,
                color="#333333" if value is not None else colour,
            )
    labels = [", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in s) for s in settings]
    axes.set_xticks(range(len(settings)), labels)
    axes.set_xlim(-0.6, len(settings) - 0.4)
    axes.grid(axis="x", visible=False)
    return [_series_label(rows, method, variant) for method, variant in series]


def _bar_value(own: pd.DataFrame, variant: str | None) -> tuple[float | None, str]:
    """(height or None, what is written above) of one bar; variant None: the published one."""
    if variant is None:
        stated = own[own["published_fits"].isin([True, False])]
        if stated.empty:
            return None, ""
        value = stated["published"].iloc[0]
        return (None, "OOM") if value != value else (float(value), f"{value:,.0f}")
    found = own[(own["variant"] == variant) & own["device_label"].notna()]
    if found.empty:
        return None, ""
    row = found.iloc[0]
    if row["cell"] not in ANSWERED or row["ours"] != row["ours"]:
        return None, {"nothing_fits": "none fits", "oom": "OOM"}.get(row["cell"], row["cell"])
    bound = "≥ " if row["cell"] == "lower_bound" else ""
    return float(row["ours"]), f"{bound}{row['ours']:,.0f}"


def _series_label(rows: pd.DataFrame, method: str, variant: str | None) -> str:
    if variant is None:
        return f"{method}, published"
    kinds = sorted(set(rows.loc[rows["variant"] == variant, "provenance"].dropna()))
    return f"{variant}, {' / '.join(kinds)}" if kinds else variant


def _bar_legend(labels: Sequence[str]) -> tuple[list[Any], list[str]]:
    handles = []
    for label in labels:
        colour, _ = style.method_style(label.split(" (")[0].split(",")[0])
        published = label.endswith(", published")
        handles.append(
            plt.Rectangle(
                (0, 0),
                1,
                1,
                facecolor="white" if published else colour,
                edgecolor=colour,
                hatch="////" if published else None,
            )
        )
    return handles, list(labels)


def _max_seq_len(rows: pd.DataFrame, context: Context) -> list[_Drawn]:
    """Longest sequences as bars (table 3), a panel per tuning."""
    run = rows[rows["device_label"].notna()]
    rows = rows[rows["objective"].isin(run["objective"].unique())]
    tunings = list(dict.fromkeys(run["tuning"]))
    figure, panels = _panels(len(tunings), 3.7, columns=1)
    labels: list[str] = []
    for axes, tuning in zip(panels, tunings, strict=True):
        own = rows[rows["tuning"] == tuning]
        known = own[["ours", "published"]].astype(float)
        lowest, highest = known.min().min(), known.max().max()
        log = bool(highest > 20 * lowest)
        if log:
            axes.set_yscale("log")
            axes.set_ylim(lowest / 3, highest * 5)
        else:
            axes.set_ylim(0, highest * 1.35)
        found = _bars(axes, own, ("model",))
        labels += [label for label in found if label not in labels]
        axes.set_title(f"{tuning} tuning", loc="left")
        axes.set_ylabel("Longest sequence (tokens" + (", log scale)" if log else ")"))
    title = f"Longest sequence of a whole training step, {context.device_label}"
    text = _text(rows)
    figure = style.finish(figure, title, text, legend=_bar_legend(labels))
    return [("max_seq_len_table", title, text, figure)]


def _time(rows: pd.DataFrame, context: Context) -> list[_Drawn]:
    """Seconds over sequence length (table 1), and the ratio to checkpointing below."""
    figure, (top, bottom) = plt.subplots(
        2,
        1,
        figsize=(style.WIDTH, 5.6),
        layout="constrained",
        sharex=True,
        height_ratios=(2, 1.2),
    )
    _draw_lines(top, rows, "seq_len_tokens", 1)
    _mark_oom(top, rows, "seq_len_tokens")
    top.set_ylabel("Forward + backward (s)")
    top.set_ylim(0, _timed_top(rows))
    top.set_title(_models(rows), loc="left")
    _ratio_lines(bottom, rows, "seq_len_tokens")
    bottom.set_ylabel("Time relative to\ncheckpointing")
    bottom.set_xlabel("Sequence length (tokens)")
    style.tokens(bottom.xaxis)
    title = f"Time of a forward and backward pass, {context.device_label}"
    text = _text(rows)
    return [("bp_time_table", title, text, style.finish(figure, title, text, legend=_legend(rows)))]


def _ratio_lines(axes: Axes, rows: pd.DataFrame, x: str) -> None:
    """Each method's time over that of checkpointing of the same kind (ours, published)."""
    methods = sorted(dict.fromkeys(rows["method"]), key=method_order)
    axes.axhline(1, color="#999999", linewidth=0.9)
    for column in ("ours", "published"):
        usable = rows[rows[column].notna()]
        base = usable[usable["method"] == "checkpointing"].drop_duplicates(x).set_index(x)[column]
        for method in (name for name in methods if name not in ("checkpointing", "standard")):
            own = usable[usable["method"] == method]
            names = _variants(own) if column == "ours" else ["published"]
            for index, variant in enumerate(names):
                line = own if column == "published" else own[own["variant"] == variant]
                line = line.drop_duplicates(x).set_index(x)[column]
                ratio = (line / base).dropna().sort_index()
                colour, marker = style.method_style(method, methods)
                published = column == "published"
                axes.plot(
                    ratio.index,
                    ratio.to_numpy(),
                    color=colour,
                    marker=marker,
                    markersize=4,
                    linestyle=":" if published else _LINES[index % len(_LINES)],
                    markerfacecolor="white" if published else colour,
                )


def _timed_top(rows: pd.DataFrame) -> float:
    """The upper limit of an axis of seconds, with room for the marks of what did not fit."""
    return float(rows[["ours", "published"]].astype(float).max().max()) * _HEADROOM


def _models(rows: pd.DataFrame) -> str:
    run = rows[rows["device_label"].notna()]
    return ", ".join(dict.fromkeys(run["model"].dropna()))


def _batch(rows: pd.DataFrame, context: Context) -> list[_Drawn]:
    """Seconds per sequence by batch size (table 2), and the largest batch."""
    timed = rows[rows["quantity"] == "per_sample_time_s"]
    searched = rows[rows["quantity"] == "max_batch_size"]
    has_time = bool(timed["ours"].notna().any())
    has_search = bool(searched["ours"].notna().any())
    figure, panels = _panels(max(1, has_time + has_search), 3.9, columns=2)
    labels: list[str] = []
    if has_time:
        axes = panels[0]
        _draw_lines(axes, timed, "batch_size", 1)
        _mark_oom(axes, timed, "batch_size")
        axes.set_xscale("log", base=2)
        sizes = sorted(timed["batch_size"].dropna().unique())
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.set_xlabel("Batch size (sequences)")
        axes.set_ylabel("Forward + backward per sequence (s)")
        axes.set_ylim(0, _timed_top(timed))
        run = timed[timed["device_label"].notna()]
        axes.set_title(f"{_models(timed)}, T = {run['seq_len_tokens'].iloc[0]:,.0f}", loc="left")
    if has_search:
        axes = panels[-1]
        axes.set_ylim(0, float(searched["ours"].max()) * 1.2)
        labels = _bars(axes, searched, ("model", "seq_len_tokens"))
        axes.set_ylabel("Largest batch (sequences)")
        axes.set_xlabel("model, T")
        axes.set_title("Whole training step", loc="left")
    title = f"Batch size, {context.device_label}"
    text = _text(rows)
    legend = _legend(timed) if has_time else _bar_legend(labels)
    if has_time and has_search:
        handles, names = _bar_legend(labels)
        legend = (legend[0] + handles, legend[1] + names)
    return [("batch_table", title, text, style.finish(figure, title, text, legend=legend))]


def _linear(rows: pd.DataFrame, context: Context) -> list[_Drawn]:
    """Memory and time of the linear example over the number of chunks (table 8)."""
    panels_of = (
        ("peak_bytes", "Peak memory (10⁹ bytes)", GB),
        ("intermediate_peak_bytes", "Intermediate peak (10⁹ bytes)", GB),
        ("forward_backward_time_s", "Forward + backward (s)", 1.0),
    )
    figure, panels = _panels(3, 3.1)
    for axes, (quantity, label, scale) in zip(panels, panels_of, strict=True):
        own = rows[rows["quantity"] == quantity].sort_values("num_chunks")
        kinds = " / ".join(sorted(set(own["provenance"].dropna())))
        colour, marker = style.METHODS["streambp"]
        run = own[own["ours"].notna()]
        known = own[own["published"].notna()]
        axes.plot(
            known["num_chunks"],
            known["published"] / scale,
            color="#555555",
            marker="s",
            markerfacecolor="white",
            markersize=6,
            linestyle=":",
        )
        axes.plot(run["num_chunks"], run["ours"] / scale, color=colour, marker=marker)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(0, own[["ours", "published"]].max().max() / scale * 1.1)
        axes.set_title(label, loc="left", fontsize=9)
        axes.set_xlabel(f"Number of chunks\n(ours: {kinds})" if kinds else "Number of chunks")
    legend_handles = [panels[0].lines[1], panels[0].lines[0]]
    labels = ["ours", "published"]
    if not rows["published"].notna().any():
        legend_handles, labels = legend_handles[:1], labels[:1]
    title = f"Linear example, {context.device_label}"
    text = _text(rows)
    figure = style.finish(figure, title, text, legend=(legend_handles, labels))
    return [("linear_example", title, text, figure)]


def _ablation(rows: pd.DataFrame, context: Context) -> list[_Drawn]:
    """Peak memory and time over the chunk size (figure 5); checkpointing as a level."""
    figure, panels = _panels(2, 3.5, columns=2)
    for axes, (quantity, label, scale) in zip(
        panels,
        (
            ("peak_bytes", "Peak memory (GiB)", GIB),
            ("forward_backward_time_s", "Forward + backward (s)", 1.0),
        ),
        strict=True,
    ):
        own = rows[(rows["quantity"] == quantity) & rows["cell"].isin(ANSWERED)]
        kinds = " / ".join(sorted(set(own["provenance"].dropna())))
        chunked = own[own["chunk_size_tokens"].notna()].sort_values("chunk_size_tokens")
        colour, marker = style.METHODS["streambp"]
        axes.plot(
            chunked["chunk_size_tokens"], chunked["ours"] / scale, color=colour, marker=marker
        )
        for row in own[own["method"].isin(["checkpointing", "standard"])].itertuples():
            value: Any = row.ours
            colour = style.METHODS[str(row.method)][0]
            axes.axhline(value / scale, color=colour, linestyle="--")
        axes.set_xscale("log")
        sizes = sorted(chunked["chunk_size_tokens"].unique())
        axes.set_xticks(sizes, [style.thousands(size) for size in sizes], rotation=45)
        axes.minorticks_off()
        axes.set_ylim(0, float(own["ours"].max()) / scale * 1.1)
        axes.set_title(f"{label}, {kinds}", loc="left")
        axes.set_xlabel("Chunk size (tokens)")
    run = rows[rows["device_label"].notna()]
    handles: list[Any] = [Line2D([], [], color=style.METHODS["streambp"][0], marker="o")]
    labels = ["streambp"]
    for method in ("standard", "checkpointing"):
        if (run["method"] == method).any():
            handles.append(Line2D([], [], color=style.METHODS[method][0], linestyle="--"))
            labels.append(f"{method} (no chunks)")
    length = ", ".join(f"{value:,.0f}" for value in dict.fromkeys(run["seq_len_tokens"]))
    title = f"Chunk size, {_models(rows)}, T = {length}, {context.device_label}"
    text = f"{_text(rows)} The paper gives no numbers for its figure 5."
    figure = style.finish(figure, title, text, legend=(handles, labels))
    return [("chunk_size_ablation", title, text, figure)]


_Builder = Callable[[pd.DataFrame, Context], list[_Drawn]]
_BUILDERS: dict[str, _Builder] = {
    "bp_memory_figure": _memory,
    "max_seq_len_table": _max_seq_len,
    "bp_time_table": _time,
    "batch_table": _batch,
    "linear_example": _linear,
    "other_models": _memory,
    "chunk_size_ablation": _ablation,
}


def write(found: Sequence[RunRecord], out: Path) -> list[Path]:
    """Write every picture, and a timeline for each run that stored one, below `out`."""
    files = []
    for experiment in paper.EXPERIMENTS:
        for picture in plots(found, experiment):
            files += style.save(picture.figure, out / picture.name)
    for record in found:
        if record.path is not None and (record.path.parent / "timeline.json").exists():
            figure = timeline_figure(record)
            files += style.save(figure, out / f"timeline_{record.job}")
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.plots", description=__doc__)
    parser.add_argument("runs", nargs="*", default=["runs"], help="folders with records")
    parser.add_argument("--out", type=Path, default=Path("plots"), help="where to write")
    options = parser.parse_args(arguments)
    try:
        found = records(*options.runs)
        files = write(found, options.out)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(files)} files in {options.out}, from {len(found)} records")
    return 0


if __name__ == "__main__":
    sys.exit(main())
