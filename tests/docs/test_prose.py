"""Prose in Markdown: lines that fit, and contents that are those of the page."""

import re
import subprocess

import pytest
from readme import ROOT

COLUMNS = 100
FILES = subprocess.run(
    ["git", "ls-files", "*.md", ":!tests/golden"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.splitlines()


def prose(text: str) -> list[str]:
    """Return the lines of a page that can be broken: no code, tables, headings, links or pictures
    alone in a line.
    """
    outside = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S).splitlines()
    return [line for line in outside if not re.match(r"\s*(\||#|!\[|- \[[^]]*\]\([^)]*\)$)", line)]


@pytest.mark.parametrize("file", FILES)
def test_lines_fit(file: str) -> None:
    long = [line for line in prose(ROOT.joinpath(file).read_text(encoding="utf-8")) if len(line) > COLUMNS]
    # A word that is longer than the rest of a line, such as an address, cannot be broken.
    assert not [line for line in long if len(max(line.split(), key=len)) < COLUMNS // 2]


def test_the_log_lists_each_of_its_entries_once_the_newest_first() -> None:
    table = ROOT.joinpath("deployments", "LOG.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([\d-]{10}) \| \[[^]]+\]\(log/([^)]+)\) \|[^|]*(?:\\\|[^|]*)*\|[^|]*(?:\\\|[^|]*)*\|$", table, re.M
    )
    assert len(rows) == len(table.splitlines()) - 7
    assert sorted(name for _, name in rows) == sorted(
        file.name for file in ROOT.joinpath("deployments", "log").iterdir()
    )
    assert [date for date, _ in rows] == sorted((date for date, _ in rows), reverse=True)
    assert all(name.startswith(date) for date, name in rows)


def test_contents_are_those_of_the_page() -> None:
    text = ROOT.joinpath("agentr_core", "DECISIONS.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (?!Contents$)(.+)$", text, re.M)
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    listed = re.findall(r"^- \[(.+)\]\(#(.+)\)$", text, re.M)
    assert listed == list(zip(headings, anchors, strict=True))
    assert len(set(anchors)) == len(anchors)
    assert not re.search(r"\S ## ", text), "a heading stands inside a paragraph"
