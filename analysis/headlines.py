"""The few ratios that the paper is known for, ours beside the published ones."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.compare import (
    claimed_batch_ratio,
    comparison,
    contexts,
    natural,
    ratio_of,
    within,
)
from streambp.bench.records import RunRecord


@dataclass(frozen=True)
class Headline:
    """One ratio: over / under at one setting. `published` is None where the paper has none."""

    what: str
    setting: str
    ours: float | None
    published: float | None
    provenance: str
    device_label: str


# (experiment, quantity, what the ratio is of, over, under, keys, key whose largest value counts)
_RATIOS: tuple[tuple[str, str, str, str, str, tuple[str, ...], str | None], ...] = (
    (
        "max_seq_len_table",
        "max_seq_len_tokens",
        "Longer sequences than checkpointing",
        "streambp",
        "checkpointing",
        ("objective", "model", "tuning"),
        None,
    ),
    (
        "batch_table",
        "max_batch_size",
        "Larger batch than checkpointing",
        "streambp",
        "checkpointing",
        ("model", "tuning", "seq_len_tokens"),
        None,
    ),
    *(
        (
            experiment,
            "peak_bytes",
            "Less memory than checkpointing",
            "checkpointing",
            "streambp",
            ("model", "tuning", "seq_len_tokens"),
            "seq_len_tokens",
        )
        for experiment in ("bp_memory_figure", "other_models")
    ),
    (
        "bp_time_table",
        "forward_backward_time_s",
        "Faster than checkpointing",
        "checkpointing",
        "streambp",
        ("model", "seq_len_tokens"),
        "seq_len_tokens",
    ),
)


def headlines(found: Iterable[RunRecord]) -> list[Headline]:
    """The ratios that the records allow, those with a published counterpart first.

    Where an experiment has several lengths, the longest that both methods reached counts, here
    and in the paper if it has any; where it has several variants of streambp, the best one.
    """
    records = list(found)
    result = []
    for experiment, quantity, what, over, under, keys, longest in _RATIOS:
        numbers = comparison(records, experiment)
        for context in contexts(numbers):
            rows = within(numbers, context)
            rows = rows[rows["quantity"] == quantity]
            published = {
                tuple(setting.values()): ratio
                for setting, ratio, _, _ in ratio_of(rows, over, under, keys, "published")
            }
            ours = _longest(ratio_of(rows, over, under, keys), longest, published)
            for setting, ratio, top, bottom in sorted(ours, key=lambda r: natural(r[0].values())):
                run = top if over == "streambp" else bottom
                stated = published.get(tuple(setting.values()))
                if quantity == "max_batch_size":
                    stated = claimed_batch_ratio(context, setting)
                result.append(
                    Headline(
                        what=what,
                        setting=_words(setting, run["variant"]),
                        ours=ratio,
                        published=stated,
                        provenance=str(run["provenance"]),
                        device_label=context.device_label,
                    )
                )
    return sorted(result, key=lambda line: (line.published is None, line.device_label))


_Ratio = tuple[dict[str, Any], float, pd.Series, pd.Series]


def _longest(
    ratios: list[_Ratio], key: str | None, published: Container[tuple[Any, ...]]
) -> list[_Ratio]:
    """Of the ratios that agree in everything but `key`, the one where it is largest; one with a
    published counterpart comes first."""
    if key is None:
        return ratios

    def rank(ratio: _Ratio) -> tuple[bool, Any]:
        return tuple(ratio[0].values()) in published, ratio[0][key]

    kept: dict[tuple[Any, ...], _Ratio] = {}
    for ratio in ratios:
        rest = tuple(value for name, value in ratio[0].items() if name != key)
        if rest not in kept or rank(ratio) > rank(kept[rest]):
            kept[rest] = ratio
    return list(kept.values())


def _words(setting: dict[str, Any], variant: str) -> str:
    words = []
    for name, value in setting.items():
        if name == "seq_len_tokens":
            words.append(f"T = {value:,.0f}")
        elif value is not None and value == value:
            words.append(str(value))
    return ", ".join([*words, variant])
