"""The prompts of a recipe's worlds: the contents of their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path

from agentr_core.data_files import data_path
from agentr_core.episodes.opening import Opening, example_text
from agentr_core.errors import ConfigError, DataFileError
from agentr_core.fingerprint import file_sha256
from agentr_core.recipes.environments import PromptConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.samples.json_lines import records
from agentr_core.samples.record_turns import conversation
from agentr_core.texts import placed, unreadable
from agentr_core.types import Message

FOLDER = "examples"
"""The folder of the shipped data with a file of examples for each world that has some."""


def opening_of(recipe: Recipe) -> Opening | None:
    """Return what the prompt of a recipe of one world puts before the first observation; None if
    the recipe sets no prompt.

    Raises:
        ConfigError: no examples are shipped for the world, or fewer than wanted.
        DataFileError: a file cannot be read, or is not a file of examples.
    """
    prompt = recipe.environment.prompt
    return None if prompt == PromptConfig() else _read(prompt, recipe.environment.name)


def example_ids(recipe: Recipe) -> frozenset[str]:
    """Return the ids in the file of examples that the prompt of a recipe of one world uses: those
    of the instances that they solve. Raises as `opening_of`.
    """
    prompt = recipe.environment.prompt
    if not prompt.examples:
        return frozenset()
    file = _examples_file(prompt, recipe.environment.name)
    told = islice(records(file, setting="environment.prompt.examples_file"), prompt.examples)
    return frozenset(str(record["id"]) for _, record in told if "id" in record)


def prompt_files(recipe: Recipe) -> dict[str, str]:
    """Return the SHA-256 of each file that the prompts of a recipe name, by world and kind, for the
    run's id. Raises as `opening_of`.
    """
    found: dict[str, str] = {}
    for name, world in recipe.worlds().items():
        prompt = world.environment.prompt
        if prompt.instruction_file:
            found[f"instruction of {name}"] = _sha256(Path(prompt.instruction_file))
        if prompt.examples:
            found[f"examples of {name}"] = _sha256(_examples_file(prompt, world.environment.name))
    return found


# Cached, since hundreds of environments of a world are opened at once.
@lru_cache(maxsize=64)
def _read(prompt: PromptConfig, environment: str) -> Opening:
    shown = _examples(prompt, environment) if prompt.examples else ()
    as_turns = prompt.examples_as == "turns"
    return Opening(
        system=prompt.system,
        instruction=_text(Path(prompt.instruction_file)) if prompt.instruction_file else None,
        examples=() if as_turns else tuple(map(example_text, shown)),
        turns=tuple(turn for turns in shown for turn in _as_turns(turns)) if as_turns else (),
    )


def _as_turns(turns: Sequence[Message]) -> Iterator[Message]:
    """Yield the turns of an example up to its last reply, as those of an episode before it."""
    last = max(number for number, turn in enumerate(turns) if turn.role == "assistant")
    return (Message(role=turn.role, text=turn.text, example=True) for turn in turns[: last + 1])


def _examples(prompt: PromptConfig, environment: str) -> tuple[Sequence[Message], ...]:
    """Return the turns of each example that a prompt shows."""
    file = _examples_file(prompt, environment)
    found: list[Sequence[Message]] = []
    for number, record in records(file, setting="environment.prompt.examples_file"):
        turns = [turn for turn in conversation(record, f"{file}:{number}") if turn.role not in ("system", "tools")]
        if [turn.role for turn in turns[:2]] != ["user", "assistant"]:
            raise DataFileError(f"{file}:{number} must begin with the turn of the problem and then a reply")
        if prompt.examples_as == "turns" and any(one.role == two.role for one, two in pairwise(turns)):
            raise DataFileError(
                f"{file}:{number} has two turns of one role in a row, and a conversation alternates; join them, or set "
                "environment.prompt.examples_as to text"
            )
        found.append(turns)
    if len(found) < prompt.examples:
        raise ConfigError(
            f"environment.prompt.examples is {prompt.examples}, and {file} has {len(found)}; lower it, or name another "
            "file in environment.prompt.examples_file"
        )
    return tuple(found[: prompt.examples])


def _examples_file(prompt: PromptConfig, environment: str) -> Path:
    if prompt.examples_file:
        return Path(prompt.examples_file)
    try:
        return data_path(FOLDER, f"{environment}.jsonl")
    except DataFileError as error:
        raise ConfigError(
            f"no examples come along for {environment}; make some with `agentr env examples {environment} FILE`, and "
            "name the file in environment.prompt.examples_file"
        ) from error


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"environment.prompt: file {placed(file)} cannot be read: {unreadable(error)}") from error


def _sha256(file: Path) -> str:
    try:
        return file_sha256(file)
    except OSError as error:
        raise DataFileError(f"environment.prompt: file {placed(file)} cannot be read: {error}") from error
