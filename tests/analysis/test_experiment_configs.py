"""The paper's experiments compose, at full size and small, and every job of them is a valid run."""

import itertools
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from streambp.bench import paper
from streambp.bench.config import RunConfig
from streambp.bench.methods import method_named
from streambp.published import load
from streambp.sim.fidelity import settings
from streambp.sim.record import workload_of

CONF = Path(__file__).resolve().parents[2] / "conf"


def jobs(grid):
    """The override lists of a grid, as the sweeper makes them."""
    parsed = OverridesParser.create().parse_overrides([f"{k}={v}" for k, v in grid.items()])
    values = []
    for override in parsed:
        texts = (
            list(override.sweep_string_iterator())
            if override.is_sweep_override()
            else [override.get_value_element_as_str()]
        )
        values.append([f"{override.get_key_element()}={text}" for text in texts])
    return [list(job) for job in itertools.product(*values)]


def composed(experiment, *overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(
            "config", [f"experiment={experiment}", *overrides], return_hydra_config=True
        )
    hydra = OmegaConf.to_container(config.hydra.sweeper)
    values = OmegaConf.create({key: config[key] for key in config if key != "hydra"})
    return values, hydra


@pytest.mark.parametrize("experiment", paper.EXPERIMENTS)
@pytest.mark.parametrize("size", ["grids", "small_grids"])
def test_the_jobs_are_valid_runs(experiment, size):
    _, sweeper = composed(experiment)
    device = ("device=cpu",) if size == "small_grids" else ()
    found = [jobs(grid) for grid in sweeper[size]]
    assert sum(map(len, found)) >= 3
    ends = {str(job): job for grid in found for job in (grid[0], grid[-1])}  # composing is slow
    for job in ends.values():
        values, _ = composed(experiment, *job, *device)
        config = RunConfig.from_hydra(values)
        assert config.experiment.name == experiment
        assert config.steps == 0


def test_figure_3_runs_what_was_published():
    _, sweeper = composed("bp_memory_figure")
    published = {
        (cell.model, cell.method, cell.seq_len)
        for cell in paper.cells()
        if cell.experiment == "bp_memory_figure"
    }
    for grid in sweeper["grids"]:
        for job in jobs(grid):
            values = dict(override.split("=") for override in job)
            assert (values["model"], values["method"], int(values["seq_len"])) in published


def test_table_3_covers_the_published_sft_rows():
    _, sweeper = composed("max_seq_len_table")
    found = set()
    for grid in sweeper["grids"]:
        for job in jobs(grid):
            values = dict(override.split("=") for override in job)
            found.add((values["model"], values.get("tuning.name", "full"), values["method"]))
    assert found == {
        (cell.model, cell.tuning, cell.method)
        for cell in paper.cells()
        if cell.experiment == "max_seq_len_table" and cell.objective == "sft"
    }


def test_the_maxima_of_figure_3_are_searched_as_the_fidelity_report_does():
    _, sweeper = composed("figure3_maxima")
    found = set()
    for job in itertools.chain.from_iterable(map(jobs, sweeper["grids"])):
        values, _ = composed("figure3_maxima", *job)
        config = RunConfig.from_hydra(values)
        cell = (config.model.name, config.tuning.name, config.method.name)
        found.add(cell)
        assert config.search is not None and config.search["name"] == "max_seq_len"
        ours, theirs = workload_of(config), settings.workload(*cell, config.seq_len)
        options = method_named(ours.method).resolve(theirs.method_options)
        assert ours.method_options == options
        assert ours.tuning.rank == theirs.tuning.rank
        for name in ("model", "gpu", "assumptions", "optimizer", "dtype", "batch_size"):
            assert getattr(ours, name) == getattr(theirs, name), name
    rows = load("bp_memory_figure")
    methods = ("standard", "checkpointing", "streambp")
    assert found == {(r["model"], r["tuning"], r["method"]) for r in rows if r["method"] in methods}
    assert len(found) == 9
