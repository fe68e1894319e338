"""Where Hydra looks for sweepers: its plugin package takes no class from elsewhere."""

from streambp.bench.sweep import Sweeper


class StreambpSweeper(Sweeper):
    """`streambp.bench.sweep.Sweeper`, under a name that Hydra accepts."""
