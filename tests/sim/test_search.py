"""The maximum search: right whatever the probes say, few of them, and explicit about its ends."""

import random

import pytest

from streambp.bench import search
from streambp.bench.config import ConfigError, RunConfig
from streambp.bench.search import EVERYTHING_FITS, FOUND, NOTHING_FITS, Options, Probe, find_max


def prober(peak_of, budget, knows_peak=True, log=None):
    def try_value(value):
        if log is not None:
            log.append(value)
        peak = peak_of(value)
        fits = peak <= budget
        return Probe(value=value, fits=fits, peak_bytes=peak if knows_peak or fits else None)

    return try_value


@pytest.mark.parametrize(
    ("knows_peak", "knows_budget"), [(True, True), (False, False), (False, True)]
)
@pytest.mark.parametrize("seed", range(30))
def test_the_answer_is_the_largest_multiple_that_fits(seed, knows_peak, knows_budget):
    rng = random.Random(seed)
    base, slope, square = rng.randrange(1000), rng.randrange(1, 50), rng.random() / 100

    def peak_of(value):
        return int(base + slope * value + square * value**2)

    budget, step = rng.randrange(2000, 10**6), rng.choice([1, 8, 64])
    limit = 2 * 10**4
    found = find_max(
        prober(peak_of, budget, knows_peak),
        budget_bytes=budget if knows_budget else None,
        step=step,
        start=rng.randrange(1, 5000),
        limit=limit,
    )
    assert len(found.probes) < 45
    fitting = [v for v in range(step, limit + 1, step) if peak_of(v) <= budget]
    assert found.largest == (fitting[-1] if fitting else None)
    if found.outcome == FOUND:
        assert found.smallest_failing == found.largest + step
        tried = {probe.value: probe.fits for probe in found.probes}
        assert tried[found.largest] and not tried[found.smallest_failing]  # verified


def test_an_affine_peak_takes_few_probes():
    log: list[int] = []
    found = find_max(
        prober(lambda v: 30_000_000 + 2345 * v, 80_000_000, log=log),
        budget_bytes=80_000_000,
        step=8,
        start=1024,
        limit=2**22,
    )
    assert found.largest == (50_000_000 // 2345) // 8 * 8
    assert len(log) <= 5 and len(set(log)) == len(log)


def test_a_stepped_peak_does_not_stall_the_secant():
    log: list[int] = []
    found = find_max(
        prober(lambda v: 10**6 * (v // 5000), 7 * 10**6, log=log),
        budget_bytes=7 * 10**6,
        step=8,
        start=64,
        limit=2**22,
    )
    assert found.largest == 39_992
    assert len(log) < 60


def test_a_peak_that_hardly_grows_at_first_is_not_followed_to_the_limit():
    log: list[int] = []
    found = find_max(
        prober(lambda v: max(50_000_000 + v, 1_000_000 * v), 80_000_000, log=log),
        budget_bytes=80_000_000,
        step=1,
        start=1,
        limit=2**22,
    )
    assert found.largest == 80
    assert max(log) < 1000 and len(log) < 15


def test_nothing_fits_and_everything_fits_are_said():
    nothing = find_max(prober(lambda v: 10, 5), budget_bytes=5, step=8, start=100, limit=1000)
    assert (nothing.outcome, nothing.largest, nothing.smallest_failing) == (NOTHING_FITS, None, 8)
    everything = find_max(prober(lambda v: 1, 5), budget_bytes=5, step=8, start=100, limit=1000)
    assert (everything.outcome, everything.largest) == (EVERYTHING_FITS, 1000)
    assert everything.smallest_failing is None


def test_other_failures_are_not_taken_for_out_of_memory():
    def broken(value):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        find_max(broken, budget_bytes=None, step=1, start=1, limit=4)


def config_of(**changes):
    values = {
        "model": {"name": "small", "config": {"model_type": "qwen3"}},
        "method": {"name": "standard"},
        "search": {"name": "max_seq_len"},
    }
    return RunConfig.from_dict({**values, **changes})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "max_width"}, "search.name='max_width'"),
        ({"name": "max_seq_len", "stepp": 8}, "search.stepp"),
        ({"name": "max_seq_len", "step": 0}, "search.step=0"),
        ({"name": "max_seq_len", "step": 64, "limit": 8}, "search.limit=8"),
    ],
)
def test_settings_are_checked(values, message):
    with pytest.raises(ConfigError, match=message):
        Options.parse(config_of(search=values), measured=False)


def test_steps_follow_the_device_and_the_parameter():
    assert Options.parse(config_of(), measured=False).step == 8
    assert Options.parse(config_of(), measured=True).step == 64
    batch = config_of(search={"name": "max_batch_size"}, batch_size=3)
    assert Options.parse(batch, measured=False).step == 1
    assert Options.parse(batch, measured=False).start == 3


def test_a_search_on_the_cpu_needs_a_budget():
    with pytest.raises(ConfigError, match="budget_gib"):
        search.run(config_of(device={"name": "cpu"}), search.Progress())
