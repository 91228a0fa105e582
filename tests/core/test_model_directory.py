"""What is said about an unsound model directory."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agentr_core.errors import ModelDirectoryError
from agentr_core.fingerprint import file_sha256
from agentr_core.models import checkpoint_dir
from agentr_core.models.checkpoint_dir import behaviour_files_sha256, check_model_directory, weights_sha256

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def test_sound_directory(directory: Path) -> None:
    assert check_model_directory(directory) == (directory / WEIGHTS,)
    assert weights_sha256(directory) == hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest()
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= set(behaviour_files_sha256(directory))


def test_weights_are_read_once_as_long_as_they_stay_the_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[Path] = []

    def counted(file: Path) -> str:
        files.append(file)
        return file_sha256(file)

    monkeypatch.setattr(checkpoint_dir, "file_sha256", counted)
    weights_sha256(directory)
    weights_sha256(directory)
    assert len(files) == 2, "a file may be changed once more in the moment in which it was written"
    monkeypatch.setattr(checkpoint_dir, "_MIN_AGE_SECONDS", -1.0)
    before = weights_sha256(directory)
    assert weights_sha256(directory) == before
    assert len(files) == 3
    weights = bytearray((directory / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (directory / "other").write_bytes(weights)
    (directory / "other").replace(directory / WEIGHTS)
    assert weights_sha256(directory) == hashlib.sha256(weights).hexdigest() != before


def _truncate(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-100])


def _scramble(path: Path) -> None:
    (path / WEIGHTS).write_bytes(b"\xff" * 1000)


def _empty(path: Path) -> None:
    (path / WEIGHTS).write_bytes(b"")


def _pickle_weights(path: Path) -> None:
    (path / WEIGHTS).rename(path / "pytorch_model.bin")


def _adapter(path: Path) -> None:
    (path / "config.json").rename(path / "adapter_config.json")


def _typeless(path: Path) -> None:
    (path / "config.json").write_text("{}")


def _half_json(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": ')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (_adapter, "belongs to the model None, which is not a directory here"),
        (_typeless, "names no model_type"),
        (_half_json, "is not readable JSON"),
        (lambda path: (path / WEIGHTS).unlink(), "has no weights"),
        (_pickle_weights, "has pickled weights only"),
        (_truncate, "is truncated or corrupt"),
        (_scramble, "is truncated or corrupt"),
        (_empty, "is truncated or corrupt"),
        (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda path: (path / "chat_template.jinja").unlink(), "has no chat template"),
    ],
)
def test_damage_is_named_in_one_sentence(directory: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(directory)
    with pytest.raises(ModelDirectoryError, match=message) as caught:
        check_model_directory(directory)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


def _shard(path: Path) -> dict[str, str]:
    """Split the weights in two files with an index, as large models are saved."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path / WEIGHTS)
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + (i % 2):05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (path / WEIGHTS).unlink()
    return weight_map


def test_weights_in_several_files(directory: Path) -> None:
    weight_map = _shard(directory)
    files = check_model_directory(directory)
    assert [file.name for file in files] == sorted(set(weight_map.values()))
    before = weights_sha256(directory)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map | {"extra.weight": files[0].name}}))
    with pytest.raises(ModelDirectoryError, match=r"lacks the tensor 'extra\.weight'"):
        check_model_directory(directory)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"\x55")
    assert weights_sha256(directory) != before
    files[1].unlink()
    with pytest.raises(ModelDirectoryError, match="is missing though the index names it"):
        check_model_directory(directory)
