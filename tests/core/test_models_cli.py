"""`agentr models`: what is wrong is told in one sentence before anything is installed or
started.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentr_core.errors import ConfigError, ModelDirectoryError
from agentr_core.models.vllm import replicas
from flows.cli import cli


@pytest.fixture(autouse=True)
def _nothing_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def install(*_: object) -> list[list[str]]:
        raise AssertionError("an installation was begun")

    monkeypatch.setattr(replicas, "install_commands", install)
    monkeypatch.setenv("AGENTR_VLLM_ENV", str(tmp_path / "env"))


def serve(*words: str | Path) -> None:
    CliRunner().invoke(cli, ["models", "serve", *map(str, words)], catch_exceptions=False, standalone_mode=False)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match="nowhere does not exist; give a Hugging Face model directory"):
        serve("--model", tmp_path / "nowhere")


def test_a_port_in_use(tiny_model_dir: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} cannot be used .*--port"):
            serve("--model", tiny_model_dir, "--device", "cpu", "--port", str(port))


def test_a_context_longer_than_the_models(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="was made for 512; lower it"):
        serve("--model", tiny_model_dir, "--device", "cpu", "-o", "model.context_length=9000")


def test_an_unknown_setting(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"models serve: model\.vllm\.speed: unknown field"):
        serve("--model", tiny_model_dir, "-o", "model.vllm.speed=9")


def test_an_installation_is_begun_only_by_install(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="was begun"):
        CliRunner().invoke(cli, ["models", "install", "--device", "cpu"], catch_exceptions=False, standalone_mode=False)
    assert not (tmp_path / "env" / replicas.MARKER_FILE).read_text()
