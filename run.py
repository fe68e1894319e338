"""`python run.py key=value ...` does one run, `python run.py -m key=a,b ...` a sweep."""

import hydra
from omegaconf import DictConfig

from streambp.bench import cli


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> dict:
    return cli.run_one(config)


if __name__ == "__main__":
    cli.start(main)
