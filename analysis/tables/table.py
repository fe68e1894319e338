"""A table as text: Markdown, CSV and LaTeX."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

from analysis.tables.latex import latex_escape, latex_line

_CSV_COLUMNS = (
    *("experiment", "quantity", "provenance", "model", "tuning", "lora_rank", "objective"),
    *("method", "variant", "seq_len_tokens", "batch_size", "num_chunks", "ours", "cell"),
    *("published", "published_fits", "ratio", "device_label", "dtype", "optimizer", "assumptions"),
    *("version_streambp", "version_torch", "version_transformers", "git_commit", "finished_at"),
    "path",
)


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
        lines.append(latex_line(self.columns) + r" \midrule")
        lines += [latex_line(row) for row in self.rows]
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


def _cell_markdown(text: str) -> str:
    return text.replace("|", r"\|")
