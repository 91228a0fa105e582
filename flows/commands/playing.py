"""Let a model play one instance of an environment, and show each step to a person."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentr_core.environment import Environment, error_of_own_code
from agentr_core.environments.native import actions_in
from agentr_core.episodes.grading import grade_episode
from agentr_core.episodes.rollout import EpisodeTimer, Reply, no_helper, roll_out_episode
from agentr_core.episodes.transcript import readable_calls, turn_texts
from agentr_core.episodes.units import phase_of
from agentr_core.errors import AgentrError, ConfigError, EnvironmentUnavailable, MissingPart
from agentr_core.models.samplers import sampler_of
from agentr_core.protocols import ChatModel
from agentr_core.recipes.models import ModelConfig
from agentr_core.texts import count_text, error_summary, escape_invisible, goal_in
from agentr_core.types import Instance, Sampling, Step, StopReason, Trajectory
from flows import interruption
from tasks.wiring import named_environment, named_model

_LABELS = re.compile(r"\A\W*thought\s*:|^[^\w\n]*(?:\w+[ \t]+){0,2}action\b\W*\Z", re.IGNORECASE | re.MULTILINE)
"""The label before a thought, and that of the action after it."""
_OPENING, _OBSERVATION, _REPLY = 16, 8, 24
"""The most lines that are shown of the first observation, of another one, and of a thought."""
_MARGIN = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """The model that plays, and how its replies are sampled.

    `name`, `server` and `context_length` are as `tasks.wiring.named_model` takes them. `max_steps`
    of 0 means the step limit of the environment.
    """

    name: str
    server: str = ""
    context_length: int = 0
    temperature: float = 0.0
    seed: int = 0
    max_steps: int = 0
    max_new_tokens: int = 500

    def description(self) -> str:
        """Return the model's name and how it is sampled, as text."""
        how = f"temperature {self.temperature:g}, seed {self.seed}" if self.temperature else "greedy"
        return f"{self.name}, {how}"


def instance_of(env: Environment, name: str, split: str, index: int | None) -> Instance:
    """Return the instance with an index in a split of an environment; without an index, the first
    one. Raises `ConfigError` if there is none. `name` is the environment's, for the message.
    """
    instances = env.instances(split)
    wanted_instance = Instance(environment=env.name, split=split, index=index) if index is not None else None
    candidates = instances[:1] if wanted_instance is None else [wanted_instance] if wanted_instance in instances else []
    if not candidates:
        first = ", ".join(str(instance.index) for instance in instances[:3])
        raise ConfigError(f"{name} has no instance {index} in split {split}; its first ones are {first}")
    return candidates[0]


@contextmanager
def environment_errors_translated(env: Environment, *, phases: Sequence[str] = ("",)) -> Iterator[None]:
    """Turn an exception that an environment's own code raises in one of `phases` into an
    `AgentrError` with a sentence about it, and `EnvironmentUnavailable` into `MissingPart`.
    """
    try:
        yield
    except EnvironmentUnavailable as error:
        raise MissingPart(unanswered(error, env.start_hint())) from error
    except AgentrError:
        raise
    except Exception as error:
        if phase_of(error) not in phases:
            raise
        sentence = f"environment {env.name} broke ({error_summary(error)}); correct the environment"
        raise error_of_own_code(env.name, error, sentence) from error


def unanswered(error: EnvironmentUnavailable, hint: str) -> str:
    """Return the message about a server that does not answer, followed by the hint on how to start
    one, if there is a hint.
    """
    return f"{error}; {hint}" if hint else str(error)


def play_and_show(
    name: str,
    options: Mapping[str, Any],
    split: str,
    index: int | None,
    player: Player,
    *,
    width: int,
    write: Callable[[str], Any],
) -> None:
    """Let a model play one instance; show each step with `write` as soon as it is done, in lines of
    at most `width` characters. Nothing is stored.

    Raises:
        ConfigError: there is no such environment, option, split, instance or model, or the world is
            played by outside agents, or asks models of other roles.
        AgentrError: the environment or the model has a fault.
    """
    env = named_environment(name, options)
    try:
        if env.has(Environment.relay):
            raise ConfigError(f"{name} is played by agents outside; `agentr env play` has no model for it")
        instance = instance_of(env, name, split, index)
        model, config = named_model(player.name, server=player.server, context_length=player.context_length)
        write(textwrap.fill(escape_invisible(f"{instance.key}, played by {player.description()}"), width))
        interruption.run(_play(env, instance, model, config, player, width, write))
    finally:
        env.close()


async def _play(
    env: Environment,
    instance: Instance,
    model: ChatModel,
    config: ModelConfig,
    player: Player,
    width: int,
    write: Callable[[str], Any],
) -> None:
    def show(first_observation: str, steps: Sequence[Step]) -> None:
        write("\n".join(_step_lines(steps, width) if steps else _opening_lines(first_observation, width)))

    sampler, timer, replies = sampler_of(model, config), EpisodeTimer(), list[Reply]()
    try:
        with environment_errors_translated(env, phases=("reset", "step")):
            trajectory = await roll_out_episode(
                instance,
                env,
                sampler.sample,
                max_steps=player.max_steps or env.step_limit,
                sampling=Sampling(temperature=player.temperature, max_new_tokens=player.max_new_tokens),
                seed=player.seed,
                timer=timer,
                on_reply=replies.append,
                on_step=show,
            )
        tokens = sum(reply.generation.completion_tokens for reply in replies)
        cost = f"{count_text(tokens, 'token')} in {timer.sampling_seconds:.1f} s"
        write("\n" + textwrap.fill(f"{await _end_sentence(env, trajectory)}; {cost}", width))
    finally:
        await sampler.close()
        await model.close()


async def _end_sentence(env: Environment, trajectory: Trajectory) -> str:
    """Return a sentence on how an episode ended, with the reward of the environment's grader unless
    a model would have to give it.
    """
    unknown = ""
    try:
        trajectory, _ = await grade_episode(env, trajectory, no_helper, seed=0)
    except ConfigError:
        unknown = " before its grade, for which a model of another role is asked"
    outcome = "success" if trajectory.success else "no success"
    if trajectory.stop not in (StopReason.SUCCESS, StopReason.FAILURE):
        outcome += f" ({trajectory.stop.replace('_', ' ')})"
    return f"{outcome} after {count_text(len(trajectory.steps), 'step')}: reward {trajectory.reward:g}{unknown}"


def _opening_lines(first_observation: str, width: int) -> Iterator[str]:
    yield ""
    yield from _field_lines("goal", goal_in(first_observation), width)
    yield from _field_lines("observation", first_observation, width, most=_OPENING)


def _step_lines(steps: Sequence[Step], width: int) -> Iterator[str]:
    step = steps[-1]
    yield ""
    yield f"step {len(steps)}"
    if thought := _thought(step):
        yield from _field_lines("thought", thought, width, most=_REPLY)
    refusal = " (refused)" if step.valid is False else ""
    cut = " (cut at its token limit)" if step.finish_reason == "length" else ""
    *before, last = actions_in(step.action)
    for action in (*before, f"{last or 'none'}{refusal}{cut}"):
        yield from _field_lines("action", action, width, most=_REPLY)
    for call in step.tool_calls:
        yield from _field_lines("tool", f"{call.tool} {call.key}: {call.status}", width, most=2)
    for result in turn_texts(step.observation):
        yield from _field_lines("observation", result, width, most=_OBSERVATION)
    yield from _field_lines("reward", f"{step.reward:g}", width)


def _thought(step: Step) -> str:
    """Return the text of a reply before its action, without labels, or next to its tool calls; the
    whole reply if the action does not occur in it literally.
    """
    if calls := readable_calls(step.reply):
        return calls[0].text_outside
    before, action, _ = step.reply.rpartition(step.action) if step.action else (step.reply, "", "")
    return _LABELS.sub("", before if action else step.reply).strip()


def _field_lines(name: str, text: str, width: int, *, most: int = 1) -> Iterator[str]:
    """Yield the lines of a text next to its name: at most `most` lines, and one that counts the
    rest.
    """
    lines = [
        part
        for line in escape_invisible(text.strip()).splitlines()
        for part in textwrap.wrap(line, max(20, width - _MARGIN), break_on_hyphens=False) or [""]
    ]
    head = f"  {name}"
    if len(lines) > most + 1:
        lines = [*lines[:most], f"... {len(lines) - most} more lines"]
    for line in lines or [""]:
        yield f"{head:<{_MARGIN}}{line}".rstrip()
        head = ""
