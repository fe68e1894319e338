"""A table of settings by methods: the published number, ours and the ratio side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.captions import caption
from analysis.compare import method_order, natural, ratio_of
from analysis.tables.cells import NOTHING, Format, ours_text, published_text, times
from analysis.tables.table import Table


@dataclass(frozen=True)
class Group:
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

    @property
    def full_heading(self) -> str:
        """The heading, with the options of our runs where all have the same and are alone."""
        alone = len(self.variants) == 1 and not self.has_published
        options = _options(self.variants[0]) if alone else ""
        return f"{self.heading} ({options})" if options else self.heading

    def columns(self) -> list[str]:
        names = ["published"] if self.has_published else []
        for variant in self.variants:
            shared = len(self.variants) > 1 or self.has_published  # the heading is not ours alone
            options = _options(variant) if shared else ""
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


def _options(variant: str) -> str:
    """What stands in the brackets of a variant's name."""
    return variant.partition(" (")[2].removesuffix(")")


def grouped(
    name: str,
    title: str,
    rows: pd.DataFrame,
    keys: Sequence[tuple[str, str, Format | None]],
    groups: Sequence[Group],
    extra: tuple[str, Callable[[pd.DataFrame], list[str]], list[str]] | None = None,
    *,
    note: str = "",
) -> Table:
    """A line per setting of `keys` (column, heading, format) that was run or published.

    extra: (heading, cells of a line, column names) of one more group. note: ends the caption.
    """
    groups = [group for group in groups if group.columns()]
    columns = [heading for _, heading, _ in keys]
    heads = [("", len(keys))]
    for group in groups:
        columns += group.columns()
        heads.append((group.full_heading, len(group.columns())))
    published = any(group.has_published for group in groups)
    skipped = 0  # of the extra columns: the published ones, where there are none
    if extra:
        skipped = 0 if published else extra[2].count("published")
        columns += extra[2][skipped:]
        heads.append((extra[0], len(extra[2]) - skipped))
    lines = []
    names = [column for column, _, _ in keys]
    settings = sorted(rows.groupby(names, dropna=False, sort=False), key=lambda s: natural(s[0]))
    for values, chosen in settings:
        line = [
            NOTHING if value is None or value != value else (form or str)(value)
            for value, (_, _, form) in zip(values, keys, strict=True)
        ]
        for group in groups:
            line += group.cells(group.rows.loc[chosen.index.intersection(group.rows.index)])
        lines.append(line + (extra[1](chosen)[skipped:] if extra else []))
    read = " Ratio: ours / published." if published else ""
    text = caption(rows, published=published) + read + note
    return Table(name, title, heads, columns, lines, text, len(keys), rows)


def by_method(rows: pd.DataFrame, form: Format) -> list[Group]:
    """A group per method. Methods that only the paper has come with its numbers alone."""
    names = sorted(dict.fromkeys(rows["method"]), key=method_order)
    return [Group(name, rows[rows["method"] == name], form) for name in names]


def advantage(
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
