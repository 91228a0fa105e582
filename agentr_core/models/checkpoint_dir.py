"""Hugging Face model directories: their files, and checks before anything heavy is loaded."""

from __future__ import annotations

import hashlib
import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from agentr_core.errors import ConfigError, DataFault, ModelDirectoryError
from agentr_core.fingerprint import file_sha256, fingerprint
from agentr_core.samples.chat_template import DATE_FUNCTION
from agentr_core.samples.rendering import Renderer, load_tokenizer
from agentr_core.system import data_path
from agentr_core.texts import path_for_message
from agentr_core.types import Message

# The files of a Hugging Face model directory: which of them hold its weights, and their hashes.


_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CHECKPOINTS = "checkpoints"
"""The folder of a workspace with one folder for each checkpoint trained in it."""
SHARED_MEMORY = Path("/dev/shm")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_RECORD_FILES = ("manifest.json", "job.json")
_MIN_AGE_SECONDS = 2.0
"""A file younger than this may be written again without a change of its timestamps, whose
resolution is coarse.
"""


def checkpoint_folder(workspace: Path, checkpoint_id: str) -> Path:
    """Return the folder of a checkpoint that was trained in a workspace."""
    return workspace / CHECKPOINTS / checkpoint_id


def current_weights_folder(workspace: Path, checkpoint_id: str, stored_folder: str) -> str:
    """Return the folder of a checkpoint's weights: the one in the workspace if it exists, since a
    workspace may have been copied or moved; else `stored_folder`.
    """
    folder = checkpoint_folder(workspace, checkpoint_id)
    return str(folder) if folder.is_dir() else stored_folder


def checkpoint_entries(workspace: Path) -> dict[str, list[Path]]:
    """Return the folders that trainings left in a workspace, by the id of the checkpoint: that of
    the checkpoint, of its logs, and of unfinished work.
    """
    entries: dict[str, list[Path]] = {}
    for entry in sorted((workspace / CHECKPOINTS).glob("*")):
        entries.setdefault(entry.name.removeprefix(".").partition(".")[0], []).append(entry)
    return entries


def iteration_of(folder: Path) -> str:
    """Return the id of the iteration that trained the checkpoint in a folder, or is training it;
    empty if the folder does not say.
    """
    for name in _RECORD_FILES:
        if (folder / name).is_file():
            with suppress(OSError, ValueError, AttributeError):
                return str(json.loads((folder / name).read_bytes()).get("iteration", ""))
    return ""


def shared_weights_folders(workspace: Path, checkpoint_id: str) -> list[Path]:
    """Return the folder in shared memory through which a training passes weights to its samplers,
    in a list; an empty list if it does not exist. A process that was killed leaves it behind.
    """
    folder = SHARED_MEMORY / shared_folder_name(checkpoint_folder(workspace, checkpoint_id))
    return [folder] if folder.is_dir() else []


def shared_folder_name(output_dir: Path) -> str:
    """Return the name of the folder in shared memory for a training's weights. It depends only on
    the folder of the checkpoint, so that a rerun finds what a killed process left.
    """
    return f"agentr-weights-{fingerprint(str(output_dir.absolute()))}"


def adapter_base(path: Path) -> Path | None:
    """Return the model directory that the PEFT adapter in `path` belongs to; None if `path` holds a
    whole model.

    A relative path starts at the working directory, as in PEFT.

    Raises `ModelDirectoryError` if the adapter names a directory that does not exist.
    """
    if (path / "config.json").is_file() or not (path / ADAPTER_CONFIG).is_file():
        return None
    base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base or not Path(base).is_dir():
        raise ModelDirectoryError(
            f"the adapter in {path} belongs to the model {base!r}, which is not a directory here; put its path into "
            f"{path / ADAPTER_CONFIG} as base_model_name_or_path"
        )
    return Path(base)


def weights_sha256(path: Path) -> str:
    """Return the SHA-256 of a model's weights: that of its only weight file or, if there are
    several, of their names and hashes.

    For an adapter, it covers the adapter's weights and those of its model.

    Raises `ModelDirectoryError` if there are no sound weights.
    """
    files = weight_files(path)
    base = adapter_base(path)
    if base is not None:
        return hashlib.sha256(f"{weights_sha256(base)}:{_sha256(files[0])}".encode()).hexdigest()
    if len(files) == 1:
        return _sha256(files[0])
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}:{_sha256(file)}\n".encode())
    return digest.hexdigest()


def _sha256(file: Path) -> str:
    """Return the SHA-256 of a file, cached in this process: hashing gigabytes takes minutes, and
    every stage asks for it.
    """
    stat = file.stat()
    if time.time() - max(stat.st_mtime, stat.st_ctime) < _MIN_AGE_SECONDS:
        return file_sha256(file)
    return _cached_sha256(file.resolve(), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=1024)
def _cached_sha256(file: Path, *_: int) -> str:
    return file_sha256(file)


def no_model_error(path: Path) -> ModelDirectoryError:
    """Return the error to raise for a path that is no model directory. If the path is a GGUF file,
    contains one, or looks like the name of a model on the Hub, its message says how to make a
    directory of it.
    """
    if path.is_file() and _is_gguf(path):
        return ModelDirectoryError(
            f"{path} is a GGUF file; `agentr models import {path} FOLDER` makes a model directory of it"
        )
    if gguf_files := [file for file in sorted(path.glob("*.gguf")) if _is_gguf(file)]:
        source = path if len(gguf_files) == 1 else gguf_files[0]
        return ModelDirectoryError(
            f"{path} has no config.json, but the GGUF file {gguf_files[0].name}; `agentr models import {source} "
            "FOLDER` makes a model directory of it"
        )
    if path.is_dir():
        return ModelDirectoryError(f"{path} has no config.json; give a Hugging Face model directory")
    hint = ""
    if _HUB_NAME.fullmatch(str(path)) and not path.parent.exists():
        hint = f"; if it is the name of a model on the Hub, `hf download {path} --local-dir FOLDER` makes one"
    problem = "is a file" if path.is_file() else "does not exist"
    return ModelDirectoryError(
        f"model directory {path_for_message(path)} {problem}; give a Hugging Face model directory{hint}"
    )


def _is_gguf(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the weight files of a model or adapter directory, sorted by name; only their headers
    are read.

    Raises `ModelDirectoryError` when there are none, or one is missing, truncated or corrupt.
    """
    if adapter_base(path) is not None:
        if not (path / ADAPTER_WEIGHTS).is_file():
            raise ModelDirectoryError(f"{path} has no {ADAPTER_WEIGHTS}; copy or save the adapter again")
        _tensor_names(path / ADAPTER_WEIGHTS)
        return (path / ADAPTER_WEIGHTS,)
    if (path / _INDEX_FILE).is_file():
        weight_map = read_json(path / _INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelDirectoryError(f"{path / _INDEX_FILE} has no weight_map; save the model again")
        names = sorted(set(weight_map.values()))
        tensor_names = {name: _tensor_names(path / name) for name in names}
        for tensor, name in weight_map.items():
            if tensor not in tensor_names[name]:
                raise ModelDirectoryError(
                    f"{path / name} lacks the tensor {tensor!r} of the index; copy the file again"
                )
        return tuple(path / name for name in names)
    if not (path / _WEIGHTS_FILE).is_file():
        if any(path.glob("*.bin")):
            raise ModelDirectoryError(f"{path} has pickled weights only; convert them to safetensors")
        raise ModelDirectoryError(
            f"{path} has no weights ({_WEIGHTS_FILE} or {_INDEX_FILE}); copy or save the model again"
        )
    _tensor_names(path / _WEIGHTS_FILE)
    return (path / _WEIGHTS_FILE,)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `ModelDirectoryError` if the file cannot be read or
    holds something else.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"{file} is not readable JSON ({error}); copy it again") from error
    if not isinstance(data, dict):
        raise ModelDirectoryError(f"{file} must hold a JSON object, not a {type(data).__name__}; copy it again")
    return data


def _tensor_names(file: Path) -> frozenset[str]:
    if not file.is_file():
        raise ModelDirectoryError(f"weight file {file} is missing though the index names it; copy it again")
    try:
        # Opening checks the header and that the file is as long as the header says.
        with safe_open(file, framework="numpy") as tensors:
            names = frozenset(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ModelDirectoryError(f"weight file {file} is truncated or corrupt ({error}); copy it again") from error
    if not names:
        raise ModelDirectoryError(f"weight file {file} holds no tensors; save the model again")
    return names


# Which of the shipped chat templates fits a model directory.

TWO_TURNS = tuple(
    Message(role=role, text="Go on.", train=role == "assistant") for role in ("user", "assistant", "user", "assistant")
)
"""The shortest conversation with two replies: a template must not change the earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedTemplate:
    """A chat template of `data/chat_templates`, and how to recognise the models that it fits."""

    file: str
    model_types: tuple[str, ...] = ()
    """The values of `model_type` in the `config.json` of these models; empty: only the tokens
    count.
    """
    required_tokens: tuple[str, ...]
    """Control tokens that the tokenizer must have, each as one token."""
    excluded_tokens: tuple[str, ...] = ()
    """Tokens that the tokenizer must not have: those of other models."""

    def path(self) -> Path:
        """Return the path of the template file. Raises `DataFileError` when it is missing."""
        return data_path("chat_templates", self.file)


SHIPPED_TEMPLATES = (
    ShippedTemplate(
        file="qwen3.jinja",
        model_types=("qwen3", "qwen3_moe"),
        required_tokens=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    ),
    ShippedTemplate(
        file="qwen2.5.jinja",
        model_types=("qwen2", "qwen2_moe"),
        required_tokens=("<|im_start|>", "<|im_end|>", "<tool_call>"),
        excluded_tokens=("<think>",),
    ),
    ShippedTemplate(
        file="llama3.1.jinja",
        model_types=("llama",),
        required_tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    ShippedTemplate(
        file="mistral.jinja", model_types=("mistral", "mixtral"), required_tokens=("<s>", "</s>", "[INST]", "[/INST]")
    ),
    ShippedTemplate(
        file="llama2.jinja",
        model_types=("llama",),
        required_tokens=("<s>", "</s>", "<unk>"),
        excluded_tokens=("[INST]", "<|im_start|>", "<|user|>"),
    ),
    ShippedTemplate(file="gemma.jinja", required_tokens=("<bos>", "<start_of_turn>", "<end_of_turn>")),
    # Base models of many makers have these tokens, too.
    ShippedTemplate(file="chatml.jinja", required_tokens=("<|im_start|>", "<|im_end|>")),
)


def fitting_template(path: Path, *, at: datetime) -> ShippedTemplate | None:
    """Return the first shipped template that fits the model in a directory, or None.

    It fits if `model_type` is among its own (if it has any), if the tokenizer has its control
    tokens and none of other models, and if a conversation of two turns renders with it. `at` is the
    date for templates that print one.

    Raises `ModelDirectoryError` when the tokenizer or `config.json` cannot be read.
    """
    model_type = read_json(path / "config.json").get("model_type")
    tokenizer = load_tokenizer(path)
    added_tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    for template in SHIPPED_TEMPLATES:
        if template.model_types and model_type not in template.model_types:
            continue
        if not added_tokens.issuperset(template.required_tokens) or added_tokens & {*template.excluded_tokens}:
            continue
        tokenizer.chat_template = template.path().read_text(encoding="utf-8")
        try:
            Renderer(tokenizer, at=at).render_sample(TWO_TURNS)
        except (DataFault, ModelDirectoryError):
            continue
        return template
    return None


def template_hint(path: Path) -> str:
    """Return an addition to an error message that names the shipped template that fits a model
    directory; empty if none does.
    """
    try:
        template = fitting_template(path, at=datetime.now(UTC))
    except ModelDirectoryError:
        # What else is wrong with the directory is reported as it is.
        return ""
    if template is None:
        return ""
    file = template.path()
    display_path = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"; {display_path} fits it: cp {display_path} {path / 'chat_template.jinja'}"


_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER_FILES = (
    *_VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)


def check_model_directory(path: Path) -> tuple[Path, ...]:
    """Check that a model directory is complete; return its weight files, sorted by name.

    A PEFT directory is complete if the model that it names is, and if it has its own tokenizer.
    Only headers are read, so the check is cheap for large models.

    Raises:
        ModelDirectoryError: the directory, its configuration, weights, tokenizer or chat template
            is missing or damaged; one sentence says which.
    """
    if not path.is_dir():
        raise no_model_error(path)
    base = adapter_base(path)
    if base is not None:
        check_model_directory(base)
    elif not (path / "config.json").is_file():
        raise no_model_error(path)
    elif "model_type" not in read_json(path / "config.json"):
        raise ModelDirectoryError(f"{path / 'config.json'} names no model_type; save the model with save_pretrained")
    files = weight_files(path)
    if not any((path / name).is_file() for name in _VOCABULARY_FILES):
        raise ModelDirectoryError(f"{path} has no tokenizer; save it there with tokenizer.save_pretrained")
    if not has_chat_template(path):
        raise ModelDirectoryError(f"{path} has no chat template; add the model's chat_template.jinja")
    return files


def behaviour_files_sha256(path: Path) -> dict[str, str]:
    """Return the SHA-256, by name, of each small file that affects replies: tokenizer, chat
    templates, configuration.

    For an adapter, the files of its model are included, and a hash of its own settings without the
    path of its model.
    """
    hashes = {name: file_sha256(path / name) for name in sorted(_TOKENIZER_FILES) if (path / name).is_file()}
    hashes |= {f"{file.parent.name}/{file.name}": file_sha256(file) for file in _named_templates(path)}
    base = adapter_base(path)
    if base is None:
        return hashes
    settings = read_json(path / ADAPTER_CONFIG)
    del settings["base_model_name_or_path"]
    return behaviour_files_sha256(base) | hashes | {ADAPTER_CONFIG: fingerprint(settings)}


def prints_date(path: Path) -> bool:
    """Return whether a chat template of a directory uses the date."""
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    files = [*(path / name for name in names if (path / name).is_file()), *_named_templates(path)]
    return any(DATE_FUNCTION in file.read_text(encoding="utf-8", errors="replace") for file in files)


def _named_templates(path: Path) -> list[Path]:
    """Return the files of the chat templates that a tokenizer has beside its `default`, sorted."""
    return sorted((path / "additional_chat_templates").glob("*.jinja"))


def check_same_tokens(scorer: Path, policy: Path) -> None:
    """Raise `ConfigError` unless two model directories have the same vocabulary: a scorer reads the
    token ids that the policy sampled. Raises `ModelDirectoryError` if a tokenizer cannot be loaded.
    """
    if load_tokenizer(scorer).get_vocab() != load_tokenizer(policy).get_vocab():
        raise ConfigError(
            f"models.scorer: the tokenizer of {scorer} is not that of {policy}, and a scorer reads the ids of the "
            "tokens that the policy sampled; name a model of the same family, or leave it out"
        )


def end_ids(path: Path, tokenizer: Any) -> frozenset[int]:
    """Return the token ids that may end a reply: those of the tokenizer, `generation_config.json`
    and `config.json`; for an adapter, the files of its model.
    """
    values = [tokenizer.eos_token_id]
    folder = adapter_base(path) or path
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            values.append(read_json(folder / name).get("eos_token_id"))
    token_ids: set[int] = set()
    for value in values:
        token_ids.update(value if isinstance(value, list) else () if value is None else (value,))
    return frozenset(token_ids)


def context_length_of(path: Path, configured_length: int) -> int:
    """Return the most tokens that a prompt and its reply may have together: `configured_length`, or
    the limit in the model's configuration if `configured_length` is 0.

    For an adapter, the configuration of its model counts.

    Raises `ConfigError` when `configured_length` is 0 and the configuration has no limit, or when
    `configured_length` exceeds it.
    """
    limit = own_context_length(path)
    if not configured_length and not limit:
        file = (adapter_base(path) or path) / "config.json"
        raise ConfigError(f"{file} does not say how long a context may be; set model.context_length")
    if limit and configured_length > limit:
        raise ConfigError(
            f"model.context_length is {configured_length}, but the model of {path} was made for {limit}; lower it"
        )
    return configured_length or limit


def own_context_length(path: Path) -> int:
    """Return the most tokens that a model takes according to its configuration (for an adapter,
    that of its model); 0 if it has no limit.
    """
    config = read_json((adapter_base(path) or path) / "config.json")
    length = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return int(length or 0)


def has_chat_template(path: Path) -> bool:
    """Return whether a model directory has a chat template."""
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return True
    config = path / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))
