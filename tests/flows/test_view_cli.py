"""`agentr view`: a real server in a process of its own, while another one writes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import gallery
import httpx
import pytest
from click.testing import CliRunner
from wheel import started

from agentr_core.errors import StoreError
from flows.cli import cli


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_workspace_is_shown_while_others_write(host: str, tmp_path: Path, process_env: dict[str, str]) -> None:
    store = gallery.fill(tmp_path / "store.duckdb")
    token = "a-token-that-stays" if host == "0.0.0.0" else ""
    more = ("--token", token) if token else ()
    with started("view", "-w", tmp_path, "--host", host, "--port", "0", *more, env=process_env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(rf"{re.escape(str(tmp_path))} is shown at http://(\S+):(\d+)(\S*)\n", line)
        assert match, line
        # The address of all of this machine opens nowhere else.
        assert (match[1] == host) == (host == "127.0.0.1")
        url = f"http://127.0.0.1:{match[2]}"
        with httpx.Client(base_url=url, follow_redirects=True, timeout=60) as http:
            assert http.get("/").status_code == (200 if host == "127.0.0.1" else 401)
            assert match[3] == (f"/?token={token}" if token else "")
            assert "toy" in http.get(match[3] or "/").text
            store.write(gallery.begun("new", "A zeppelin."))
            # A search waits for new texts only so long; on a busy machine the next one finds them.
            for _ in range(20):
                results = http.get("/search?q=zeppelin").text
                if "<mark>zeppelin</mark>" in results:
                    break
            assert "<mark>zeppelin</mark>" in results
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert (tmp_path / "indexes" / "texts.sqlite").exists()


def test_a_damaged_store_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "store.duckdb").write_text("no store", encoding="utf-8")
    with pytest.raises(StoreError, match="no DuckDB file"):
        CliRunner().invoke(
            cli, ["view", "-w", str(tmp_path), "--bundle", str(tmp_path / "site")], catch_exceptions=False
        )
    assert not (tmp_path / "site").exists()


def test_pages_are_written_to_share(tmp_path: Path) -> None:
    gallery.fill(tmp_path / "store.duckdb")
    words = ["view", "-w", str(tmp_path), "--bundle", str(tmp_path / "site"), "--run", gallery.RUN[:8], "--pages", "4"]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert re.match(
        r"4 pages in \S+/site/index.html and beside it; .* came first, .* at least \d+ pages were left out",
        result.output,
    )
    assert "toy" in (tmp_path / "site" / "index.html").read_text("utf-8")
    args = [*words[:4], str(tmp_path / "alone"), "--pages", "1"]
    assert CliRunner().invoke(cli, args, catch_exceptions=False).output.startswith("1 page in ")
    assert CliRunner().invoke(cli, ["view", "-w", str(tmp_path), "--run", "x"]).exit_code == 2


def test_it_may_be_started_before_the_first_run(tmp_path: Path, process_env: dict[str, str]) -> None:
    workspace = tmp_path / "soon"
    with started("view", "-w", workspace, "--port", "0", env=process_env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(r"\S+/soon is shown at (http://\S+), and waits for its first run\n", line)
        assert match, line
        with httpx.Client(base_url=match[1], timeout=60) as http:
            assert "Waiting for the first run" in http.get("/").text
            gallery.fill(workspace / "store.duckdb")
            assert gallery.RUN in http.get("/").text
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_nothing_is_shown_of_what_cannot_be_a_workspace(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(StoreError, match="is a file; a workspace is a folder"):
        CliRunner().invoke(cli, ["view", "-w", str(tmp_path / "file")], catch_exceptions=False)
    with pytest.raises(StoreError, match="there is no store at"):
        CliRunner().invoke(
            cli, ["view", "-w", str(tmp_path), "--bundle", str(tmp_path / "site")], catch_exceptions=False
        )
