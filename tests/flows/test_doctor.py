"""`agentr doctor`: what this machine gives."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.cli import cli, main
from flows.commands.doctor import machine


def test_it_says_which_level_holds_and_why_none_above_does() -> None:
    # The server of other tests in this process plans nothing.
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        done = CliRunner().invoke(cli, ["doctor", "--attempts"], catch_exceptions=False)
    first, *rest = done.output.splitlines()
    assert first.startswith("python tool: level ")
    assert any(line.endswith("fork: held") for line in rest) == (" limits " not in first)
    if " bubblewrap " not in first:
        assert rest[0].startswith("python tool: level bubblewrap does not hold: ")


def test_it_says_what_the_machine_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lines() -> dict[str, str]:
        return dict(line.split(": ", 1) for line in machine())

    monkeypatch.setenv("AGENTR_VLLM_ENV", str(tmp_path))
    before = lines()
    assert list(before) == ["python", "torch", "gpu", "vllm", "disk"]
    assert before["python"].startswith(platform.python_version())
    assert before["torch"].startswith(torch.__version__)
    assert before["vllm"] == f"none in {tmp_path}; `agentr models install` makes it"
    assert float(before["disk"].split(" GiB free")[0].replace(",", "")) > 0
    (tmp_path / "lib" / "python3.12" / "site-packages" / "vllm-0.9.1.dist-info").mkdir(parents=True)
    assert lines()["vllm"] == f"vllm-0.9.1 in {tmp_path}"


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
