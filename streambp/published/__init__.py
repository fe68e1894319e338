"""Published results, each file headed by its source, for comparison with our own."""

from streambp.published.load import load, source

__all__ = ["load", "source"]
