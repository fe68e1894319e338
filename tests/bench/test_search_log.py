"""What a search says of its probes, in its log and in its answer."""

import pytest

from streambp.bench import search, supervise
from streambp.bench.progress import CallbackProgress
from streambp.bench.runner import run_job
from streambp.bench.units import size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.00 MiB"), (3 * 2**20, "3.00 MiB"), (2**27, "0.12 GiB"), (80 * 2**30, "80.00 GiB")],
)
def test_small_sizes_are_told_apart(num_bytes, text):
    assert size_text(num_bytes) == text


def test_messages_are_in_the_log_whether_shown_or_not(make_config, fake_worker):
    outcome = run_job(make_config("message"))
    assert (outcome.folder / "run.log").read_text().splitlines() == ["working", "seq_len=64 fits"]


@pytest.mark.parametrize(("behaviour", "kept"), [("error", True), ("exit", True), ("ok", False)])
def test_the_log_of_a_probe_that_failed_is_kept(make_config, fake_worker, capsys, behaviour, kept):
    prober = search._Measured(make_config(behaviour, budget_gib=1))
    if kept:
        with pytest.raises(RuntimeError, match="seq_len=64 ended as error"):
            prober.probe("seq_len", 64)
        assert capsys.readouterr().out.startswith("seq_len=64 ended as error; its log:\nworking\n")
    else:
        prober.probe("seq_len", 64)
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ({"peak_live_bytes": 3 * 2**20}, "its measured peak is 3.00 MiB (budget: 1.00 MiB)"),
        (None, "it ran out of memory (budget: 1.00 MiB) before its peak was known"),
    ],
)
def test_nothing_fits_names_peak_and_size(make_config, monkeypatch, memory, said):
    def out_of_memory(folder, ending, **_):
        ending.status, ending.sections = "oom", {"memory": memory}

    monkeypatch.setattr(supervise, "supervise", out_of_memory)
    events = []
    config = make_config(budget_gib=2**-10, search={"name": "max_seq_len"})
    found = search.run(config, CallbackProgress(events.append))["search"]
    assert found["outcome"] == "nothing_fits"
    assert f"not even seq_len=64: {said}" in found["message"]
    peaks = [event["text"] for event in events if "peak" in event.get("text", "")]
    assert all("GiB" not in text for text in peaks)
