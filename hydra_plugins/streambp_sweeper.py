"""Where Hydra looks for sweepers: its plugin package takes no class from elsewhere."""

from hydra.core.config_store import ConfigStore

from streambp.bench.sweep import Sweeper, SweeperConf


class StreambpSweeper(Sweeper):
    """`streambp.bench.sweep.Sweeper`, under a name that Hydra accepts."""


ConfigStore.instance().store(
    group="hydra/sweeper", name="streambp", node=SweeperConf, provider="streambp"
)
