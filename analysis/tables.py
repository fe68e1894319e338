"""The paper's tables with our numbers beside the published ones: Markdown, CSV and LaTeX.

`tables(records, experiment)` gives one `Table` per device and dtype (and quantity where one table
cannot hold them all). `python -m analysis.tables runs --out tables` writes them all.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.captions import caption
from analysis.compare import (
    Context,
    comparison,
    contexts,
    method_order,
    ratio_of,
    within,
)
from analysis.load import GIB, records
from streambp.bench import paper
from streambp.bench.records import RunRecord

NOT_FITTING = "OOM"
NOTHING = "–"
_STATES = {"oom": NOT_FITTING, "nothing_fits": "none fits", "error": "error", "killed": "killed"}
_CSV_COLUMNS = (
    *("experiment", "quantity", "provenance", "model", "tuning", "lora_rank", "objective"),
    *("method", "variant", "seq_len_tokens", "batch_size", "num_chunks", "ours", "cell"),
    *("published", "published_fits", "ratio", "device_label", "dtype", "optimizer", "assumptions"),
    *("version_streambp", "version_torch", "version_transformers", "git_commit", "finished_at"),
    "path",
)
TITLES = {
    "bp_memory_figure": "Peak memory over sequence length (figure 3)",
    "max_seq_len_table": "Longest sequence of a whole training step (table 3)",
    "bp_time_table": "Time of a forward and backward pass (table 1)",
    "batch_table": "Time per sequence by batch size (table 2)",
    "linear_example": "Linear example by number of chunks (table 8)",
    "other_models": "Peak memory of other models (table 9)",
    "chunk_size_ablation": "Memory and time over the chunk size (figure 5)",
}


@dataclass(frozen=True)
class Table:
    """A table as text. `groups`: (heading, number of columns) above the `columns`."""

    name: str
    title: str
    groups: list[tuple[str, int]]
    columns: list[str]
    rows: list[list[str]]
    caption: str
    num_keys: int
    data: pd.DataFrame = field(repr=False, compare=False)

    def to_markdown(self) -> str:
        """A pipe table under its title, the caption below."""
        heads = self._flat_columns()
        align = ["---"] * self.num_keys + ["---:"] * (len(heads) - self.num_keys)
        lines = [heads, align, *self.rows]
        body = "\n".join("| " + " | ".join(map(_cell_markdown, line)) + " |" for line in lines)
        return f"### {self.title}\n\n{body}\n\n{self.caption}\n"

    def to_csv(self) -> str:
        """The numbers behind the table in bytes, seconds and tokens, one per line."""
        return self.data[[c for c in _CSV_COLUMNS if c in self.data]].to_csv(index=False)

    def to_latex(self) -> str:
        """A `table` environment; needs the package booktabs."""
        spec = "l" * self.num_keys + "r" * (len(self.columns) - self.num_keys)
        lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{spec}}}", r"\toprule"]
        if any(heading for heading, _ in self.groups):
            lines += self._latex_groups()
        lines.append(_latex_line(self.columns) + r" \midrule")
        lines += [_latex_line(row) for row in self.rows]
        lines += [r"\bottomrule", r"\end{tabular}"]
        text = f"{self.title}. {self.caption}"
        lines += [rf"\caption{{{latex_escape(text)}}}", rf"\label{{tab:{self.name}}}"]
        return "\n".join([*lines, r"\end{table}", ""])

    def _latex_groups(self) -> list[str]:
        cells, rules, column = [], [], 1
        for heading, span in self.groups:
            align = "l" if column <= self.num_keys else "c"
            cells.append(rf"\multicolumn{{{span}}}{{{align}}}{{{latex_escape(heading)}}}")
            if heading:
                rules.append(rf"\cmidrule(lr){{{column}-{column + span - 1}}}")
            column += span
        return [" & ".join(cells) + r" \\", " ".join(rules)]

    def _flat_columns(self) -> list[str]:
        heads: list[str] = []
        for heading, span in self.groups:
            for name in self.columns[len(heads) : len(heads) + span]:
                heads.append(f"{heading} {name}".strip())
        return heads


def tables(found: Iterable[RunRecord], experiment: str) -> list[Table]:
    """The tables of one experiment, none without records.

    Raises:
        ValueError: not one of the paper's experiments.
    """
    if experiment not in TITLES:
        known = ", ".join(TITLES)
        raise ValueError(f"experiment={experiment!r}: not one of the paper's. Fix: one of {known}")
    numbers = comparison(found, experiment)
    result = []
    for index, context in enumerate(contexts(numbers)):
        rows = within(numbers, context)
        for table in _BUILDERS[experiment](rows, context, experiment):
            suffix = f"_{index + 1}" if index else ""
            result.append(
                Table(**{**vars(table), "name": f"{table.name}{suffix}"})  # a name for each file
            )
    return result


def bytes_gib(value: float) -> str:
    """Bytes as GiB without the unit, three decimals below 10."""
    gib = value / GIB
    return f"{gib:.2f}" if gib >= 10 else f"{gib:.3f}"


def bytes_gb(value: float) -> str:
    """Bytes as 10^9 bytes without the unit."""
    return f"{value / 1e9:.2f}" if value >= 1e8 else f"{value / 1e9:.4f}"


def seconds(value: float) -> str:
    """Three significant digits or more."""
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def whole(value: float) -> str:
    """A count with thousands separated."""
    return f"{value:,.0f}"


def times(value: float) -> str:
    """A ratio to the published number, to be read as "ours is ... times the published"."""
    return f"{value:.3f}" if 0.1 <= value < 10 else f"{value:.2f}"


Format = Callable[[float], str]
UNITS: dict[str, tuple[str, Format]] = {
    "peak_bytes": ("GiB", bytes_gib),
    "activation_peak_bytes": ("GiB", bytes_gib),
    "intermediate_peak_bytes": ("GiB", bytes_gib),
    "forward_backward_time_s": ("s", seconds),
    "per_sample_time_s": ("s", seconds),
    "max_seq_len_tokens": ("tokens", whole),
    "max_batch_size": ("sequences", whole),
}


def ours_text(row: Any, form: Format) -> str:
    """Our cell: the number, OOM (with the simulated need), or why there is none."""
    if row is None or row["cell"] in ("not_run", "missing"):
        return NOTHING
    value = row["ours"]
    known = value is not None and value == value
    if row["cell"] == "oom":
        return f"{NOT_FITTING} ({form(value)})" if known else NOT_FITTING
    if row["cell"] in _STATES:
        return _STATES[row["cell"]]
    return f"≥ {form(value)}" if row["cell"] == "lower_bound" else form(value)


def published_text(row: Any, form: Format) -> str:
    """The published cell: its number, OOM, or a dash where the paper has none."""
    if row is None or row["published_fits"] not in (True, False):
        return NOTHING
    return form(row["published"]) if row["published_fits"] else NOT_FITTING


@dataclass(frozen=True)
class _Group:
    """Columns under one heading: the published number, then ours and the ratio per variant."""

    heading: str
    rows: pd.DataFrame
    form: Format

    @property
    def variants(self) -> list[str]:
        run = self.rows[self.rows["device_label"].notna()]
        return sorted(dict.fromkeys(run["variant"]), key=lambda name: (len(name), name))

    @property
    def has_published(self) -> bool:
        return bool(self.rows["published_fits"].isin([True, False]).any())

    def columns(self) -> list[str]:
        names = ["published"] if self.has_published else []
        for variant in self.variants:
            options = variant.partition(" (")[2].removesuffix(")")
            word = self._provenance(variant)
            names.append(f"{word}, {options}" if options else word)
            if self.has_published:
                names.append("ratio")
        return names

    def _provenance(self, variant: str) -> str:
        """How our numbers came to be: the heading of their column."""
        kinds = self.rows.loc[self.rows["variant"] == variant, "provenance"].dropna()
        return " / ".join(sorted(set(kinds))) or "ours"

    def cells(self, chosen: pd.DataFrame) -> list[str]:
        """`chosen`: the rows of `rows` that belong to one line of the table."""
        any_row = chosen[chosen["published_fits"].isin([True, False])]
        first = any_row.iloc[0] if len(any_row) else None
        cells = [published_text(first, self.form)] if self.has_published else []
        for variant in self.variants:
            own = chosen[(chosen["variant"] == variant) & chosen["device_label"].notna()]
            row = own.iloc[0] if len(own) else None
            cells.append(ours_text(row, self.form))
            if self.has_published:
                ratio: Any = None if row is None else row["ratio"]
                cells.append(NOTHING if ratio is None or ratio != ratio else times(ratio))
        return cells


def grouped(
    name: str,
    title: str,
    rows: pd.DataFrame,
    keys: Sequence[tuple[str, str, Format | None]],
    groups: Sequence[_Group],
    extra: tuple[str, Callable[[pd.DataFrame], list[str]], list[str]] | None = None,
) -> Table:
    """A line per setting of `keys` (column, heading, format) that was run or published.

    extra: (heading, cells of a line, column names) of one more group.
    """
    groups = [group for group in groups if group.columns()]
    columns = [heading for _, heading, _ in keys]
    heads = [("", len(keys))]
    for group in groups:
        columns += group.columns()
        heads.append((group.heading, len(group.columns())))
    published = any(group.has_published for group in groups)
    skipped = 0  # of the extra columns: the published ones, where there are none
    if extra:
        skipped = 0 if published else extra[2].count("published")
        columns += extra[2][skipped:]
        heads.append((extra[0], len(extra[2]) - skipped))
    lines = []
    names = [column for column, _, _ in keys]
    settings = sorted(rows.groupby(names, dropna=False, sort=False), key=lambda s: _natural(s[0]))
    for values, chosen in settings:
        line = [
            NOTHING if value is None or value != value else (form or str)(value)
            for value, (_, _, form) in zip(values, keys, strict=True)
        ]
        for group in groups:
            line += group.cells(group.rows.loc[chosen.index.intersection(group.rows.index)])
        lines.append(line + (extra[1](chosen)[skipped:] if extra else []))
    note = " Ratio: ours / published." if published else ""
    text = caption(rows, published=published) + note
    return Table(name, title, heads, columns, lines, text, len(keys), rows)


def _natural(values: Iterable[Any]) -> list[Any]:
    """A sorting key that puts 8b before 14b, and what is unknown first."""
    key = []
    for value in values:
        if value is None or value != value:
            key.append([(0, 0.0, "")])
        elif isinstance(value, str):
            parts = re.findall(r"\d+|\D+", value)
            key.append([(1, float(p), "") if p.isdigit() else (2, 0.0, p) for p in parts])
        else:
            key.append([(1, float(value), "")])
    return key


def _by_method(rows: pd.DataFrame, form: Format) -> list[_Group]:
    """A group per method. Methods that only the paper has come with its numbers alone."""
    names = sorted(dict.fromkeys(rows["method"]), key=method_order)
    return [_Group(name, rows[rows["method"] == name], form) for name in names]


def _title(experiment: str, context: Context, unit: str) -> str:
    return f"{TITLES[experiment]}, {unit}, {context.device_label}"


def _advantage(
    over: str, under: str, keys: Sequence[str]
) -> tuple[str, Callable[[pd.DataFrame], list[str]], list[str]]:
    """The group "over / under" with the published ratio and ours."""

    def cells(chosen: pd.DataFrame) -> list[str]:
        texts = []
        for column in ("published", "ours"):
            found = ratio_of(chosen, over, under, keys, column)
            texts.append(f"{found[0][1]:.2f}" if found else NOTHING)
        return texts

    return f"{over} / {under}", cells, ["published", "ours"]


def _without_unrun(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Leaves out published settings of which no method was run."""
    run = rows[rows["device_label"].notna()]
    settings = set(map(tuple, run[list(keys)].itertuples(index=False)))
    kept = [tuple(line) in settings for line in rows[list(keys)].itertuples(index=False)]
    return rows[kept]


def _memory(rows: pd.DataFrame, context: Context, experiment: str) -> list[Table]:
    keys = ("model", "tuning", "seq_len_tokens")
    rows = _without_unrun(rows, keys)
    return [
        grouped(
            experiment,
            _title(experiment, context, "GiB"),
            rows,
            [("model", "model", None), ("tuning", "tuning", None), ("seq_len_tokens", "T", whole)],
            _by_method(rows, bytes_gib),
            _advantage("checkpointing", "streambp", keys),
        )
    ]


def _max_seq_len(rows: pd.DataFrame, context: Context, experiment: str) -> list[Table]:
    run = rows[rows["device_label"].notna()]
    rows = rows[rows["objective"].isin(run["objective"].unique())]
    keys = ("objective", "model", "tuning")
    return [
        grouped(
            experiment,
            _title(experiment, context, "tokens"),
            rows,
            [(key, key, None) for key in keys],
            _by_method(rows, whole),
            _advantage("streambp", "checkpointing", keys),
        )
    ]


def _time(rows: pd.DataFrame, context: Context, experiment: str) -> list[Table]:
    keys = ("model", "seq_len_tokens")
    return [
        grouped(
            experiment,
            _title(experiment, context, "s"),
            rows,
            [("model", "model", None), ("seq_len_tokens", "T", whole)],
            _by_method(rows, seconds),
            _advantage("checkpointing", "streambp", keys),
        )
    ]


def _batch(rows: pd.DataFrame, context: Context, experiment: str) -> list[Table]:
    result = []
    timed = rows[rows["quantity"] == "per_sample_time_s"]
    if timed["device_label"].notna().any():
        keys = ("model", "seq_len_tokens", "batch_size")
        result.append(
            grouped(
                experiment,
                _title(experiment, context, "s"),
                timed,
                [
                    ("model", "model", None),
                    ("seq_len_tokens", "T", whole),
                    ("batch_size", "batch", whole),
                ],
                _by_method(timed, seconds),
                _advantage("checkpointing", "streambp", keys),
            )
        )
    searched = rows[rows["quantity"] == "max_batch_size"]
    if len(searched):
        result.append(_max_batch(searched, context))
    return result


def _max_batch(rows: pd.DataFrame, context: Context) -> Table:
    keys = ("model", "tuning", "seq_len_tokens")
    heading, cells, _ = _advantage("streambp", "checkpointing", keys)
    table = grouped(
        "batch_table_max",
        f"Largest batch of a whole training step, sequences, {context.device_label}",
        rows,
        [("model", "model", None), ("tuning", "tuning", None), ("seq_len_tokens", "T", whole)],
        _by_method(rows, whole),
        (heading, lambda chosen: cells(chosen)[1:], ["ours"]),
    )
    claim = (
        " The paper claims 4.5 times the batch of checkpointing: the ratio of table 3's lengths of "
        "qwen3_8b, full (72,000 / 15,700 = 4.59), carried over to batches."
    )
    return Table(**{**vars(table), "caption": table.caption + claim})


def _linear(rows: pd.DataFrame, context: Context, experiment: str) -> list[Table]:
    groups = []
    for quantity, heading, form in (
        ("peak_bytes", "peak, 10⁹ bytes", bytes_gb),
        ("intermediate_peak_bytes", "intermediate peak, 10⁹ bytes", bytes_gb),
        ("forward_backward_time_s", "time, s", seconds),
    ):
        chosen = rows[rows["quantity"] == quantity]
        groups.append(_Group(heading, chosen.assign(variant="linear example"), form))
    title = f"{TITLES[experiment]}, {context.device_label}"
    return [grouped(experiment, title, rows, [("num_chunks", "chunks", whole)], groups)]


def _ablation(rows: pd.DataFrame, context: Context, experiment: str) -> list[Table]:
    groups = []
    for quantity, heading in (
        ("peak_bytes", "peak, GiB"),
        ("activation_peak_bytes", "activations, GiB"),
        ("forward_backward_time_s", "forward + backward, s"),
    ):
        chosen = rows[rows["quantity"] == quantity]
        groups.append(_Group(heading, chosen.assign(variant="all"), UNITS[quantity][1]))
    title = f"{TITLES[experiment]}, {context.device_label}"
    keys: list[tuple[str, str, Format | None]] = [
        ("model", "model", None),
        ("seq_len_tokens", "T", whole),
        ("method", "method", None),
        ("chunk_size_tokens", "chunk", whole),
    ]
    table = grouped(experiment, title, rows, keys, groups)
    return [Table(**{**vars(table), "caption": table.caption + " The paper gives no numbers."})]


_Builder = Callable[[pd.DataFrame, Context, str], list[Table]]
_BUILDERS: dict[str, _Builder] = {
    "bp_memory_figure": _memory,
    "max_seq_len_table": _max_seq_len,
    "bp_time_table": _time,
    "batch_table": _batch,
    "linear_example": _linear,
    "other_models": _memory,
    "chunk_size_ablation": _ablation,
}


def _cell_markdown(text: str) -> str:
    return text.replace("|", r"\|")


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "≥": r"$\geq$",
    "10⁹": "$10^9$",
}


def latex_escape(text: str) -> str:
    """Text as LaTeX sets it, with the few symbols that the tables use."""
    text = text.replace("10⁹", "\0")
    return "".join(_LATEX.get(character, character) for character in text).replace("\0", "$10^9$")


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(map(latex_escape, cells)) + r" \\"


def write(found: Sequence[RunRecord], out: Path) -> list[Path]:
    """Write every table as .md, .csv and .tex below `out`; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for experiment in paper.EXPERIMENTS:
        for table in tables(found, experiment):
            texts = {"md": table.to_markdown(), "csv": table.to_csv(), "tex": table.to_latex()}
            for suffix, text in texts.items():
                files.append(out / f"{table.name}.{suffix}")
                files[-1].write_text(text, encoding="utf-8")
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.tables", description=__doc__)
    parser.add_argument("runs", nargs="*", default=["runs"], help="folders with records")
    parser.add_argument("--out", type=Path, default=Path("tables"), help="where to write")
    options = parser.parse_args(arguments)
    try:
        found = records(*options.runs)
        files = write(found, options.out)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in files:
        if path.suffix == ".md":
            print(path.read_text(encoding="utf-8"))
    print(f"{len(files)} files in {options.out}, from {len(found)} records")
    return 0


if __name__ == "__main__":
    sys.exit(main())
