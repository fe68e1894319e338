"""The paper's tables with our numbers beside the published ones: Markdown, CSV and LaTeX.

`tables(records, experiment)` gives one `Table` per device and dtype (and quantity where one table
cannot hold them all). `python -m analysis.tables runs --out tables` writes them all.
"""

from analysis.tables.experiments import TITLES, tables, write
from analysis.tables.table import Table

__all__ = ["TITLES", "Table", "tables", "write"]
