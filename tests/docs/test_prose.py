"""Prose in Markdown: lines that fit, the table of the log, and the list of decisions."""

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


def test_each_decision_is_a_line_that_names_the_file_with_its_reason() -> None:
    text = ROOT.joinpath("agentr_core", "DECISIONS.md").read_text(encoding="utf-8")
    subjects = re.split(r"^## .+$", text, flags=re.M)[1:]
    assert len(text.splitlines()) <= 250
    assert len(subjects) > 5
    for subject in subjects:
        lines = subject.strip().splitlines()
        matches = [re.fullmatch(r"- (2\d{3}-\d\d-\d\d) .*\w.*: `(\S+)`", line) for line in lines]
        assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
        dates, files = zip(*(match.groups() for match in matches if match), strict=True)
        assert list(dates) == sorted(dates)
        assert not [file for file in files if not (ROOT / "agentr_core" / file).exists() and not (ROOT / file).exists()]
