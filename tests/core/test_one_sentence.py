"""What the machine refuses, or a stranger's code raises, is one sentence and no traceback."""

from __future__ import annotations

import errno
import gzip
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import EntryPoint
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow.parquet as pq
import pytest
from prefect.settings import PREFECT_HOME, temporary_settings
from toy import Line
from wheel import PATIENCE, launched

from agentr_core.environments import registry
from agentr_core.environments.agentgym.wire import read_ids
from agentr_core.environments.reasoning.problems import _file_rows
from agentr_core.errors import ConfigError, DiskError, EnvironmentFault, StoreError, UserError
from agentr_core.methods.faults import load, parse
from agentr_core.models.checkpoint_dir import read_json
from agentr_core.runtime.start import opening_of
from agentr_core.samples.record_files import records
from agentr_core.stages import dataset
from agentr_core.store.database import Store
from agentr_core.system import python_path, report_write_errors, write_text
from agentr_core.tools.search.retriever import _load_starts, scan_corpus
from flows import cli
from flows.commands import environments
from tasks import runs
from tasks.wiring import RunRef
from tasks.workspaces import open_store


def check_error(error: pytest.ExceptionInfo[BaseException], *said: str) -> None:
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
        with pytest.raises(DiskError) as error:
            write_text(page, "new")
    check_error(error, f"{page} cannot be written", "No space left", "free some disk space")
    assert page.read_text() == "old"
    assert list(page.parent.iterdir()) == [page]


def test_a_device_a_pipe_or_a_link_is_written_into_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe, link, page = tmp_path / "pipe", tmp_path / "latest.csv", tmp_path / "page.csv"
    os.mkfifo(pipe)
    page.write_text("old")
    link.symlink_to(page)
    texts: list[str] = []
    reader = Thread(target=lambda: texts.append(pipe.read_text()), daemon=True)
    reader.start()

    for path in (pipe, link):
        write_text(path, "new")

    reader.join(60)
    assert (texts, pipe.is_fifo()) == (["new"], True)
    assert (link.is_symlink(), page.read_text()) == (True, "new")


def test_a_full_disk_while_a_dataset_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "datasets" / "d.parquet"

    def half(table: Any, draft: Path) -> None:
        draft.write_bytes(b"PAR1")
        full()

    monkeypatch.setattr(pq, "write_table", half)
    with pytest.raises(DiskError) as error:
        dataset._write_file({"": []}, file, "hash")
    check_error(error, f"{file} cannot be written", "No space left")
    assert not list(file.parent.iterdir())


@pytest.mark.parametrize("name", ["none/out.jsonl", "file/out.jsonl", "x" * 300])
def test_a_place_that_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError) as error, report_write_errors(tmp_path / name):
        (tmp_path / name).write_text("x")
    check_error(error, "cannot be written", "name another place")


PACKED = gzip.compress(b'{"id": 0}', mtime=0)
RECIPE: dict[str, Any] = {"name": "x", "model": {"path": "m"}}
READERS: dict[str, Callable[[Path], Any]] = {
    "recipe": load,
    "json lines": lambda path: list(records(path, setting="FILE")),
    "corpus": lambda path: list(scan_corpus(path)),
    "model": lambda path: read_json(path),
    "ids": lambda path: read_ids(str(path), "option train"),
    "instruction": lambda path: opening_of(parse(RECIPE, [f"environment.prompt.instruction_file={path}"])),
    "parquet": lambda path: list(_file_rows(path.rename(path.with_suffix(".parquet")))),
    "starts": _load_starts,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "content",
    [PACKED, b"PAR1 and no more", b"\xff\xfe{\x00}\x00", b"\0\1", b"[" * 100_000, None],
    ids=["packed", "cut", "utf-16", "binary", "nested", "folder"],
)
def test_a_file_of_another_kind_is_one_sentence_of_the_user(tmp_path: Path, reader: str, content: bytes | None) -> None:
    path = tmp_path / "file"
    path.mkdir() if content is None else path.write_bytes(content)
    if (reader == "instruction" and content and content.isascii()) or (reader == "parquet" and content is None):
        pytest.skip("any text is an instruction, and a folder may hold the parts of a Parquet file")
    with pytest.raises(UserError) as error:
        READERS[reader](path)
    check_error(error, "file")
    assert "<" not in str(error.value)


@pytest.mark.parametrize("reader", ["recipe", "json lines", "instruction"])
def test_a_compressed_file_is_told_to_be_one(tmp_path: Path, reader: str) -> None:
    (tmp_path / "file").write_bytes(PACKED)
    with pytest.raises(UserError, match="it is compressed; unpack it with gunzip"):
        READERS[reader](tmp_path / "file")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "a\udcffb", "a?b"])
def test_a_workspace_that_no_folder_can_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError) as error:
        open_store(tmp_path / name, must_exist=True)
    check_error(error, "cannot be opened", "name another one")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_lock_that_cannot_be_made(tmp_path: Path, name: str) -> None:
    run = RunRef(workspace=str(tmp_path / name), run_id="r")
    with pytest.raises(StoreError) as error, runs.run_locked(run):
        pass
    check_error(error, "name another workspace")


def test_a_workspace_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(StoreError) as error:
        open_store(tmp_path)
    check_error(error, "Permission denied")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sqlite:x", "md:x", "it's", "a b*[c]", "häuser", "s3:", "-w"])
def test_an_odd_name_of_a_workspace_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(Path(name))
    store.write({"rl_validation": [{"trajectory_id": "a", "step": 1, "iteration_id": "x"}]})
    store.checkpoint()
    assert store.query("select iteration_id from rl_validation")["iteration_id"].tolist() == ["x"]
    assert (tmp_path / name / store.path.name).is_file()
    assert isinstance(store, Store)


@pytest.mark.parametrize("raised", [ValueError("two\nlines"), SystemExit(3), NotImplementedError(), ImportError("no")])
@pytest.mark.parametrize("when", ["load", "make", "check"])
def test_a_strangers_world_may_raise_anything(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, when: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise raised

    class World(Line):
        name = "world"
        instruction = property(fail)
        close = fail

        def __init__(self) -> None:
            if when == "make":
                fail()

    entry = EntryPoint(name="world", value="nowhere:World", group=registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_FACTORY_BY_NAME", {})
    monkeypatch.setattr(registry, "entry_points", lambda **_: [entry])
    monkeypatch.setattr(EntryPoint, "load", fail if when == "load" else lambda self: World)
    (report,) = environments.diagnose("world", {})
    assert (report["ok"], report["status"]) == (False, "broken")
    assert type(raised).__name__ in report["detail"] or "does not derive" in report["detail"]
    assert "\n" not in report["detail"]
    if when != "check":
        with pytest.raises(EnvironmentFault, match="environment world cannot be made") as error:
            registry.make("world", {})
        check_error(error)


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
    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{http.server_port}/api"
        if good:
            server._check_answer(address)
        else:
            with pytest.raises(ConfigError) as error:
                server._check_answer(address)
            check_error(error, f"what answers at {address} is not a Prefect server")
        http.shutdown()


@pytest.mark.parametrize("address", ["nonsense", "http://", "http://a b/api", "ftp://x/api"])
def test_an_address_that_is_none(address: str) -> None:
    from flows import server

    with pytest.raises(ConfigError) as error:
        server._check_answer(address)
    check_error(error, f"no Prefect server answers at {address}")


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[BaseException], str]:
    """Let the command line meet an error; return what it says."""

    def end(error: BaseException) -> str:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(sys, "argv", ["agentr", "runs"])
        monkeypatch.setattr(cli.cli, "main", fail)
        with pytest.raises(SystemExit) as info:
            cli.main()
        assert info.value.code == 2
        return capsys.readouterr().err

    return end


class BrokenOutput(StringIO):
    """A standard output that takes nothing, for a reason of the system."""

    def __init__(self, reason: int) -> None:
        super().__init__()
        self._reason = reason

    def write(self, text: str) -> int:
        raise OSError(self._reason, os.strerror(self._reason))


@pytest.mark.parametrize(
    ("reason", "code", "said"),
    [(errno.ENOSPC, 2, "agentr: standard output: No space left on device; free space"), (errno.EPIPE, 141, "")],
)
def test_an_output_that_takes_nothing_is_named_and_a_closed_one_ends_a_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: int, code: int, said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["agentr", "sql", "--examples"])
    monkeypatch.setattr(sys, "stdout", BrokenOutput(reason))
    with pytest.raises(SystemExit) as info:
        cli.main()
    sys.stdout.flush()
    err = capsys.readouterr().err
    assert (info.value.code, err[: len(said)], err.count("\n")) == (code, said, bool(said))


def test_the_command_line_says_what_the_system_refused(ending: Callable[[BaseException], str]) -> None:
    message = ending(OSError(errno.ENOSPC, "No space left on device", "/somewhere/file"))
    assert message.count("\n") == 1
    assert "No space left on device: '/somewhere/file'" in message


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "agentr: memory ran out (MemoryError); free some, or raise the limit (`ulimit -v`)"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "agentr: memory ran out (libtorch"),
        (RuntimeError("can't start new thread"), "agentr: memory ran out (can't start new thread)"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "agentr: memory ran out ([Errno 12]"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/t']"),
            "agentr: temporary files find",
        ),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "agentr: too many files are open"),
    ],
)
def test_what_the_machine_refuses_is_a_sentence_and_not_our_fault(
    ending: Callable[[BaseException], str], error: BaseException, said: str
) -> None:
    assert ending(error).startswith(said)
    assert ending(error).count("\n") == 1


def test_our_own_fault_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(sys, "argv", ["agentr", "runs"])
    monkeypatch.setattr(cli.cli, "main", fail)
    with pytest.raises(RuntimeError, match="ours"):
        cli.main()


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Put a small file system on a folder, and fill it."""
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.strip()}")
    try:
        with suppress(OSError), (folder / "filling").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_prefects_folder_on_a_full_disk_is_told_at_once(tmp_path: Path) -> None:
    from flows import server

    home = tmp_path / "home"
    with full_disk(home), temporary_settings({PREFECT_HOME: home}):
        with pytest.raises(ConfigError) as error:
            server._check_home()
        check_error(
            error, f"keeps its data in {home}, where nothing more can be written", "No space left", "PREFECT_HOME"
        )


def agentr(*words: str, limit: int | None = None, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *words],
        env={**os.environ, "PYTHONPATH": python_path(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["error", "error::DeprecationWarning", "e"])
def test_warnings_as_errors_are_refused_before_a_library_is_imported(setting: str) -> None:
    process = agentr("runs", PYTHONWARNINGS=setting)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"agentr: PYTHONWARNINGS or -W {setting} makes errors of warnings")


@pytest.mark.slow
def test_other_settings_of_warnings_are_the_users() -> None:
    process = agentr("--version", PYTHONWARNINGS="default,ignore::DeprecationWarning")
    assert (process.communicate(timeout=60), process.returncode)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("mebibytes", "said"), [(300, "the limit on memory"), (700, "memory ran out")])
def test_too_little_memory_is_told(tmp_path: Path, mebibytes: int, said: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: x\nmodel: {path: m}\n")
    process = agentr("plan", str(recipe), limit=mebibytes * 2**20)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"agentr: {said}")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 0.4, 1.6])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_the_first_seconds_is_one_sentence(tmp_path: Path, seconds: float, number: int) -> None:
    command = [sys.executable, "-m", "flows.cli", "run", "deployments/recipes/textcraft-tiny.yaml"]
    variables = {**os.environ, "PYTHONPATH": python_path()}
    with launched([*command, "-w", str(tmp_path / "w")], env=variables) as process:
        while not heeds(process.pid, signal.SIGTERM):
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(seconds)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (130, "interrupted; the same command goes on where it stopped\n")


def heeds(process: int, number: int) -> bool:
    """Return whether a process has a handler for a signal. Before, it is Python that starts."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)
