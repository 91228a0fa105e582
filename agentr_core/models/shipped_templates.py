"""Which of the shipped chat templates fits a model directory."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from agentr_core.data_files import data_path
from agentr_core.errors import DataFault, ModelDirectoryError
from agentr_core.models.files import read_json
from agentr_core.samples.rendering import Renderer, load_tokenizer
from agentr_core.types import Message

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
    own = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    for shipped in SHIPPED:
        if shipped.model_types and kind not in shipped.model_types:
            continue
        if not own.issuperset(shipped.tokens) or own & {*shipped.without}:
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
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"; {shown} fits it: cp {shown} {path / 'chat_template.jinja'}"
