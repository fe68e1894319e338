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
_ASSUMPTIONS = {  # [name, value] as JSON
    '["outputs_kept", true]': "model outputs kept alive in backward",
    '["mask", "additive"]': "an additive mask",
    '["mask", "padding"]': "a padding mask",
    '["paper", true]': "the paper's mask and outputs kept alive in backward",
    '["gradients_resident", false]': "gradients not resident before the pass",
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
    """What simulated runs took for granted, by method and model where these differ."""
    stated: dict[str, dict[str, dict[str, None]]] = {}  # method -> model -> its words, in order
    simulated = run[run["device"] == "simulated"]
    for row in simulated.drop_duplicates(["method", "model", "assumptions"]).itertuples():
        words = _words(row.assumptions, str(row.method))
        stated.setdefault(str(row.method), {}).setdefault(str(row.model), {})[words] = None
    runs_of: dict[tuple[str, str], list[str]] = {}  # (words, model or "" for all) -> methods
    for method, models in stated.items():
        by_model = {model: " or ".join(w or "nothing" for w in ws) for model, ws in models.items()}
        if len(set(by_model.values())) == 1:
            by_model = {"": next(iter(by_model.values()))}
        for model, words in by_model.items():
            runs_of.setdefault((words, model), []).append(method)
    parts = [
        f"{' and '.join(methods)}{f' of {model}' if model else ''} with {words}"
        for (words, model), methods in runs_of.items()
        if words != "nothing"
    ]
    return f"Simulated {'; '.join(parts)}" if parts else ""


def _words(assumptions: Any, method: str) -> str:
    """A record's assumptions in words, none as ""."""
    stated: dict[str, Any] = json.loads(assumptions) if isinstance(assumptions, str) else {}
    if stated.get("paper"):
        stated = {"paper": True}
    known = (_ASSUMPTIONS.get(json.dumps([name, value])) for name, value in stated.items())
    # streambp keeps no outputs, whatever is said
    words = {word for word in known if word and not (method == "streambp" and "outputs" in word)}
    return ", ".join(sorted(words))


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
