"""Temporary folders of child processes: who removes them, and when."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from readme import ROOT

from agentr_core.system import Scratch

_HOLDER = "import sys; from agentr_core.system import Scratch; s = Scratch('x'); print(s.path, flush=True); input()"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder() -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )


def test_a_folder_is_removed_by_close_and_with_its_object(place: Path) -> None:
    first, second = Scratch("x"), Scratch("x")
    assert sorted(map(str, place.iterdir())) == sorted((first.path, second.path))
    first.close()
    first.close()
    del second
    assert not list(place.iterdir())


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_holds_is_not(place: Path) -> None:
    (place / "agentr-x-file").touch()
    with holder() as survivor, holder() as victim:
        assert survivor.stdout is not None
        assert victim.stdout is not None
        survivor_folder, victim_folder = (
            Path(survivor.stdout.readline().strip()),
            Path(victim.stdout.readline().strip()),
        )
        victim.kill()
        victim.wait()
        young = Path(tempfile.mkdtemp(prefix="agentr-x-"))
        for folder in (survivor_folder, victim_folder):
            (folder / "work").mkdir()
            os.utime(folder, (0, time.time() - 3600))
        Scratch("y").close()
        assert victim_folder.exists(), "of another name"
        Scratch("x").close()
        assert not victim_folder.exists()
        assert (survivor_folder / "work").exists()
        assert young.exists()
        survivor.communicate("\n")
    assert not survivor_folder.exists()
    assert (place / "agentr-x-file").exists()
