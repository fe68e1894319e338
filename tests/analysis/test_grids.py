"""A sweep is the union of its grids; the command line has the last word in each of them."""

import importlib
from types import SimpleNamespace

import pytest

from streambp.bench import sweep

GRIDS = [
    {"model": "a", "method": "standard", "seq_len": "1,2"},
    {"model": "b", "method": "streambp", "seq_len": "2,3"},
]


@pytest.fixture
def jobs():
    # Hydra executes its own sweeper's module again whenever it looks for plugins.
    current = importlib.reload(sweep)

    def jobs_of(*arguments, device="auto", **keys):
        sweeper = current.Sweeper(**keys)
        sweeper.hydra_context = SimpleNamespace(config_loader=None)
        sweeper.config = SimpleNamespace(device=SimpleNamespace(name=device))
        return [" ".join(job) for job in sweeper._jobs(list(arguments))]

    return jobs_of


def test_grids_are_joined(jobs):
    assert jobs(grids=GRIDS) == [
        "model=a method=standard seq_len=1",
        "model=a method=standard seq_len=2",
        "model=b method=streambp seq_len=2",
        "model=b method=streambp seq_len=3",
    ]


def test_params_stand_beside_every_grid(jobs):
    assert len(jobs(params={"seed": "0,1"}, grids=GRIDS)) == 8
    assert jobs(params={"seed": "0,1"}) == ["seed=0", "seed=1"]


def test_the_command_line_replaces_a_setting_and_jobs_that_coincide_run_once(jobs):
    assert jobs("seq_len=7", grids=GRIDS) == [
        "model=a method=standard seq_len=7",
        "model=b method=streambp seq_len=7",
    ]
    assert jobs("seq_len=7", "model=c", "method=standard", grids=GRIDS) == [
        "model=c method=standard seq_len=7"
    ]


def test_small_grids_are_for_the_cpu(jobs):
    small = [{"model": "tiny"}]
    assert jobs(grids=GRIDS, small_grids=small, device="cpu") == ["model=tiny"]
    assert len(jobs(grids=GRIDS, small_grids=small, device="simulated")) == 4
    assert len(jobs(grids=GRIDS, device="cpu")) == 4
