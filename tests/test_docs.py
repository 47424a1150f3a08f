"""The pages link to files and headings that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SITE = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in ROOT.glob("docs/**/*.md")}


def anchors_of(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", without_code(page))
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"[`*]", "", heading)) for heading in headings]
    return {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def without_code(page):
    return re.sub(r"(?s)```.*?```", "", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_what_there_is(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            broken.append(link)
    assert not broken


def test_paths_of_the_package_that_pages_name_exist():
    missing = []
    for page in (ROOT / "docs" / "architecture.md", *ROOT.glob("docs/design/*.md")):
        for path in re.findall(r"`(?:zeroresize/)?([a-z_]+/[a-z_/]*(?:\.py)?)`", page.read_text(encoding="utf-8")):
            if not any((root / path).exists() for root in (ROOT / "zeroresize", ROOT)):
                missing.append(f"{page.name}: {path}")
    assert not missing


def test_each_page_stands_in_the_navigation_once():
    index = (ROOT / "docs" / "index.md").read_text()
    shown = re.findall(r"(?ms)^```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", index)
    assert sorted([*" ".join(shown).split(), "index"]) == sorted(SITE)


def test_words_of_log_lines_and_words_that_mean_several_things_elsewhere_are_explained():
    rows = re.findall(r"(?m)^\| ([^|]+) \|", (ROOT / "docs" / "words.md").read_text())
    words = {word.strip() for row in rows for word in row.split(",")}
    assert {"unit", "lent", "target", "Baseline", "comparing products"} <= words
    assert {"host", "cluster", "schedule", "shares", "partition", "update", "migrate"} <= words
