"""Datasets are pushed whole or not at all, to a stand-in of the hub's API."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from agentr_core.errors import ConfigError, EndpointError
from flows.cli import cli
from flows.commands.pushing import check_push, push

REPO = "somebody/rows"


class Hub(ThreadingHTTPServer):
    """A hub with the requests that make a dataset of small files: `files` has the contents of each
    dataset, `refused` the status for a path that ends so.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.tokens: set[str | None] = set()
        self.created: list[dict[str, Any]] = []
        self.refused: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        hub, path = self.server, self.path
        hub.tokens.add(self.headers.get("authorization"))
        status = next((status for end, status in hub.refused.items() if path.endswith(end)), 200)
        if status != 200:
            self._answer(status, {"error": "No, says the hub"})
        elif path == "/api/repos/create":
            request = json.loads(body)
            hub.created.append(request)
            name = f"{request['organization']}/{request['name']}"
            exists = name in hub.files
            hub.files.setdefault(name, {})
            self._answer(409 if exists else 200, {"url": f"{hub.url}/datasets/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/preupload/main", path):
            modes = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self._answer(200, {"files": [{**file, "shouldIgnore": False} for file in modes]})
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/commit/main", path):
            head, *lines = [json.loads(line) for line in body.splitlines()]
            hub.commits.append(head["value"]["summary"])
            hub.files[match[1]] |= {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self._answer(200, {"commitUrl": f"{hub.url}/datasets/{match[1]}/commit/1", "commitOid": "1"})
        else:
            self._answer(404, {"error": path})

    def do_GET(self) -> None:
        self._answer(404, {"error": self.path})

    def _answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield server
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out" / "data").mkdir(parents=True)
    (tmp_path / "out" / "README.md").write_text("---\npretty_name: rows\n---\n\n# rows\n")
    for number in range(40):
        (tmp_path / "out" / "data" / f"{number}.json").write_text(json.dumps({"number": number}))
    return tmp_path / "out"


@pytest.mark.slow
def test_a_folder_becomes_a_private_dataset_in_one_commit(hub: Hub, folder: Path) -> None:
    address = push(folder, REPO, message="rows of a run")
    assert address == f"{hub.url}/datasets/{REPO}"
    (request,) = hub.created
    assert (request["type"], request["visibility"]) == ("dataset", "private")
    assert hub.commits == ["rows of a run"]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert hub.files == {REPO: files}
    assert hub.tokens == {"Bearer hf_secret"}
    # The same dataset again takes another commit; a script with directories of this machine stays.
    (folder / "launch.sh").write_text("MODEL=/models/mine\n")
    (folder / "README.md").write_text("---\npretty_name: more\n---\n")
    push(folder, REPO, message="again")
    assert hub.commits == ["rows of a run", "again"]
    assert hub.files[REPO].keys() == files.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "part"),
    [
        ("/create", 401, "does not know the token"),
        ("/create", 403, "lets the token not write there"),
        ("/create", 500, "says 500"),
        ("/validate-yaml", 400, "does not take the head of README.md (Invalid metadata in README.md."),
        ("/commit/main", 403, "lets the token not write there (No, says the hub)"),
    ],
)
def test_a_refusal_leaves_nothing_there(hub: Hub, folder: Path, end: str, status: int, part: str) -> None:
    hub.refused[end] = status
    with pytest.raises(EndpointError) as caught:
        push(folder, REPO, message="rows")
    assert str(caught.value).startswith(f"the export is whole in {folder}, but it was not pushed: {hub.url} ")
    assert part in str(caught.value)
    assert "hf_secret" not in str(caught.value)
    assert (hub.commits, hub.files.get(REPO, {})) == ([], {})


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_named(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EndpointError, match=r"not pushed: http://127.0.0.1:9 cannot be reached \(ConnectError\)"):
        push(folder, REPO, message="rows")


@pytest.mark.parametrize("name", ["rows", "a/b/c", "a//b", "some body/rows", "/rows", "a/", "a/-b-"])
def test_a_name_that_no_dataset_has_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(ConfigError, match="write OWNER/NAME"):
        check_push(name)


def test_without_a_token_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    words = ["export", "abc", str(tmp_path / "out"), "--format", "parquet", "--push", REPO, "-w", str(tmp_path)]
    result = CliRunner().invoke(cli, words)
    assert "--push needs a token of the hub that may write: set HF_TOKEN" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_pushes_nothing(hub: Hub, tmp_path: Path) -> None:
    words = ["export", "abc", str(tmp_path / "out"), "--format", "parquet", "--push", REPO, "-w", str(tmp_path)]
    assert CliRunner().invoke(cli, words).exit_code != 0
    assert (hub.created, hub.tokens) == ([], set())
