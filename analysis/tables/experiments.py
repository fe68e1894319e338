"""The tables of each experiment, one per device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas as pd

from analysis.compare import Context, claimed_batch_ratio, comparison, contexts, within
from analysis.tables.cells import NOTHING, Format, bytes_gb, bytes_gib, seconds, whole
from analysis.tables.grouped import Group, advantage, by_method, grouped
from analysis.tables.table import Table
from streambp.bench import paper
from streambp.bench.records import RunRecord

TITLES = {
    "bp_memory_figure": "Peak memory over sequence length (figure 3)",
    "max_seq_len_table": "Longest sequence of a whole training step (table 3)",
    "bp_time_table": "Time of a forward and backward pass (table 1)",
    "batch_table": "Time per sequence by batch size (table 2)",
    "linear_example": "Linear example by number of chunks (table 8)",
    "other_models": "Peak memory of other models (table 9)",
    "chunk_size_ablation": "Memory and time over the chunk size (figure 5)",
}


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


def _title(experiment: str, context: Context, unit: str) -> str:
    return f"{TITLES[experiment]}, {unit}, {context.device_label}"


def _without_unrun(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Leaves out published settings of which no method was run."""
    run = rows[rows["device_label"].notna()]
    settings = set(map(tuple, run[list(keys)].itertuples(index=False)))
    kept = [tuple(line) in settings for line in rows[list(keys)].itertuples(index=False)]
    return rows[kept]


def _published_but_oom(rows: pd.DataFrame) -> str:
    """The times that the paper has of what does not fit here, with the memory it would need."""
    lost = rows[(rows["cell"] == "oom") & rows["published"].notna()]
    cells = []
    for row in lost.to_dict("records"):
        what = f"{row['variant']} at T = {row['seq_len_tokens']:,.0f}, batch {row['batch_size']:g}"
        texts = [f"published {seconds(row['published'])} s"]
        if row["peak_bytes"] == row["peak_bytes"] and row["peak_bytes"] is not None:
            need = f"{row['provenance_memory']} peak {bytes_gib(row['peak_bytes'])} GiB"
            usable = row["budget_bytes"]
            known = usable is not None and usable == usable
            texts.append(f"{need} of {bytes_gib(usable)} usable" if known else need)
        cells.append(f"{what} ({', '.join(texts)})")
    return f" Published, but out of memory here: {'; '.join(cells)}." if cells else ""


def _memory(rows: pd.DataFrame, context: Context, experiment: str) -> list[Table]:
    keys = ("model", "tuning", "seq_len_tokens")
    rows = _without_unrun(rows, keys)
    return [
        grouped(
            experiment,
            _title(experiment, context, "GiB"),
            rows,
            [("model", "model", None), ("tuning", "tuning", None), ("seq_len_tokens", "T", whole)],
            by_method(rows, bytes_gib),
            advantage("checkpointing", "streambp", keys),
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
            by_method(rows, whole),
            advantage("streambp", "checkpointing", keys),
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
            by_method(rows, seconds),
            advantage("checkpointing", "streambp", keys),
            note=_published_but_oom(rows),
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
                by_method(timed, seconds),
                advantage("checkpointing", "streambp", keys),
                note=_published_but_oom(timed),
            )
        )
    searched = rows[rows["quantity"] == "max_batch_size"]
    if len(searched):
        result.append(_max_batch(searched, context))
    return result


def _max_batch(rows: pd.DataFrame, context: Context) -> Table:
    keys = ("model", "tuning", "seq_len_tokens")
    heading, cells, _ = advantage("streambp", "checkpointing", keys)

    def claimed_and_ours(chosen: pd.DataFrame) -> list[str]:
        ratio = claimed_batch_ratio(context, chosen.iloc[0])
        return [NOTHING if ratio is None else f"{ratio:.2f}", cells(chosen)[1]]

    table = grouped(
        "batch_table_max",
        f"Largest batch of a whole training step, sequences, {context.device_label}",
        rows,
        [("model", "model", None), ("tuning", "tuning", None), ("seq_len_tokens", "T", whole)],
        by_method(rows, whole),
        (heading, lambda chosen: cells(chosen)[1:], ["ours"])
        if context.on_cpu
        else (heading, claimed_and_ours, ["published claim", "ours"]),
    )
    if context.on_cpu:
        return table
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
        groups.append(Group(heading, chosen.assign(variant="linear example"), form))
    title = f"{TITLES[experiment]}, {context.device_label}"
    return [grouped(experiment, title, rows, [("num_chunks", "chunks", whole)], groups)]


def _ablation(rows: pd.DataFrame, context: Context, experiment: str) -> list[Table]:
    groups = []
    for quantity, heading, form in (
        ("peak_bytes", "peak, GiB", bytes_gib),
        ("activation_peak_bytes", "activations, GiB", bytes_gib),
        ("forward_backward_time_s", "forward + backward, s", seconds),
    ):
        chosen = rows[rows["quantity"] == quantity]
        groups.append(Group(heading, chosen.assign(variant="all"), form))
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
