"""Records of every experiment as real runs write them, made without running anything."""

import itertools

from streambp.bench.records import RunRecord

GIB = 2**30
_numbers = itertools.count()

VERSIONS = {
    "python": "3.11.0",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "streambp": "0.1.0",
}
# Bytes per token of a made-up model by method, and seconds per token.
SLOPES = {"standard": 10e6, "checkpointing": 2.3e6, "streambp": 0.43e6}
SPEEDS = {"standard": 3.0e-4, "checkpointing": 4.0e-4, "streambp": 3.6e-4}


def make_config(**changes):
    config = {
        "model": {"name": "qwen3_8b", "config": {"model_type": "qwen3"}},
        "method": {
            "name": "streambp",
            "chunk_size": None,
            "head_chunk_size": None,
            "keep_kv": False,
            "keep_attention": False,
            "offload": "none",
            "options": {},
        },
        "objective": {"name": "sft"},
        "tuning": {"name": "full", "rank": 16},
        "device": {"name": "simulated", "index": 0, "assumptions": {}},
        "data": {"name": "random"},
        "optimizer": {"name": "none"},
        "experiment": {"name": "default", "kind": "training", "options": {}},
        "gpu": {"name": "a800_80gb", "memory_bytes": 85174583296},
        "search": None,
        "seq_len": 1000,
        "batch_size": 1,
        "grad_accum": 1,
        "seed": 0,
        "dtype": "bfloat16",
        "paper": False,
    }
    for key, value in changes.items():
        if isinstance(config.get(key), dict) and isinstance(value, dict):
            config[key] = {**config[key], **value}
        else:
            config[key] = value
    return config


def make_record(
    experiment="default", *, status="ok", detail=None, memory=None, time=None, **config
):
    """A record with the numbers of a made-up model, unless `memory` or `time` are given."""
    values = make_config(**config)
    values["experiment"] = {**values["experiment"], "name": experiment}
    device, method = values["device"]["name"], values["method"]["name"]
    tokens = values["seq_len"] * values["batch_size"]
    peak = int(30.5 * GIB + SLOPES[method] * tokens)
    budget = 83_900_000_000
    measured = device != "simulated"
    if memory is None:
        memory = {
            "peak_allocated_bytes": None if device == "cpu" else peak,
            "peak_live_bytes": peak,
            "weights_bytes": int(15.25 * GIB),
            "gradients_bytes": int(15.25 * GIB),
            "activation_peak_bytes": peak - int(30.5 * GIB),
            "unavailable": {},
        }
        if not measured:
            memory |= {"budget_bytes": budget, "fits": peak <= budget, "gpu": values["gpu"]}
            if peak > budget and status == "ok":
                status, detail = "oom", "over the budget"
    if time is None and status == "ok":
        both = SPEEDS[method] * tokens
        time = {
            "forward_time_s_samples": [both / 3] * 3,
            "backward_time_s_samples": [both * 2 / 3] * 3,
            "forward_backward_time_s_samples": [both * 0.98, both, both * 1.5],
            "warmup_steps": 1,
        }
    number = next(_numbers)
    return RunRecord(
        run_id=f"run{number}",
        fingerprint=f"{number:064x}",
        experiment=experiment,
        job=f"job{number}",
        status=status,
        status_detail=detail,
        started_at="2030-01-01T00:00:00+00:00",
        finished_at=f"2030-01-01T00:{number // 60 % 60:02d}:{number % 60:02d}+00:00",
        config=values,
        overrides=[f"experiment={experiment}", f"seq_len={values['seq_len']}"],
        versions=VERSIONS,
        hardware={"cpu_model": "Some CPU", "cpu_cores": 2, "gpus": None},
        git={"commit": "c0ffee" * 6 + "c0ff", "dirty": False},
        memory=memory if status in ("ok", "oom") else None,
        time=time,
        provenance={
            "memory": "measured" if measured else "simulated",
            "time": "measured" if measured else "predicted",
            "training": None,
            "flops": None,
        },
    )


def make_search(experiment, parameter, largest, *, outcome="found", **config):
    name = {"seq_len": "max_seq_len", "batch_size": "max_batch_size"}[parameter]
    record = make_record(experiment, search={"name": name}, **config)
    record.search = {
        "parameter": parameter,
        "outcome": outcome,
        "largest": largest,
        "smallest_failing": None if largest is None else largest + 8,
        "step": 8,
        "limit": 2**22,
        "budget_bytes": 83_900_000_000,
        "probes": [{"value": largest or 8, "fits": largest is not None, "peak_bytes": 80 * GIB}],
        "message": "made up",
    }
    record.provenance["search"] = "simulated"
    record.time = None
    return record


def make_timeline(points=120):
    """Live bytes by category of a made-up pass; categories sum to the total."""
    forward, names = points // 2, ("weights", "activations", "kv", "mystery", "tiny")
    columns = {name: [] for name in names}
    for i in range(points):
        height = i if i < forward else points - i
        columns["weights"].append(GIB)
        columns["activations"].append(height * GIB // 100)
        columns["kv"].append(GIB // 10 if i % 2 else 0)
        columns["mystery"].append(GIB // 20)
        columns["tiny"].append(1000)
    phases = ["start"] * 5 + ["forward/layer first"] * (forward - 5)
    return {
        "op_index": list(range(0, 10 * points, 10)),
        "phase": phases + ["backward/layer last"] * (points - forward),
        "live_bytes": [sum(values) for values in zip(*columns.values(), strict=True)],
        "by_category_bytes": columns,
    }


def make_paper_records():
    """Records of all the paper's experiments, simulated on its GPU and measured on a CPU."""
    records = []
    streams = (
        {"name": "streambp"},
        {"name": "streambp", "chunk_size": 500, "head_chunk_size": 100},
    )
    others = ({"name": "standard"}, {"name": "checkpointing"})
    for method, seq_len in itertools.product((*others, *streams), (1000, 4700, 20000, 110000)):
        records.append(make_record("bp_memory_figure", method=method, seq_len=seq_len))
    for model, method, tuning in itertools.product(
        ("qwen3_4b", "qwen3_8b"), (*others, streams[1]), ("full", "lora")
    ):
        largest = int(45 * GIB / SLOPES[method["name"]])
        config = {"model": {"name": model}, "method": method, "tuning": {"name": tuning}}
        records.append(make_search("max_seq_len_table", "seq_len", largest, **config))
    nothing = {"model": {"name": "qwen3_32b"}, "method": others[0], "tuning": {"name": "lora"}}
    records.append(
        make_search("max_seq_len_table", "seq_len", None, outcome="nothing_fits", **nothing)
    )
    for method, seq_len in itertools.product((*others, streams[0]), (6000, 9000, 27000)):
        config = {"model": {"name": "qwen3_4b"}, "method": method, "seq_len": seq_len}
        records.append(make_record("bp_time_table", **config))
    for method, batch in itertools.product((others[1], streams[0]), (1, 4, 16)):
        config = {"model": {"name": "qwen3_4b"}, "method": method, "seq_len": 9000}
        records.append(make_record("batch_table", batch_size=batch, **config))
    for method, largest in ((others[1], 8), (streams[0], 37)):
        records.append(
            make_search("batch_table", "batch_size", largest, method=method, seq_len=2048)
        )
    for chunks in (1, 20, 500):
        method = others[0] if chunks == 1 else streams[0]
        options = {"rows": 100_000, "width": 16_384, "num_chunks": chunks}
        peak = 12e9 + 24e9 / chunks
        memory = {
            "peak_allocated_bytes": int(peak),
            "intermediate_peak_bytes": int(peak - 10.85e9),
            "budget_bytes": 83_900_000_000,
            "fits": True,
            "gpu": {"name": "a800_80gb"},
        }
        kind = {"kind": "linear_example", "options": options}
        records.append(
            make_record("linear_example", memory=memory, method=method, experiment_=kind)
        )
        records[-1].config["experiment"] |= kind
        del records[-1].config["experiment_"]
    for model, method, seq_len in itertools.product(
        ("llama_3_1_8b", "gemma_3_1b"), (*others, streams[1]), (3000, 18000)
    ):
        config = {"model": {"name": model}, "method": method, "seq_len": seq_len}
        records.append(make_record("other_models", **config))
    for chunk in (100, 500, 9000):
        method = {"name": "streambp", "chunk_size": chunk}
        records.append(make_record("chunk_size_ablation", method=method, seq_len=9000))
    records.append(make_record("chunk_size_ablation", method=others[1], seq_len=9000))
    for experiment in ("bp_memory_figure", "bp_time_table"):
        for method, seq_len in itertools.product((*others, streams[0]), (256, 512)):
            config = {"model": {"name": "qwen3_30m"}, "method": method, "seq_len": seq_len}
            records.append(
                make_record(experiment, device={"name": "cpu"}, dtype="float32", **config)
            )
    return records


def write_all(root, records):
    for record in records:
        folder = root / record.experiment / record.job
        folder.mkdir(parents=True)
        record.write(folder)
    return root
