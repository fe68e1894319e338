"""Text as LaTeX sets it."""

from __future__ import annotations

from collections.abc import Sequence

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


def latex_line(cells: Sequence[str]) -> str:
    return " & ".join(map(latex_escape, cells)) + r" \\"
