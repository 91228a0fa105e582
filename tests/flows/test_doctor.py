"""`agentr doctor`: what this machine gives."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.cli import cli, main


def test_it_says_which_level_holds_and_why_none_above_does() -> None:
    # The server of other tests in this process plans nothing.
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        done = CliRunner().invoke(cli, ["doctor", "--attempts"], catch_exceptions=False)
    first, *others = done.output.splitlines()
    assert first.startswith("python tool: level ")
    assert any(line.endswith("fork: held") for line in others) == (" limits " not in first)
    if " bubblewrap " not in first:
        assert others[0].startswith("python tool: level bubblewrap does not hold: ")


def test_it_says_that_a_level_which_leaves_files_open_must_be_named(open_files: None) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        lines = CliRunner().invoke(cli, ["doctor"], catch_exceptions=False).output.splitlines()
    assert lines[0].startswith("python tool: level seccomp holds, as ")
    assert lines[1:4] == [
        "python tool: level bubblewrap is not here",
        "python tool: level landlock is not here",
        "python tool: at seccomp, where code can use your files; no run takes that level unless its recipe names it: "
        "environment.options.sandbox=seccomp",
    ]


def test_a_machine_on_which_nothing_holds_is_the_users_to_mend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["agentr", "doctor"])
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "level limits does not hold: [Errno 2] No such file or directory" in capsys.readouterr().err
