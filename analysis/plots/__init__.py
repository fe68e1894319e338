"""The paper's figures with our numbers beside the published ones.

Ours are solid lines with filled markers, published numbers dotted with hollow ones; what did not
fit is a cross at the top, a hollow one where the paper says so. `plots(records, experiment)` gives
a `Picture` per device and dtype; `python -m analysis.plots runs --out plots` writes them all as
PNG, SVG and PDF.
"""

from analysis.plots.pictures import Picture, plots, write

__all__ = ["Picture", "plots", "write"]
