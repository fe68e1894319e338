"""The command line of run.py: early errors with a suggestion, one run, the exit code.

Exit codes: 0 every run ok; 1 a run failed or was killed; 2 the command or the config cannot work;
3 nothing failed but a run ran out of memory; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from streambp.bench import config as config_module
from streambp.bench.checks import closest
from streambp.bench.config import RunConfig
from streambp.bench.display import Display
from streambp.bench.records import RunRecord
from streambp.sim.settings import Assumptions

CONF = Path(__file__).resolve().parents[2] / "conf"
EXIT_FAILED, EXIT_USAGE, EXIT_OOM, EXIT_INTERRUPTED = 1, 2, 3, 130
JOBS_VARIABLE = (
    "STREAMBP_SWEEP_JOBS"  # number of jobs of the sweep, for the processes that run them
)
# Launchers with a package of their own, and the extra of this project that installs it.
_LAUNCHERS = {
    "joblib": ("hydra-joblib-launcher", "joblib"),
    **dict.fromkeys(
        ("slurm", "slurm_local", "submitit_slurm", "submitit_local"),
        ("hydra-submitit-launcher", "slurm"),
    ),
}
# What Hydra ends with when a command or a config cannot work.
_UNUSABLE = (HydraException, OmegaConfBaseException)
# Groups that are no dataclasses of `config.py`: their keys are those of their files, and these.
_BY_FILES: dict[str, tuple[str, ...]] = {
    "gpu": ("name", "prefer_cudnn_attention"),
    "search": ("name", "step", "start", "limit"),
}
# Mappings within a group whose keys are fixed.
_NESTED = {"device.assumptions": {field.name for field in fields(Assumptions)}}


def start(main: Callable[[], Any]) -> None:
    """Check the command line, then hand over to Hydra."""
    problem = override_problem(sys.argv[1:])
    if problem:
        stop(problem)
    signal.signal(signal.SIGTERM, _interrupt)
    sys.argv[1:] = _flags_first(sys.argv[1:])
    try:
        main()
    except SystemExit as end:
        # Hydra has said what is wrong with the command, and leaves with 1 whatever it was.
        if end.code == 1 and isinstance(end.__context__, _UNUSABLE):
            sys.exit(EXIT_USAGE)
        raise


def run_one(config: DictConfig) -> dict[str, Any]:
    """The job of a composed config: run it, show it. Outside a sweep, leave with its exit code."""
    from streambp.bench.runner import run_job

    hydra = HydraConfig.get()
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # as given
    sweeping = hydra.mode == RunMode.MULTIRUN
    if not sweeping and (hydra.sweeper.get("params") or hydra.sweeper.get("grids")):
        stop(f"this experiment is a list of jobs. Fix: python run.py -m {' '.join(overrides)}")
    job = (hydra.job.num + 1, int(os.environ.get(JOBS_VARIABLE, "1"))) if sweeping else None
    display = Display(job)
    try:
        run_config = RunConfig.from_hydra(config)
        with display.running(run_config, overrides) as on_event:
            outcome = run_job(run_config, overrides=overrides, on_event=on_event, lone=not sweeping)
    except KeyboardInterrupt:
        if sweeping:
            raise
        print("interrupted; the record says killed", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except (ValueError, OmegaConfBaseException) as error:  # config or runs folder
        if sweeping:
            raise
        stop(str(error))
    display.ended(outcome)
    if not sweeping:
        display.summary([outcome.record])
        sys.exit(exit_code([outcome.record]))
    return {"path": str(outcome.record.path), "skipped": outcome.skipped}


def _flags_first(arguments: list[str]) -> list[str]:
    """`a=1 -m b=2` as `-m a=1 b=2`: Hydra's parser takes no override after a flag in between."""
    flags = [argument for argument in arguments if argument in ("-m", "--multirun")]
    return flags[:1] + [argument for argument in arguments if argument not in flags]


def exit_code(records: Iterable[RunRecord]) -> int:
    """0, or `EXIT_FAILED` when a run failed or was killed, else `EXIT_OOM` when one ran out."""
    statuses = {record.status for record in records}
    if statuses & {"error", "killed"}:
        return EXIT_FAILED
    return EXIT_OOM if "oom" in statuses else 0


def stop(message: str) -> NoReturn:
    """Leave because the command or the config cannot work."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(EXIT_USAGE)


def override_problem(arguments: Sequence[str]) -> str | None:
    """What is wrong with `key=value` arguments, with the nearest right name; or None.

    A name that does not exist, a launcher that is not installed, several values without `-m`.
    """
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    sweeping = any(argument in ("-m", "--multirun") for argument in arguments)
    for argument in arguments:
        key, separator, value = argument.partition("=")
        key = key.lstrip("+~").partition("@")[0]
        if key == "hydra/launcher":
            problem = _launcher_problem(value)
            if problem:
                return problem
        if argument.startswith("-") or not separator or key.split("/")[0] == "hydra":
            continue
        problem = _key_problem(key, groups)
        if problem is None and key in groups and not argument.startswith("~"):
            problem = _choice_problem(key, value)
        if problem is None and not sweeping and _several_values(argument):
            problem = f"{argument}: several values. Fix: python run.py -m {' '.join(arguments)}"
        if problem:
            return problem
    return None


def _several_values(argument: str) -> bool:
    if not set(argument) & set(",("):  # nothing that makes a sweep
        return False
    try:
        return OverridesParser.create().parse_override(argument).is_sweep_override()
    except HydraException:  # Hydra says what is wrong with it
        return False


def _key_problem(key: str, groups: set[str]) -> str | None:
    top, _, rest = key.partition(".")
    known = {field.name for field in fields(RunConfig)} | groups | {"hydra"}
    if top not in known:
        near = closest(top, known)
        return f"{key}: no such setting. Fix: " + (
            f"did you mean {near}?" if near else f"one of {', '.join(sorted(known))}"
        )
    if not rest or top == "hydra":
        return None
    if top in _BY_FILES:
        files = (CONF / top).glob("*.yaml")
        names = {*_BY_FILES[top], *(key for path in files for key in _keys(path))}
    else:
        group = config_module.GROUPS.get(top)
        names = {field.name for field in fields(group)} if group else set()
    name, _, inner = rest.partition(".")
    if name in names and inner and f"{top}.{name}" in _NESTED:
        top, name, names = f"{top}.{name}", inner, _NESTED[f"{top}.{name}"]
    if name in names:
        return None
    near = closest(name, names)
    fix = f"did you mean {top}.{near}?" if near else f"one of {', '.join(sorted(names)) or top}"
    return f"{key}: no such setting. Fix: {fix}"


def _keys(path: Path) -> Iterable[str]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or ()


def _choice_problem(group: str, value: str) -> str | None:
    choices = {path.stem for path in (CONF / group).glob("*.yaml")}
    for choice in value.split(",") if value.replace(",", "").replace("_", "").isalnum() else ():
        if choice not in choices and choice != "null":
            near = closest(choice, choices)
            listed = f"one of {', '.join(sorted(choices))}"
            fix = f"did you mean {group}={near}? ({listed})" if near else listed
            return f"{group}={choice}: no such {group}. Fix: {fix}"
    return None


def _launcher_problem(name: str) -> str | None:
    package, extra = _LAUNCHERS.get(name, (None, None))
    if package is None:  # Hydra's own, or of a package that this project knows nothing of
        return None
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return (
            f"hydra/launcher={name}: needs {package}, which is not installed. "
            f"Fix: pip install -e '.[{extra}]' in this project's folder"
        )
    return None


def _interrupt(number: int, frame: Any) -> None:
    """Treat SIGTERM as Ctrl-C, so that the running job gets its record."""
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
