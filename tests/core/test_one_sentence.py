"""What the machine refuses, or a stranger's code raises, is one sentence and no traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import EntryPoint
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentr_core.environments import registry
from agentr_core.errors import ConfigError, DiskError, EnvironmentFault, StoreError
from agentr_core.stages import dataset
from agentr_core.store import Store
from agentr_core.writing import write_text, writing
from flows import cli
from flows.commands import environments
from tasks import runs
from tasks.wiring import RunRef
from tasks.workspaces import open_store


def refused(error: pytest.ExceptionInfo[BaseException], *said: str) -> None:
    assert all(part in str(error.value) for part in said)
    assert "\n" not in str(error.value)


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_with_the_file_and_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "reports" / "index.html"
    write_text(page, "old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(DiskError) as caught:
            write_text(page, "new")
    refused(caught, f"{page} cannot be written", "No space left", "free some disk space")
    assert page.read_text() == "old"
    assert list(page.parent.iterdir()) == [page]


def test_a_device_a_pipe_or_a_link_is_written_into_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe, link, page = tmp_path / "pipe", tmp_path / "latest.csv", tmp_path / "page.csv"
    os.mkfifo(pipe)
    page.write_text("old")
    link.symlink_to(page)
    heard: list[str] = []
    reader = Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()

    for place in (pipe, link):
        write_text(place, "new")

    reader.join(60)
    assert (heard, pipe.is_fifo()) == (["new"], True)
    assert (link.is_symlink(), page.read_text()) == (True, "new")


def test_a_full_disk_while_a_dataset_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "datasets" / "d.parquet"

    def half(table: Any, draft: Path) -> None:
        draft.write_bytes(b"PAR1")
        full()

    monkeypatch.setattr(pq, "write_table", half)
    with pytest.raises(DiskError) as caught:
        dataset._write_file({"": []}, file, "feed")
    refused(caught, f"{file} cannot be written", "No space left")
    assert not list(file.parent.iterdir())


@pytest.mark.parametrize("name", ["none/out.jsonl", "file/out.jsonl", "x" * 300])
def test_a_place_that_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError) as caught, writing(tmp_path / name):
        (tmp_path / name).write_text("x")
    refused(caught, "cannot be written", "name another place")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "a\udcffb", "a?b"])
def test_a_workspace_that_no_folder_can_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(tmp_path / name, must_exist=True)
    refused(caught, "cannot be opened", "name another one")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_lock_that_cannot_be_made(tmp_path: Path, name: str) -> None:
    run = RunRef(workspace=str(tmp_path / name), run_id="r")
    with pytest.raises(StoreError) as caught, runs.locked(run):
        pass
    refused(caught, "name another workspace")


def test_a_workspace_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(StoreError) as caught:
        open_store(tmp_path)
    refused(caught, "Permission denied")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sqlite:x", "md:x", "it's", "a b*[c]", "häuser", "s3:", "-w"])
def test_an_odd_name_of_a_workspace_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(Path(name))
    store.write({"text": [{"text_id": "a", "text": "x"}]})
    store.checkpoint()
    assert store.query("select text from text")["text"].tolist() == ["x"]
    assert (tmp_path / name / store.path.name).is_file()
    assert isinstance(store, Store)


@pytest.mark.parametrize("raised", [ValueError("two\nlines"), SystemExit(3), NotImplementedError(), ImportError("no")])
@pytest.mark.parametrize("when", ["load", "make", "check"])
def test_a_strangers_world_may_raise_anything(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, when: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise raised

    class World:
        name = "world"
        instruction = property(fail)
        close = fail

        def __init__(self) -> None:
            if when == "make":
                fail()

    entry = EntryPoint(name="world", value="nowhere:World", group=registry.GROUP)
    monkeypatch.setattr(registry, "_KINDS", {})
    monkeypatch.setattr(registry, "entry_points", lambda **_: [entry])
    monkeypatch.setattr(EntryPoint, "load", fail if when == "load" else lambda self: World)
    (found,) = environments.diagnose("world", {})
    assert (found["ok"], found["status"]) == (False, "broken")
    assert type(raised).__name__ in found["detail"] or "protocol" in found["detail"]
    assert "\n" not in found["detail"]
    if when != "check":
        with pytest.raises(EnvironmentFault, match="environment world cannot be made") as caught:
            registry.make("world", {})
        refused(caught)


class _Handler(BaseHTTPRequestHandler):
    answer = (200, b"true")

    def do_GET(self) -> None:
        self.send_response(self.answer[0])
        self.end_headers()
        self.wfile.write(self.answer[1])

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        ((200, b"true"), True),
        ((401, b""), True),
        ((200, b"<html>hello"), False),
        ((404, b"{}"), False),
        ((500, b"true"), False),
    ],
)
def test_what_answers_must_be_a_prefect_server(answer: tuple[int, bytes], good: bool) -> None:
    from flows import server

    class Handler(_Handler):
        pass

    Handler.answer = answer
    with HTTPServer(("127.0.0.1", 0), Handler) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{other.server_port}/api"
        if good:
            server._check(address)
        else:
            with pytest.raises(ConfigError) as caught:
                server._check(address)
            refused(caught, f"what answers at {address} is not a Prefect server")
        other.shutdown()


@pytest.mark.parametrize("address", ["nonsense", "http://", "http://a b/api", "ftp://x/api"])
def test_an_address_that_is_none(address: str) -> None:
    from flows import server

    with pytest.raises(ConfigError) as caught:
        server._check(address)
    refused(caught, f"no Prefect server answers at {address}")


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[BaseException], str]:
    """Let the command line meet an error; return what it says."""

    def end(error: BaseException) -> str:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(sys, "argv", ["agentr", "runs"])
        monkeypatch.setattr(cli.cli, "main", fail)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 1
        return capsys.readouterr().err

    return end


class Closed(StringIO):
    """A standard output that takes nothing, for a reason of the system."""

    def __init__(self, reason: int) -> None:
        super().__init__()
        self._reason = reason

    def write(self, text: str) -> int:
        raise OSError(self._reason, os.strerror(self._reason))


@pytest.mark.parametrize(
    ("reason", "code", "said"),
    [(errno.ENOSPC, 1, "agentr: standard output: No space left on device; free space"), (errno.EPIPE, 141, "")],
)
def test_an_output_that_takes_nothing_is_named_and_a_closed_one_ends_a_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: int, code: int, said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["agentr", "sql", "--examples"])
    monkeypatch.setattr(sys, "stdout", Closed(reason))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    sys.stdout.flush()
    err = capsys.readouterr().err
    assert (ended.value.code, err[: len(said)], err.count("\n")) == (code, said, bool(said))


def test_the_command_line_says_what_the_system_refused(ending: Callable[[BaseException], str]) -> None:
    said = ending(OSError(errno.ENOSPC, "No space left on device", "/somewhere/file"))
    assert said.count("\n") == 1
    assert "No space left on device: '/somewhere/file'" in said
