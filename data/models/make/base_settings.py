"""The settings of a base model: a YAML file with the fields of `BaseConfig`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from agentr_core.errors import ConfigError
from agentr_core.recipes.fields import Count, Natural, Positive, Unit, record
from agentr_core.recipes.parsing import read_yaml, value_fault
from agentr_core.runtime.machine import bfloat16_hardware
from agentr_core.texts import faults_message, unreadable_reason

_CRAFTING = (
    "judge_share",
    "careless_share",
    "forget_share",
    "repeat_share",
    "mistake_share",
    "shaped_share",
    "depths",
    "max_steps",
    "long_share",
    "judge_depths",
    "procedural_share",
    "rename_share",
    "drills",
    "drill_questions",
)
"""The fields that only the samples of TextCraft have."""


@record
class QuestionsConfig:
    """Generated questions, and the habits shown by their answers.

    Shares of habits are means over the forms of questions ("What is the profession", "How many
    prime numbers"): each form has its own share, drawn between 0 and twice the mean.
    """

    numbers_share: Unit = 0.4
    """Share of the questions that are number problems; the others are about an encyclopaedia."""
    hops: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 1, 2, 1, 2, 3)
    """The numbers of hops of the questions about an encyclopaedia, in turn."""
    people: Annotated[int, Field(ge=20)] = 60
    """People in an encyclopaedia. Each encyclopaedia has its own invented universe."""
    towns: Annotated[int, Field(ge=12)] = 12
    questions: Count = 64
    """Questions asked about one universe."""
    top_k: Count = 1
    """Documents that a search returns."""
    document_chars: Count = 1200
    guess_share: Unit = 0.0
    """Share of the questions that are answered without any call, usually wrongly."""
    early_share: Unit = 0.0
    """Share of the questions of several hops whose search ends before the last hop: the answer is
    what was found so far.
    """
    repeat_share: Unit = 0.0
    """Chance that a call is repeated, and then repeated once more."""
    detour_share: Unit = 0.0
    """Chance that, after a look-up, something is looked up that the question does not require."""
    malformed_share: Unit = 0.0
    """Share of the episodes whose last reply breaks the format; the same for all forms."""
    plain: Natural = 0
    """This many samples at the beginning have no habits, so that the model first learns to read."""
    tokenizer_samples: Count = 800
    """Samples whose text the tokenizer is trained on."""
    vocabulary: Annotated[int, Field(ge=300)] = 1500
    """Tokens of the tokenizer, besides the instruction."""


@record
class BaseConfig:
    """How a tiny base model is made: its shape, its training, and the samples that it learns
    from.
    """

    hidden_size: Count = 256
    num_hidden_layers: Count = 4
    head_dim: Count = 64
    num_key_value_heads: Natural = 0
    """Heads of keys and values, which the query heads share evenly; 0: one for each query head."""
    intermediate_size: Count = 704
    sliding_window: Count = 4
    """Tokens that every other layer sees, from the first layer on, the present token included."""
    max_position_embeddings: Count = 2048
    tokens: Count = 20_000_000
    """Tokens of all batches, padding included."""
    batch_tokens: Count = 4096
    learning_rate: Positive = 0.02
    """Learning rate of Muon, which trains the matrices of the layers."""
    embedding_learning_rate: Positive = 3e-3
    """Learning rate of AdamW, which trains embeddings and norms."""
    warmup_steps: Natural = 100
    judge_share: Unit = 0.2
    """Share of the samples that are judge examples."""
    mistake_share: Unit = 0.0
    """Share of the expert episodes in which the expert misreads a command for some replies, which
    are not trained.
    """
    # A model that saw right moves alone is certain of its mistakes, too: it makes them in eight
    # episodes of eight, and neither a search nor a group has anything to learn from.
    careless_share: Unit = 0.0
    """Share of the expert episodes in which the expert is careless; `mistake_share` then counts
    among the others. All replies of a careless expert are trained, so that the model does now
    right, now wrong.
    """
    forget_share: Unit = 0.8
    """Where a careless expert holds a part of what a command takes: the chance that it overlooks
    the rest.
    """
    repeat_share: Unit = 0.7
    """The chance that a careless expert repeats an action that was just refused."""
    shaped_share: Unit = 0.0
    """Share of the samples that come from invented worlds in the shape of the official goals."""
    depths: tuple[Annotated[float, Field(ge=0)], ...] = (0.25, 0.25, 0.25, 0.25)
    """Weights of depths 1 to 4 among the goals of those worlds; fewer numbers leave the deepest
    out.
    """
    max_steps: Natural = 0
    """Only those worlds are used whose goal the expert reaches in at most this many steps; 0 means
    any.
    """
    long_share: Unit = 0.0
    """Share of those worlds that `max_steps` does not limit: a base that has seen a few long goals
    wins some of them sometimes, and what is won sometimes can be learned.
    """
    judge_depths: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """As `depths`, for the worlds of judge examples, whose goals then take any number of steps: an
    agent attempts longer goals than it can reach, and must judge these attempts, too. Empty: as the
    other examples."""
    procedural_share: Unit = 0.5
    """Share of the other samples that come from procedural worlds; the rest comes from the training
    instances.
    """
    rename_share: Unit = 0.65
    """Share of the samples of training instances whose items are renamed; those of procedural
    worlds always are.
    """
    drills: Natural = 0
    """Samples at the beginning that only ask for listed commands, one by one."""
    drill_questions: Count = 100
    """The most commands that one such sample asks for."""
    bf16: bool | Literal["auto"] = True
    """Mixed precision; `auto`: where the GPU or processor computes bfloat16 fast."""
    num_threads: Natural = 0
    questions: QuestionsConfig | None = None
    """Settings of a base for the world `reasoning`; those of TextCraft's curriculum, from
    `judge_share` to `drill_questions`, then have no effect. None: a base for TextCraft.
    """


SETTINGS = TypeAdapter(BaseConfig)


def load(file: Path) -> BaseConfig:
    """Return the settings in a file, with `bf16: auto` settled for this machine.

    Raises `ConfigError`, which lists every fault, if the file cannot be read or a field is unknown,
    ill-typed or out of range.
    """
    try:
        data = read_yaml(file.read_text(encoding="utf-8"))
        config = SETTINGS.validate_python(data)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings {file} cannot be read: {unreadable_reason(error)}") from error
    except ValidationError as error:
        faults = [": ".join(filter(None, (".".join(map(str, e["loc"])), value_fault([e])))) for e in error.errors()]
        raise ConfigError(faults_message(faults, str(file))) from None
    if faults := faults_of(config):
        raise ConfigError(faults_message(faults, str(file)))
    return replace(config, bf16=bool(bfloat16_hardware())) if config.bf16 == "auto" else config


def faults_of(config: BaseConfig) -> list[str]:
    """Return which settings do not go together, one sentence each."""
    faults, plain = [], BaseConfig()
    heads = config.hidden_size // config.head_dim
    if config.hidden_size % config.head_dim:
        faults.append(f"hidden_size: {config.hidden_size} is no multiple of head_dim, {config.head_dim}; change one")
    elif config.num_key_value_heads and heads % config.num_key_value_heads:
        faults.append(
            f"num_key_value_heads: {heads} query heads cannot share {config.num_key_value_heads} evenly; "
            f"take a divisor of {heads}"
        )
    if config.questions is not None:
        faults += [
            f"{name}: only samples of TextCraft have it, and questions asks for others; leave it out"
            for name in _CRAFTING
            if getattr(config, name) != getattr(plain, name)
        ]
    return faults
