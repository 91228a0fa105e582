"""Hugging Face model directories, checked before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentr_core.errors import ConfigError, DataFault, ModelDirectoryError
from agentr_core.fingerprint import file_sha256, fingerprint
from agentr_core.models.files import ADAPTER_CONFIG, adapter_base, no_model, read_json, weight_files
from agentr_core.samples.chat_template import DATE
from agentr_core.samples.rendering import Renderer, load_tokenizer
from agentr_core.system import data_path
from agentr_core.types import Message

# Which of the shipped chat templates fits a model directory.

TWO_TURNS = tuple(
    Message(role=role, text="Go on.", train=role == "assistant") for role in ("user", "assistant", "user", "assistant")
)
"""The shortest conversation with an earlier turn, which a template must not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedTemplate:
    """A chat template of `data/chat_templates`, and the marks of the models that it fits."""

    file: str
    model_types: tuple[str, ...] = ()
    """The values of `model_type` in the `config.json` of these models; none: the tokens tell."""
    tokens: tuple[str, ...]
    """Control tokens that the tokenizer must have, each as one token."""
    without: tuple[str, ...] = ()
    """Tokens that the tokenizer must not have: those of other models."""

    def path(self) -> Path:
        """Return the path of the template file. Raises `DataFileError` when it is missing."""
        return data_path("chat_templates", self.file)


SHIPPED = (
    ShippedTemplate(
        file="qwen3.jinja",
        model_types=("qwen3", "qwen3_moe"),
        tokens=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    ),
    ShippedTemplate(
        file="qwen2.5.jinja",
        model_types=("qwen2", "qwen2_moe"),
        tokens=("<|im_start|>", "<|im_end|>", "<tool_call>"),
        without=("<think>",),
    ),
    ShippedTemplate(
        file="llama3.1.jinja",
        model_types=("llama",),
        tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    ShippedTemplate(
        file="mistral.jinja", model_types=("mistral", "mixtral"), tokens=("<s>", "</s>", "[INST]", "[/INST]")
    ),
    ShippedTemplate(
        file="llama2.jinja",
        model_types=("llama",),
        tokens=("<s>", "</s>", "<unk>"),
        without=("[INST]", "<|im_start|>", "<|user|>"),
    ),
    ShippedTemplate(file="gemma.jinja", tokens=("<bos>", "<start_of_turn>", "<end_of_turn>")),
    # Base models of many makers have these tokens, too.
    ShippedTemplate(file="chatml.jinja", tokens=("<|im_start|>", "<|im_end|>")),
)


def fitting_template(path: Path, *, at: datetime) -> ShippedTemplate | None:
    """Return the shipped template that fits the model in a directory, or None. It fits if the
    model's control tokens match and, where it is for some kinds only, its kind, and if two turns
    render with it.

    Raises `ModelDirectoryError` when the tokenizer or `config.json` cannot be read.
    """
    kind = read_json(path / "config.json").get("model_type")
    tokenizer = load_tokenizer(path)
    added_tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    for shipped in SHIPPED:
        if shipped.model_types and kind not in shipped.model_types:
            continue
        if not added_tokens.issuperset(shipped.tokens) or added_tokens & {*shipped.without}:
            continue
        tokenizer.chat_template = shipped.path().read_text(encoding="utf-8")
        try:
            Renderer(tokenizer, at=at).render_sample(TWO_TURNS)
        except (DataFault, ModelDirectoryError):
            continue
        return shipped
    return None


def way_out(path: Path) -> str:
    """Return the end of an error message: which shipped template fits the model in a directory, if
    any does.
    """
    try:
        shipped = fitting_template(path, at=datetime.now(UTC))
    except ModelDirectoryError:
        # What else is wrong with the directory is reported as it is.
        return ""
    if shipped is None:
        return ""
    file = shipped.path()
    display_path = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"; {display_path} fits it: cp {display_path} {path / 'chat_template.jinja'}"


_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER_FILES = (
    *_VOCABULARIES,
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
    """Return the weight files of a complete model directory, in the order of their names.

    A PEFT directory is complete if the model that it names is, and if it has its own tokenizer.
    Only headers are read, so the check is cheap for large models.

    Raises:
        ModelDirectoryError: the directory, its configuration, weights, tokenizer or chat template
            is missing or damaged; one sentence says which.
    """
    if not path.is_dir():
        raise no_model(path)
    base = adapter_base(path)
    if base is not None:
        check_model_directory(base)
    elif not (path / "config.json").is_file():
        raise no_model(path)
    elif "model_type" not in read_json(path / "config.json"):
        raise ModelDirectoryError(f"{path / 'config.json'} names no model_type; save the model with save_pretrained")
    files = weight_files(path)
    if not any((path / name).is_file() for name in _VOCABULARIES):
        raise ModelDirectoryError(f"{path} has no tokenizer; save it there with tokenizer.save_pretrained")
    if not has_chat_template(path):
        raise ModelDirectoryError(f"{path} has no chat template; add the model's chat_template.jinja")
    return files


def behaviour_files_sha256(path: Path) -> dict[str, str]:
    """Return the SHA-256, by name, of each small file that decides replies: tokenizer, template,
    configuration.

    For an adapter, the files of its model are included, and its own settings without the path of
    its model.
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
    """Return whether the chat template of a directory uses the date."""
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    files = [*(path / name for name in names if (path / name).is_file()), *_named_templates(path)]
    return any(DATE in file.read_text(encoding="utf-8", errors="replace") for file in files)


def _named_templates(path: Path) -> list[Path]:
    """Return the files of the chat templates that a tokenizer has beside its `default`, sorted."""
    return sorted((path / "additional_chat_templates").glob("*.jinja"))


def end_ids(path: Path, tokenizer: Any) -> frozenset[int]:
    """Return the token ids that may end a reply, according to the files of a model directory; for
    an adapter, to those of its model.
    """
    values = [tokenizer.eos_token_id]
    folder = adapter_base(path) or path
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            values.append(read_json(folder / name).get("eos_token_id"))
    ids: set[int] = set()
    for value in values:
        ids.update(value if isinstance(value, list) else () if value is None else (value,))
    return frozenset(ids)


def context_length_of(path: Path, requested: int) -> int:
    """Return the most tokens that a prompt and its reply may have together: `requested`, or the
    limit in the model's configuration if `requested` is 0.

    For an adapter, the configuration of its model counts.

    Raises `ConfigError` when `requested` is 0 and the configuration has no limit, or when
    `requested` exceeds it.
    """
    limit = own_context_length(path)
    if not requested and not limit:
        file = (adapter_base(path) or path) / "config.json"
        raise ConfigError(f"{file} does not say how long a context may be; set model.context_length")
    if limit and requested > limit:
        raise ConfigError(
            f"model.context_length is {requested}, but the model of {path} was made for {limit}; lower it"
        )
    return requested or limit


def own_context_length(path: Path) -> int:
    """Return the most tokens that a model takes by its configuration, or that of an adapter's
    model; 0 where that has no limit.
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
