"""What stands below every table and plot: where its numbers come from, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pandas as pd

from streambp.bench import paper

GIB = 2**30
_QUANTITIES = {
    "peak_bytes": "peak memory of one forward and backward pass",
    "intermediate_peak_bytes": "peak less inputs, weights and gradients",
    "activation_peak_bytes": "peak less weights, gradients and optimizer states",
    "forward_backward_time_s": "time of one forward and backward pass",
    "per_sample_time_s": "time of one forward and backward pass per sequence",
    "max_seq_len_tokens": "longest sequence",
    "max_batch_size": "largest batch",
}
_PEAK_KINDS = {"allocated": "bytes allocated on the GPU", "live": "bytes of live tensors"}
_ASSUMPTIONS: dict[str, dict[Any, str]] = {
    "outputs_kept": {True: "model outputs kept alive in backward"},
    "mask": {"additive": "an additive mask", "padding": "a padding mask"},
    "paper": {True: "the paper's mask and outputs kept alive in backward"},
    "gradients_resident": {False: "gradients not resident before the pass"},
}


def caption(rows: pd.DataFrame, *, published: bool = False) -> str:
    """Device, model, batch, dtype, tuning, provenance, assumptions and versions of these rows.

    Args:
        rows: of `compare.comparison` (or of `load.frame`); those that were run count.
        published: whether published numbers stand beside them.
    """
    run = rows[rows["device_label"].notna()]
    if run.empty:
        return "No runs."
    parts = [f"{_joined(run['device_label'])}"]
    for column, name in (("model", ""), ("tuning", "tuning "), ("dtype", ""), ("optimizer", "")):
        text = _joined(run[column])
        if column == "optimizer":
            text = "no optimizer" if text == "none" else f"optimizer {text}"
            name = ""
        if text:
            parts.append(name + text)
    batches = _joined(run["batch_size"])
    if batches:
        parts.append(f"batch {batches}")
    ranks = _joined(run.loc[run["tuning"] == "lora", "lora_rank"])
    if ranks:
        parts.append(f"LoRA rank {ranks}")
    sentences = [", ".join(parts), _provenance(run), _assumptions(run), _versions(run)]
    if published:
        tables = sorted({paper.EXPERIMENTS[name] for name in run["experiment"].unique()})
        sentences.append(
            f"Published: arXiv 2506.03077, {' and '.join(tables)}, measured on one "
            f"{paper.PAPER_GPU}"
        )
    return ". ".join(sentence for sentence in sentences if sentence) + "."


def _provenance(run: pd.DataFrame) -> str:
    if "quantity" not in run:
        found = sorted(set(run["provenance_memory"].dropna()))
        return f"Memory {' and '.join(found)}" if found else ""
    sentences = []
    for quantity, group in run.groupby("quantity", sort=False):
        kinds = sorted(set(group["provenance"].dropna()))
        if not kinds:
            continue
        what = _QUANTITIES.get(str(quantity), str(quantity))
        if quantity == "peak_bytes":
            peaks = sorted({_PEAK_KINDS[kind] for kind in group["peak_kind"].dropna()})
            what += f" ({' or '.join(peaks)})" if peaks else ""
        sentences.append(f"{what}: {' and '.join(kinds)}")
    text = "; ".join(sentences)
    return text[:1].upper() + text[1:]


def _assumptions(run: pd.DataFrame) -> str:
    """What simulated runs took for granted, by method where the methods differ."""
    simulated = run[run["device"] == "simulated"]
    by_method: dict[str, set[str]] = {}
    for row in simulated.drop_duplicates(["method", "assumptions"]).itertuples():
        text: Any = row.assumptions
        stated: dict[str, Any] = json.loads(text) if isinstance(text, str) else {}
        if stated.get("paper"):
            stated = {"paper": True}
        words = [_ASSUMPTIONS.get(name, {}).get(value) for name, value in stated.items()]
        if row.method == "streambp":  # keeps no outputs, whatever is said
            words = [word for word in words if word and "outputs" not in word]
        by_method.setdefault(row.method, set()).update(word for word in words if word)
    stated_sets = {method: ", ".join(sorted(words)) for method, words in by_method.items() if words}
    if not stated_sets:
        return ""
    if len(set(stated_sets.values())) == 1:
        return f"Simulated {' and '.join(stated_sets)} with {next(iter(stated_sets.values()))}"
    return "Simulated with: " + "; ".join(f"{k}: {v}" for k, v in stated_sets.items())


def _versions(run: pd.DataFrame) -> str:
    parts = [
        f"{package} {versions}"
        for package in ("streambp", "torch", "transformers")
        if (versions := _joined(run[f"version_{package}"]))
    ]
    commits = [str(commit)[:10] for commit in dict.fromkeys(run["git_commit"].dropna())]
    if commits:
        dirty = " with uncommitted changes" if run["git_dirty"].eq(True).any() else ""
        shown = ", ".join(commits[:2]) + (" and others" if len(commits) > 2 else "")
        parts.append(f"commit {shown}{dirty}")
    return ", ".join(parts)


def _joined(values: Iterable[object]) -> str:
    """Distinct values in order of appearance, whole numbers without a fraction."""
    words = [
        f"{value:g}" if isinstance(value, float) else str(value)
        for value in values
        if value is not None and value == value
    ]
    return ", ".join(dict.fromkeys(words))
