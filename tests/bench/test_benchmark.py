"""The benchmark alternates its variants and judges ratios of medians; no clock is asserted."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from streambp.bench import benchmark
from streambp.bench.config import ConfigError, RunConfig
from streambp.bench.preflight import resolve
from streambp.bench.progress import CallbackProgress

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture
def composed():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield lambda *overrides: RunConfig.from_hydra(
            compose("config", overrides=["experiment=cpu_benchmark", *overrides])
        )


def test_the_benchmark_of_the_readme_is_the_one_promised(composed):
    config, _ = resolve(composed())
    options = benchmark.Options.parse(config.experiment.options)
    fields = config.model.config
    assert (fields["hidden_size"], fields["num_hidden_layers"], fields["vocab_size"]) == (
        1024,
        2,
        32768,
    )
    assert (config.dtype, options.rounds) == ("float32", 5)
    limits = {(g.measure, g.seq_len, g.variant, g.over): g.at_most for g in options.targets}
    assert limits[("time", 6144, "streambp_kept", "checkpointing")] == 0.88
    assert limits[("time", 6144, "streambp", "checkpointing")] == 0.95
    assert limits[("memory", 3072, "streambp", "checkpointing")] == 0.27
    assert limits[("memory", 3072, "streambp", "standard")] == 0.17


def test_samples_medians_and_targets(composed):
    goal = "{measure: %s, seq_len: 64, variant: streambp, over: standard, at_most: %s}"
    config, _ = resolve(
        composed(
            "model=qwen3_tiny",
            "experiment.options.rounds=2",
            "experiment.options.time_variants=null",
            "experiment.options.time_seq_lens=[64]",
            "experiment.options.memory_seq_lens=[64]",
            f"experiment.options.targets=[{goal % ('memory', 1.0)},{goal % ('time', 1e9)}]",
        )
    )
    events = []
    sections = benchmark.run(config, CallbackProgress(events.append))
    found = sections["benchmark"]
    samples = found["forward_backward_time_s_samples"]["64"]
    assert set(samples) == {"standard", "checkpointing", "streambp", "streambp_kept"}
    assert all(len(times) == 2 and min(times) > 0 for times in samples.values())
    peaks = found["activation_peak_bytes"]["64"]
    assert 0 < peaks["streambp"] <= peaks["streambp_kept"]
    memory, time = found["targets"]
    assert memory["ratio"] == peaks["streambp"] / peaks["standard"]
    assert memory["met"] is (memory["ratio"] <= 1.0) and time["met"] is True
    assert any("streambp / standard" in line for line in found["summary"])
    assert sections["provenance"]["time"] == "measured"
    assert {event["event"] for event in events} >= {"phase", "message", "section"}


def test_options_that_do_not_fit_are_refused_before_work(composed):
    with pytest.raises(ConfigError, match="at_mots"):
        resolve(
            composed(
                "experiment.options.targets=[{measure: time, seq_len: 1, variant: a, over: b,"
                " at_mots: 1}]"
            )
        )
    with pytest.raises(ConfigError, match=r"experiment\.options\.rounds"):
        resolve(composed("experiment.options.rounds=0"))
    with pytest.raises(ConfigError, match="no such variant"):
        resolve(composed("~experiment.options.variants.streambp"))
