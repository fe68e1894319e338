"""Every published point with its simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from streambp.bench import linear_example
from streambp.bench.search import Probe, find_max
from streambp.published import load
from streambp.sim.fidelity import settings
from streambp.sim.fidelity.settings import BASELINES
from streambp.sim.gpus import gpu_named
from streambp.sim.simulation import simulate
from streambp.sim.workload import Workload
from streambp.sim.workspaces import cublas_workspace_bytes

GIB = 2**30
GB = 1e9
_SEARCH_LIMIT = 2**22
#: The length at which the largest batches are compared.
BATCH_SEQ_LEN = 1000


@dataclass(frozen=True, kw_only=True)
class Point:
    """One published value and ours. `error` is relative: simulated / published - 1."""

    table: str
    model: str
    tuning: str
    method: str
    x: int
    quantity: str
    published: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1


def figure3(methods: tuple[str, ...]) -> Iterator[Point]:
    """Peak GiB by length."""
    for row in load("bp_memory_figure"):
        if row["method"] not in methods:
            continue
        seq_len = int(row["seq_len"])
        cell = settings.workload(row["model"], row["tuning"], row["method"], seq_len)
        yield Point(
            table="figure3",
            model=row["model"],
            tuning=row["tuning"],
            method=row["method"],
            x=seq_len,
            quantity="peak_gib",
            published=float(row["peak_gib"]),
            simulated=simulate(cell).peak_bytes / GIB,
        )


def figure3_maxima(methods: tuple[str, ...], *, best: bool = False) -> Iterator[Point]:
    """Longest sequences: the labelled top markers of figure 3. best: with our best chunk sizes."""
    longest: dict[tuple[str, str, str], int] = {}
    for row in load("bp_memory_figure"):
        if row["method"] in methods:
            cell = (row["model"], row["tuning"], row["method"])
            longest[cell] = max(longest.get(cell, 0), int(row["seq_len"]))
    changes = {"method_options": settings.BEST_CHUNKS} if best else {}
    for (model, tuning, method), published in longest.items():
        found = max_seq_len(settings.workload(model, tuning, method, published, **changes))
        table = "figure3_maxima_best" if best else "figure3_maxima"
        yield _maximum(table, model, tuning, method, published, found)


def table3(methods: tuple[str, ...]) -> Iterator[Point]:
    """Longest sequences of a whole SFT step."""
    for row in load("max_seq_len_table3"):
        if row["objective"] != "sft" or row["method"] not in methods or not row["max_seq_len"]:
            continue
        published = int(row["max_seq_len"])
        cell = (row["model"], row["tuning"], row["method"])
        found = max_seq_len(settings.trainer_workload(*cell, published))
        yield _maximum("table3", *cell, published, found)


def batch_ratio() -> Iterator[Point]:
    """Largest batch at equal length over checkpointing's, 8B full SFT (the paper's 4.5)."""
    sizes = {
        method: _largest(
            settings.trainer_workload("qwen3_8b", "full", method, BATCH_SEQ_LEN), "batch_size", 1
        )
        for method in ("checkpointing", "streambp")
    }
    yield Point(
        table="batch_ratio",
        model="qwen3_8b",
        tuning="full",
        method="streambp",
        x=BATCH_SEQ_LEN,
        quantity="ratio",
        published=4.5,
        simulated=sizes["streambp"] / sizes["checkpointing"],
    )


def table8() -> Iterator[Point]:
    """The linear example: peak and intermediate GB by number of chunks."""
    gpu = gpu_named(settings.GPU)
    rows, width = settings.LINEAR_ROWS, settings.LINEAR_WIDTH
    lasting = 4 * (rows * width + 4 * width**2) + sum(cublas_workspace_bytes(gpu.sm))
    for row in load("linear_example_table8"):
        num_chunks = int(row["num_chunks"])
        options = linear_example.Options(rows=rows, width=width, num_chunks=num_chunks)
        tracker, _ = linear_example.simulate(options, gpu)
        for quantity, num_bytes in (
            ("peak_gb", tracker.peak_bytes),
            ("intermediate_gb", tracker.peak_bytes - lasting),
        ):
            yield Point(
                table="table8",
                model="linear_example",
                tuning="full",
                method="standard" if num_chunks == 1 else "streambp",
                x=num_chunks,
                quantity=quantity,
                published=float(row[quantity]),
                simulated=num_bytes / GB,
            )


def table9(methods: tuple[str, ...]) -> Iterator[Point]:
    """Peak GiB of Llama and Gemma by length."""
    for row in load("other_models_table9"):
        if row["method"] not in methods:
            continue
        for seq_len in (int(name) for name in row if name.isdigit()):
            if not row[str(seq_len)]:
                continue
            cell = settings.workload(row["model"], "full", row["method"], seq_len)
            if "gemma" in row["model"]:
                cell = cell.replace(assumptions=settings.WINDOWED)
            yield Point(
                table="table9",
                model=row["model"],
                tuning="full",
                method=row["method"],
                x=seq_len,
                quantity="peak_gib",
                published=float(row[str(seq_len)]),
                simulated=simulate(cell).peak_bytes / GIB,
            )


def max_seq_len(cell: Workload) -> int:
    """The longest sequence (a multiple of 8) whose simulated peak the GPU can hold."""
    return _largest(cell, "seq_len", 8)


def _largest(cell: Workload, parameter: str, step: int) -> int:
    assert cell.gpu is not None
    budget_bytes = cell.gpu.usable_bytes

    def try_value(value: int) -> Probe:
        peak = simulate(cell.replace(**{parameter: value})).peak_bytes
        return Probe(value=value, fits=peak <= budget_bytes, peak_bytes=peak)

    found = find_max(
        try_value,
        budget_bytes=budget_bytes,
        step=step,
        start=getattr(cell, parameter),
        limit=_SEARCH_LIMIT,
    )
    return found.largest or 0


def _maximum(
    table: str, model: str, tuning: str, method: str, published: int, simulated: int
) -> Point:
    return Point(
        table=table,
        model=model,
        tuning=tuning,
        method=method,
        x=published,
        quantity="max_seq_len",
        published=published,
        simulated=simulated,
    )


OURS = ("streambp",)
#: name -> points, in the order of the report.
TABLES: dict[str, Callable[[], Iterator[Point]]] = {
    "figure3": lambda: figure3(BASELINES),
    "figure3_streambp": lambda: figure3(OURS),
    "figure3_maxima": lambda: figure3_maxima((*BASELINES, *OURS)),
    "figure3_maxima_best": lambda: figure3_maxima(OURS, best=True),
    "table3": lambda: table3(BASELINES),
    "table3_streambp": lambda: table3(OURS),
    "batch_ratio": batch_ratio,
    "table8": table8,
    "table9": lambda: table9(BASELINES),
    "table9_streambp": lambda: table9(OURS),
}
