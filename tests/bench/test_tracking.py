"""W&B gets everything but secrets, one run each, and can never cost a run its record."""

import functools
import sys
import types
from urllib.parse import urlsplit

import pytest
import wandb_log

from streambp.bench.config import TrackingConfig
from streambp.bench.display import Display
from streambp.bench.records import RunRecord
from streambp.bench.runner import run_job
from streambp.bench.tracking import Tracker, tracker_for
from streambp.bench.tracking.masking import MASK, masked
from streambp.bench.tracking.wandb_tracker import mode


class FakeRun:
    def __init__(self, arguments):
        self.arguments = arguments
        self.logged = []
        self.summary = {}
        self.exit_code = None

    def log(self, values, step=None):
        self.logged.append((step, values))

    def finish(self, exit_code=0):
        self.exit_code = exit_code


@pytest.fixture
def fake_wandb(monkeypatch, fake_worker):
    module = types.ModuleType("wandb")
    module.runs = []

    def init(**arguments):
        module.runs.append(FakeRun(arguments))
        return module.runs[-1]

    module.init = init
    module.Settings = lambda **settings: settings
    module.Table = lambda columns, data: {"columns": columns, "data": data}
    module.plot = types.SimpleNamespace(line=lambda table, **options: options)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    return module


@pytest.fixture
def make_config(make_config):
    """As everywhere here, tracked."""
    return functools.partial(make_config, tracking={"name": "wandb", "tags": ["mine"]})


def test_one_wandb_run_for_each_run_with_everything_in_it(fake_wandb, make_config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    outcomes = [run_job(make_config(seed=seed)) for seed in (0, 1)]
    assert len(fake_wandb.runs) == 2
    run, record = fake_wandb.runs[0], outcomes[0].record
    assert run.arguments["id"] == record.run_id
    assert run.arguments["group"] == "exp"
    assert run.arguments["mode"] == "offline"
    assert {"mine", "exp", "standard"} <= set(run.arguments["tags"])
    assert run.arguments["config"]["seq_len"] == 1024
    assert run.arguments["config"]["versions"] == record.versions
    assert run.logged[0] == (1, {"training/loss": 2.5, "training/grad_norm": 1.0})
    assert run.logged[-1][1]["time/samples"]["data"][0] == ["forward_backward_time_s", 0, 3.0]
    assert run.summary["status"] == "ok"
    assert run.summary["memory/peak_live_bytes"] == 2**30
    assert run.summary["time/forward_backward_time_s_median"] == 2.0
    assert run.exit_code == 0


def test_a_run_that_is_there_already_is_said_to_be_not_sent(
    fake_wandb, make_config, monkeypatch, capsys
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    said = []
    for changes in ({}, {}, {"tracking": {"name": "none"}, "measure": {"timeline": True}}):
        Display(None).ended(run_job(make_config(**changes)))
        said.append("(not sent to W&B; force=true redoes it)" in capsys.readouterr().out)
    assert said == [False, True, False]
    assert len(fake_wandb.runs) == 1


@pytest.mark.parametrize("behaviour", ["SIGKILL", "error", "oom"])
def test_a_failed_run_is_failed_there_and_recorded_here(
    fake_wandb, make_config, monkeypatch, behaviour
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    record = run_job(make_config(behaviour)).record
    (run,) = fake_wandb.runs
    assert run.exit_code == 1
    assert run.summary["status"] == record.status != "ok"
    assert run.logged[0][1]["training/loss"] == 2.5
    assert RunRecord.load(record.path).status == record.status


def test_a_wandb_failure_is_a_warning_and_the_record_stays(fake_wandb, make_config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    def broken(**_):
        raise OSError("no network")

    fake_wandb.init = broken
    with pytest.warns(UserWarning, match="W&B tracking stopped: OSError: no network"):
        record = run_job(make_config()).record
    assert RunRecord.load(record.path).status == "ok"


def test_mode_is_offline_without_a_key(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    auto = TrackingConfig(name="wandb")
    assert mode(auto) == "offline"
    server = urlsplit(pytest.importorskip("wandb").setup().settings.base_url).netloc
    for host, expected in (("example.org", "offline"), (server, "online")):
        (tmp_path / "netrc").write_text(f"machine {host} login user password x")
        assert mode(auto) == expected
    assert mode(TrackingConfig(name="wandb", mode="offline")) == "offline"
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert mode(auto) == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode(auto) == "disabled"


def test_what_looks_like_a_key_is_masked(monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "a-very-private-value")
    found = masked(
        {
            "api_key": "abc",
            "nested": [{"password": "x"}, "prefix a-very-private-value suffix"],
            "overrides": ["data.path=hf_" + "a" * 30, "+model.options.api_key=b", "seq_len=3"],
            "commit": "0123456789" * 4,
            "text": "0123456789" * 4,
            "tokens_per_step": 4,
            "tokenizer": "/path/to/tokenizer",
            "monkey": "george",
        }
    )
    assert found["api_key"] == MASK
    assert found["nested"] == [{"password": MASK}, f"prefix {MASK} suffix"]
    masked_key = f"+model.options.api_key={MASK}"
    assert found["overrides"] == [f"data.path={MASK}", masked_key, "seq_len=3"]
    assert found["commit"] == "0123456789" * 4
    assert found["text"] == MASK
    assert found["tokens_per_step"] == 4
    assert found["tokenizer"] == "/path/to/tokenizer"
    assert found["monkey"] == "george"


@pytest.mark.parametrize(
    ("variable", "value", "secret"),
    [
        ("MYAPIKEY", "abcdefgh1", "abcdefgh1"),
        ("GITHUB_PAT", "abcdefgh2", "abcdefgh2"),
        ("MY_PASSPHRASE", "correct horse", "correct horse"),
        ("KAGGLE_KEY_1", "abcdefgh3", "abcdefgh3"),
        ("dbPassword", "hunter2", "hunter2"),
        ("DATABASE_URL", "postgres://me:s3cr%40t@host:5432/db", "s3cr%40t"),
        ("DATABASE_URL", "postgres://me:s3cr%40t@host:5432/db", "s3cr@t"),
    ],
)
def test_secrets_of_the_environment_are_masked_wherever_they_stand(
    monkeypatch, variable, value, secret
):
    monkeypatch.setenv(variable, value)
    found = masked({f"a {secret} b": [f"x/{secret}/y", secret]})
    assert found == {f"a {MASK} b": [f"x/{MASK}/y", MASK]}


def test_words_that_stand_everywhere_are_no_secrets(monkeypatch):
    for name, value in (("USE_AUTH", "true"), ("MAX_TOKENS", "1024"), ("PWD", "/some/folder")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MY_SECRET", "flat")  # short: only as a word of its own
    kept = ["seq_len=1024", "force=true", "/some/folder", "flatten", "no such key: foo"]
    assert masked(kept) == kept
    assert masked("flat x") == f"{MASK} x"


@pytest.mark.parametrize(
    "secret",
    [
        "glpat-" + "aB3_" * 5,
        "AIza" + "Sy1-" * 9,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "wandb_v1_" + "aB3d" * 8,
        "ghs_" + "a1B2" * 9,
    ],
)
def test_shapes_of_keys_are_masked(secret):
    assert masked(f"x {secret} y") == f"x {MASK} y"


def test_headers_addresses_and_assignments_are_masked():
    assert masked("curl -H 'Authorization: Bearer abc.def'") == f"curl -H 'Authorization: {MASK}'"
    assert masked("Bearer abcdef") == f"Bearer {MASK}"
    assert masked("see https://me:pw@host/x") == f"see https://{MASK}@host/x"
    assert masked("me:pw@host") == f"{MASK}@host"
    assert masked("+x={api_key: abc, b: 2}") == f"+x={{api_key: {MASK}, b: 2}}"
    assert masked("seq_len=3 and db_password=abc") == f"seq_len=3 and db_password={MASK}"
    two = masked({"hf_" + "a" * 30: 1, "hf_" + "b" * 30: 2})
    assert two == {MASK: 1, f"{MASK}2": 2}


@pytest.mark.parametrize("field", ["project", "entity"])
def test_an_address_that_is_a_secret_is_not_sent(fake_wandb, make_config, monkeypatch, field):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("MY_SECRET", "supersecretvalue123")
    tracking = {"name": "wandb", field: "supersecretvalue123"}
    with pytest.warns(UserWarning, match=rf"tracking\.{field} looks like a secret"):
        assert run_job(make_config(tracking=tracking)).record.status == "ok"
    assert fake_wandb.runs == []


def test_no_secret_is_in_what_the_real_wandb_stores(make_config, fake_worker, monkeypatch):
    pytest.importorskip("wandb")
    secret = "supersecretvalue123"
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MY_SECRET", secret)
    outcome = run_job(
        make_config(
            tracking={
                "name": "wandb",
                "mode": "offline",
                "tags": [secret, "x" * 50 + secret],  # the second is cut within the secret
                "group": f"group {secret}",
            },
            model={"name": f"m-{secret}", "config": {"model_type": "qwen3", secret: secret}},
        ),
        overrides=[f"tracking.tags=[{secret}]"],
    )
    stored = wandb_log.read(outcome.folder)  # waits until all is there
    assert b"training/loss" in stored.raw
    assert secret[:10].encode() not in stored.raw


def test_no_tracking_is_silent(tmp_path):
    tracker = tracker_for(TrackingConfig(), tmp_path)
    assert type(tracker) is Tracker
    assert tracker.event({"event": "step"}) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("behaviour", "exit_code"), [("ok", 0), ("SIGKILL", 1)])
def test_the_real_wandb_keeps_loss_and_status_offline(
    make_config, fake_worker, monkeypatch, behaviour, exit_code
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracking = {"name": "wandb", "mode": "offline", "tags": ["mine"], "project": "its-name"}
    outcome = run_job(make_config(behaviour, tracking=tracking))
    found = wandb_log.read(outcome.folder)
    assert (found.project, found.run_id) == ("its-name", outcome.record.run_id)
    assert (found.group, found.name) == ("exp", outcome.record.job)
    assert {"mine", "exp", "tiny", "standard", "full", "cpu"} == set(found.tags)
    assert found.config["seq_len"] == 1024
    assert found.config["method"] == outcome.record.config["method"]
    assert found.config["versions"] == outcome.record.versions
    assert {"training/loss": 2.5, "training/grad_norm": 1.0, "_step": 1}.items() <= (
        found.history[0].items()
    )
    assert found.summary["status"] == ("ok" if behaviour == "ok" else "killed")
    assert found.exit_code == exit_code
