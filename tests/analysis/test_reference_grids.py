"""Every job of the paper's experiments, at full size and small, has its committed record."""

import copy
import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from analysis import load
from streambp.bench import paper, sweep

ROOT = Path(__file__).resolve().parents[2]
CONF, REFERENCE = ROOT / "conf", ROOT / "runs" / "reference"
DEVICES = {"grids": "simulated", "small_grids": "cpu"}
# What is absent on purpose: (experiment, grids or small_grids) -> settings of its jobs.
ABSENT: dict[tuple[str, str], list[dict[str, object]]] = {}


def listed_jobs(experiment, size):
    """(settings of all jobs, one list of overrides for each), as the sweeper lists them."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        base = compose("config", [f"experiment={experiment}"], return_hydra_config=True)
    grids = OmegaConf.to_container(base.hydra.sweeper)
    values = {key: base[key] for key in base if key != "hydra"}
    # Hydra executes its own sweeper's module again whenever it looks for plugins.
    sweeper = importlib.reload(sweep).Sweeper(
        params=grids["params"], grids=grids["grids"], small_grids=grids["small_grids"]
    )
    sweeper.hydra_context = SimpleNamespace(config_loader=None)
    sweeper.config = SimpleNamespace(device=SimpleNamespace(name=DEVICES[size]))
    return OmegaConf.to_container(OmegaConf.create(values), resolve=True), sweeper._jobs([])


def with_overrides(base, job):
    """The settings of one job: the group that an override names, or the value of a key."""
    config = copy.deepcopy(base)
    for key, text in (override.split("=", 1) for override in job):
        group = CONF / key / f"{text}.yaml"
        if group.exists():
            config[key] = yaml.safe_load(group.read_text(encoding="utf-8"))
            continue
        *parents, last = key.split(".")
        section = config
        for parent in parents:
            section = section[parent]
        section[last] = yaml.safe_load(text)
    return config


def identity(config, device):
    """What tells one job of an experiment from another, with the method's every option."""
    search = (config.get("search") or {}).get("name")
    linear = config["experiment"].get("kind") == "linear_example"
    found = {
        "device": device,
        "method": load.variant(config["method"]),
        "options": config["experiment"].get("options") or {},
        "search": None if search == "none" else search,
    }
    if device == "simulated":
        found["paper"] = bool(config.get("paper"))
        stated = config["device"].get("assumptions") or {}
        found["assumptions"] = {k: v for k, v in stated.items() if v is not None}
    if not linear:
        for group in ("model", "tuning", "optimizer", "objective"):
            found[group] = config[group]["name"]
        for size in ("seq_len", "batch_size"):
            found[size] = config[size]
        if config["tuning"]["name"] == "lora":
            found["rank"] = config["tuning"]["rank"]
    return found


@pytest.fixture(scope="module")
def recorded():
    """experiment -> what its committed records are of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = load.sound(load.records(REFERENCE))
    found = {}
    for record in records:
        own = identity(record.config, record.config["device"]["name"])
        found.setdefault(record.experiment, []).append(own)
    return found


def missing_jobs(experiment, size, recorded):
    base, jobs = listed_jobs(experiment, size)
    assert len(jobs) >= 3
    missing = []
    for job in jobs:
        wanted = identity(with_overrides(base, job), DEVICES[size])
        absent = ABSENT.get((experiment, size), [])
        left_out = any(all(wanted.get(k) == v for k, v in rule.items()) for rule in absent)
        if not left_out and wanted not in recorded:
            missing.append(" ".join(job))
    return missing


@pytest.mark.parametrize("experiment", paper.EXPERIMENTS)
@pytest.mark.parametrize("size", DEVICES)
def test_every_job_has_its_record(experiment, size, recorded):
    assert missing_jobs(experiment, size, recorded[experiment]) == []


@pytest.mark.parametrize("size", DEVICES)
def test_a_missing_record_is_noticed(size, recorded):
    own = recorded["bp_memory_figure"]
    lost = next(one for one in own if one["device"] == DEVICES[size])
    rest = [one for one in own if one != lost]
    (job,) = missing_jobs("bp_memory_figure", size, rest)
    assert f"seq_len={lost['seq_len']}" in job


def test_a_record_of_other_options_does_not_stand_in(recorded):
    experiment = "bp_memory_figure"
    plain = [one for one in recorded[experiment] if "(" not in one["method"]]
    missing = missing_jobs(experiment, "grids", plain)
    assert missing
    assert all("method.chunk_size=500" in job for job in missing)
