"""The page of ``zeroresize report`` as a browser reads it; skipped where there is no chromium."""

import html
import re
import shutil
import subprocess

import pytest
from helpers.told_runs import RUN, write_runs

from zeroresize.commands.__main__ import main

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
#: Says in the page's title whether the page is wider than the window, and what went wrong or was asked for elsewhere.
PROBE = """<script>
const wrong = [];
addEventListener("error", event => wrong.push(event.message), true);
addEventListener("load", () => {
  const width = document.documentElement.scrollWidth, elsewhere = performance.getEntriesByType("resource").length;
  const flat = [...document.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().height < 50).length;
  document.title = JSON.stringify({wrong, elsewhere, flat, overflow: width - innerWidth});
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    paths = write_runs(folder, first=RUN, second=RUN[:4])
    assert main(["report", *paths, "--out", str(folder / "report.html")]) == 0
    probed = folder / "probed.html"
    probed.write_text((folder / "report.html").read_text().replace("<head>", f"<head>{PROBE}", 1))
    return probed


@pytest.mark.skipif(BROWSER is None, reason="no chromium is on PATH")
@pytest.mark.parametrize("width", [1200, 400])
def test_headline_and_pictures_are_there_without_errors_and_nothing_is_cut(page, width, tmp_path):
    command = [BROWSER, *OPTIONS, f"--user-data-dir={tmp_path}", f"--window-size={width},1000", "--dump-dom"]
    shown = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=100, check=True)
    body = shown.stdout.partition("<body>")[2]
    assert "would have been 1 min 10 s, 40 % more" in body
    assert body.count("<svg") == 1 + 2 * 3
    title = html.unescape(re.search("<title>(.*?)</title>", shown.stdout)[1])
    assert title == '{"wrong":[],"elsewhere":0,"flat":0,"overflow":0}'
    assert "CONSOLE" not in shown.stderr
