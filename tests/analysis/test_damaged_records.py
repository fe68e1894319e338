"""Whatever stands in a record's file: it is read or it is skipped by name, and nothing breaks."""

import copy
import json
import warnings

import pytest
from made_up import make_record, make_search, write_all

from analysis import load, report, tables

SURROGATE = "half \ud800 a pair"
VALUES = (None, "text", SURROGATE, [7], {"a": "b"}, True, -1, 10**400)
LEFT_OUT = object()
EXPERIMENTS = ("bp_memory_figure", "bp_time_table", "max_seq_len_table")


def sources():
    """A simulated run, a measured one with losses and a benchmark, and a search, as JSON reads
    them."""
    simulated = make_record("bp_memory_figure", device={"assumptions": {"mask": "additive"}})
    measured = make_record("bp_time_table", device={"name": "cuda"})
    measured.hardware["gpus"] = [{"name": "NVIDIA H200", "memory_bytes": 1}]
    measured.training = {"loss_per_step": [2.0, 1.0]}
    measured.benchmark = {"summary": ["a line"]}
    search = make_search("max_seq_len_table", "seq_len", 36000)
    return [json.loads(record.to_json()) for record in (simulated, measured, search)]


def damaged(values):
    """Copies of a record in which one field, at whatever depth, is left out or holds another
    value; one with a field more."""

    def paths(section, path=()):
        for key, value in section.items() if isinstance(section, dict) else enumerate(section):
            yield (*path, key)
            if isinstance(value, (dict, list)):
                yield from paths(value, (*path, key))

    def with_value(path, value):
        result = copy.deepcopy(values)
        section = result
        for key in path[:-1]:
            section = section[key]
        if value is LEFT_OUT:
            del section[path[-1]]
        else:
            section[path[-1]] = value
        return result

    yield {**values, "a_later_field": {"of": ["any", "form"]}}
    for path in paths(values):
        for value in (LEFT_OUT, *VALUES):
            yield with_value(path, value)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with every damaged record, none of them looked at by the writer."""
    root = tmp_path_factory.mktemp("damaged")
    number = 0
    for source in sources():
        for values in damaged(source):
            number += 1
            folder = root / f"{number:05d}"
            folder.mkdir()
            (folder / "record.json").write_text(json.dumps(values))
    return root


@pytest.fixture(scope="module")
def survivors(runs):
    """What is left of them, after a warning about each of the others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load.sound(load.records(runs))
    named = {str(one.message).split(": ")[0].removeprefix("skipped ") for one in caught}
    files = {str(path) for path in runs.rglob("record.json")}
    assert named | {str(record.path) for record in found} == files
    assert len(files) > 1500
    assert len(found) > 400  # most fields are free to hold what they like
    assert len(named) > 400
    return found


def test_tables_are_made_of_what_is_left(survivors):
    for experiment in EXPERIMENTS:
        own = [record for record in survivors if record.experiment == experiment]
        built = tables.tables(own, experiment)
        assert built
        for table in built:
            assert table.to_markdown().encode()
            assert table.to_csv().encode()
            assert table.to_latex().encode()


def test_the_page_shows_the_rest_with_its_pictures(survivors):
    page = report.report(survivors[::10])  # each is a variant of its own: pictures are slow
    assert page.encode()
    assert page.count("<figure>") >= len(EXPERIMENTS)


DAMAGE = [
    lambda v: v["git"].update(commit=["a", "list"]),
    lambda v: v.update(status_detail=SURROGATE),
    lambda v: v["config"]["model"].update(name=SURROGATE),
    lambda v: v["hardware"].update(cpu_model=SURROGATE),
    lambda v: v["overrides"].append(7),
    lambda v: v["memory"].update(fits="yes"),
    lambda v: v.update(time={"forward_time_s_samples": "12"}),
    lambda v: v["config"].update(seq_len=None),
    lambda v: v["config"].update(search="max_seq_len"),
    lambda v: v["provenance"].update(memory=["simulated"]),
]


def test_the_page_names_damaged_records_and_shows_the_good_one(tmp_path, capsys):
    good, *bad = (make_record("bp_memory_figure") for _ in range(1 + len(DAMAGE)))
    write_all(tmp_path / "runs", [good, *bad])
    for record, damage in zip(bad, DAMAGE, strict=True):
        values = json.loads(record.path.read_text())
        damage(values)
        record.path.write_text(json.dumps(values))
    assert report.main([str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    said = capsys.readouterr().err
    assert "<p>1 runs" in page
    for record in bad:
        assert str(record.path) in page
        assert f"warning: skipped {record.path}" in said


def test_an_assumption_of_no_known_form_is_left_out_of_the_caption():
    record = make_record("bp_memory_figure", device={"assumptions": {"mask": ["additive"]}})
    (table, *_) = tables.tables([record], "bp_memory_figure")
    assert "Simulated" not in table.caption.replace("(simulated)", "")
