"""The report is one file that a real browser shows without errors, on a phone and on a desktop."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from made_up import make_record, write_all

from analysis import load, report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTHS = (390, 1280)
# Runs in the page, which is a frame of the wanted width: a window is never narrower than 500
# pixels. The frame around it leaves the answer in an attribute that --dump-dom prints.
PROBE = """
<script>addEventListener('load', () => {
  const wide = [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll')
    && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + '.' + e.className);
  const small = [...document.querySelectorAll('p, td, li, th, h2')].filter(
    e => parseFloat(getComputedStyle(e).fontSize) < 12).length;
  const text = [...document.querySelectorAll('figure svg text')].filter(e => e.textContent.trim())
    .map(e => e.getBoundingClientRect().height).filter(h => h > 0);
  parent.postMessage(JSON.stringify({
    width: innerWidth, page: document.scrollingElement.scrollWidth, wide, small,
    pictures: document.querySelectorAll('figure svg, figure img').length,
    broken: [...document.images].filter(i => !i.naturalWidth).length,
    tables: document.querySelectorAll('table').length,
    smallest: Math.min(...text)}), '*');
});</script></body>"""
FRAME = """<!DOCTYPE html><body style="margin:0"><script>addEventListener('message', event => {
  document.documentElement.dataset.probe = event.data; });</script>
<iframe src="inner.html" style="border:0;width:@WIDTH@px;height:2400px"></iframe></body>"""


@pytest.fixture(scope="module")
def browser():
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser on this machine (none of {', '.join(BROWSERS)}; or set CHROMIUM)")
    return found


@pytest.fixture(scope="module")
def page(paper_runs):
    return report.report(load.sound(load.records(paper_runs)), ["skipped runs/x: <not> a record"])


def visit(browser, folder, text, width, *options):
    """(stdout, console lines) of a page shown in a window of that width."""
    file = folder / f"page_{width}.html"
    file.write_text(text, encoding="utf-8")
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},2400",
        *options,
        file.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_console_is_heard(browser, tmp_path):
    text = "<html><body>x<script>console.error('broken'); nothing.at.all</script></body></html>"
    _, console = visit(browser, tmp_path, text, 500, "--dump-dom")
    assert any("broken" in line for line in console)
    assert any("ReferenceError" in line for line in console)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_shows_it(browser, page, tmp_path, width):
    (tmp_path / "inner.html").write_text(page.replace("</body>", PROBE), encoding="utf-8")
    frame = FRAME.replace("@WIDTH@", str(width))
    dom, console = visit(browser, tmp_path, frame, max(width, 500), "--dump-dom")
    assert console == []
    (found,) = re.findall(r'data-probe="([^"]*)"', dom)
    seen = json.loads(found.replace("&quot;", '"'))
    assert seen["width"] == width
    assert seen["page"] <= width, seen["wide"]
    assert seen["wide"] == []
    assert seen["small"] == 0
    assert seen["broken"] == 0
    assert seen["pictures"] >= 9
    assert seen["tables"] >= 9
    assert seen["smallest"] >= 6  # pixels of the smallest text in a picture


@pytest.mark.parametrize("width", WIDTHS)
def test_a_screenshot_is_not_blank(browser, page, tmp_path, width):
    picture = tmp_path / "shot.png"
    visit(browser, tmp_path, page, width, f"--screenshot={picture}")
    import matplotlib.image

    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[1] == width
    assert len({tuple(pixel) for row in pixels[::40, ::7] for pixel in row.tolist()}) > 10


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.ids = [], []

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href", "xlink:href"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)


def test_nothing_is_loaded_from_elsewhere(page):
    parser = _Links()
    parser.feed(page)
    assert parser.links
    for link in parser.links:
        assert link.startswith(("#", "data:")), link
    assert "@import" not in page
    assert "<link rel=stylesheet" not in page
    assert len(parser.ids) == len(set(parser.ids))
    inside = {link.removeprefix("#") for link in parser.links if link.startswith("#")}
    assert inside <= set(parser.ids)


def test_it_says_what_was_measured_and_what_simulated(page):
    for text in ("<strong>measured</strong>", "<strong>simulated</strong>", "arXiv 2506.03077"):
        assert text in page
    assert "python run.py -m experiment=bp_memory_figure device=simulated" in page
    assert "python run.py -m experiment=bp_memory_figure device=cpu" in page
    assert f"published {72000 / 15700:.2f}×" in page


def test_long_column_headings_have_room(page):
    heading = re.search(r"<th class=\"([^\"]*)\">simulated, chunk 500, head 100<", page)
    assert heading and "long" in heading.group(1).split()
    assert re.search(r"th\.long \{ min-width", page)


def test_failures_and_skipped_files_are_listed_and_escaped(page):
    assert "it &lt;broke&gt;" in page
    assert "skipped runs/x: &lt;not&gt; a record" in page
    assert "<broke>" not in page


def test_an_empty_folder_makes_a_page_too(tmp_path, capsys):
    out = tmp_path / "deep" / "page.html"
    (tmp_path / "runs").mkdir()
    assert report.main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert "0 runs" in out.read_text(encoding="utf-8")
    assert report.main([str(tmp_path / "nowhere")]) == 2
    assert "Fix: run an experiment" in capsys.readouterr().err


def test_corrupt_records_are_named_in_the_page_and_on_the_terminal(tmp_path, capsys):
    write_all(tmp_path / "runs", [make_record("bp_memory_figure"), make_record("bp_memory_figure")])
    broken = next((tmp_path / "runs").rglob("record.json"))
    broken.write_text("{")
    out = tmp_path / "page.html"
    assert report.main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert str(broken) in out.read_text(encoding="utf-8")
    assert str(broken) in capsys.readouterr().err
