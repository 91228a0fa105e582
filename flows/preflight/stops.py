"""Find stop strings that could never end a reply."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from agentr_core.environment import Environment
from agentr_core.episodes.transcript import transcript_of
from agentr_core.models.checkpoint_dir import end_ids
from agentr_core.recipes.models import ModelConfig
from agentr_core.recipes.recipe import Recipe, sampling_sections
from agentr_core.samples.rendering import Renderer, load_tokenizer
from agentr_core.types import Sampling


def silent_stops(recipe: Recipe, env: Environment) -> list[str]:
    """Return a sentence for each stop string that contains a control token of its model, for a
    recipe of one world: stop strings are searched in text from which such tokens were removed.

    A stop string that consists of a token that ends replies anyway is no fault. Only models in
    directories are checked.
    """
    sentences = []
    stops = list(_stops(recipe, env))
    tokens = {path: _control_tokens(Path(path)) for path in {model.path for _, model, _ in stops}}
    for source, model, stop in stops:
        silent, ends = tokens[model.path]
        token = next((token for token in silent if token in stop), None)
        if token is not None and stop not in ends:
            sentences.append(
                f"{source}: the stop string {stop!r} has {token!r}, a control token of the model in {model.path}, and "
                "would never end a reply, since it is looked for in the text without such tokens; leave it out, or add "
                "the token's id to eos_token_id in the model's generation_config.json"
            )
    return list(dict.fromkeys(sentences))


def _stops(recipe: Recipe, env: Environment) -> Iterator[tuple[str, ModelConfig, str]]:
    """Yield the place that names a stop string, the model, and the string, for each model in a
    directory.
    """
    world_stops = transcript_of(env).sampling(Sampling()).stop
    players = [model for model in (recipe.model, recipe.models.teacher) if model is not None]
    sources = [(f"environment {env.name}", model, world_stops) for model in players]
    sources += [
        (f"{name}.stop", recipe.model_of(role), s.stop) for name, (role, s) in sampling_sections(recipe).items()
    ]
    for source, model, stops in sources:
        if model.backend != "openai" and Path(model.path).is_dir():
            yield from ((source, model, stop) for stop in stops)


def _control_tokens(path: Path) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the control tokens of a tokenizer, which the text of a reply does not contain, and
    those of them that end a reply.
    """
    tokenizer = load_tokenizer(path)
    special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = end_ids(path, tokenizer) | {Renderer(tokenizer, at=datetime.now(UTC)).end_of_turn}
    return tuple(filter(None, special.values())), frozenset(special[number] for number in ends & special.keys())
