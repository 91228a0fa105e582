"""Progress of commands that are no runs."""

import sys
import time

import pytest

from flows.commands import progress


@pytest.mark.parametrize("terminal", [True, False])
def test_count_elapsed_and_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    clock = iter([0.0, 0.0, 20.0, 21.0, 40.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    show = progress.progress_printer()
    for done in (0, 5, 6, 10):
        show(done, 10, "played")
    output = capsys.readouterr().err
    lines = ["5 of 10 played, 20 s, 20 s left", "10 of 10 played, 40 s"]
    if terminal:
        assert output.split("\r\033[K")[1:] == [lines[0], "6 of 10 played, 21 s, 14 s left", f"{lines[1]}\n"]
    else:
        assert output.splitlines() == lines
