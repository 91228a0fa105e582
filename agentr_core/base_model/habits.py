"""Bad habits of an agent that answers with tools: guessing, stopping early, asking twice, detours.

A habit turns the moves of a right solution into those of an agent that has the habit. It only
decides which calls are made; they are made for real afterwards.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentr_core.environments.reasoning.grammar import SEARCH
from agentr_core.environments.reasoning.made.universe import Entity
from agentr_core.environments.reasoning.problems import Move, Problem
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes.questions_base import QuestionsConfig

GUESS, EARLY, REPEAT, DETOUR, MALFORMED = "guess", "early", "repeat", "detour", "malformed"
MOST_REPEATS = 2
"""The most repeats of one call."""
_LOOK_UP = "I look up "
_FORM_WORDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How likely each habit is, in [0, 1]; see `QuestionsConfig`."""

    guess: float = 0.0
    early: float = 0.0
    repeat: float = 0.0
    detour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The moves of an episode and its answer; `habits` names the habits that shaped it."""

    moves: tuple[Move, ...]
    answer: str
    habits: tuple[str, ...] = ()


def form_of(question: str) -> str:
    """Return the first words of a question, without numbers: what it asks for, not about whom."""
    return " ".join(re.findall(r"[A-Za-z]+", question)[:_FORM_WORDS])


def shares_of(config: QuestionsConfig, form: str, seed: int) -> Shares:
    """Return the shares of a form, drawn between 0 and twice their means."""

    def drawn(habit: str, mean: float) -> float:
        return min(1.0, 2 * mean * random.Random(derive_seed("habit", seed, habit, form)).random())

    return Shares(
        guess=drawn(GUESS, config.guess_share),
        early=drawn(EARLY, config.early_share),
        repeat=drawn(REPEAT, config.repeat_share),
        detour=drawn(DETOUR, config.detour_share),
    )


def attempt(problem: Problem, entities: Mapping[str, Entity], shares: Shares, rng: random.Random) -> Attempt:
    """Return the attempt of an agent with habits at a made problem; `entities` are its universe."""
    right = Attempt(moves=problem.solution, answer=problem.golds[0])
    if rng.random() < shares.guess:
        thought = Move(thought="I think that I know it.")
        return Attempt(moves=(thought,), answer=_guess(problem, entities, rng), habits=(GUESS,))
    if len(right.moves) > 2 and rng.random() < shares.early:
        right = _stopped(right, rng)
    return _longer(right, entities, shares, rng)


def _guess(problem: Problem, entities: Mapping[str, Entity], rng: random.Random) -> str:
    """Return a random answer of the right kind."""
    *_, last, _ = problem.solution
    if last.tool != SEARCH:
        return str(rng.randrange(10 ** rng.randint(1, 3)))
    facts = entities[last.query].facts
    relation = next(name for name, leads_to in facts.items() if leads_to == problem.golds[0])
    return rng.choice([entity.facts[relation] for entity in entities.values() if relation in entity.facts])


def _stopped(right: Attempt, rng: random.Random) -> Attempt:
    """Return an attempt that stops early and takes an intermediate result for the answer."""
    kept = rng.randrange(1, len(right.moves) - 1)
    onward = right.moves[kept]
    last = Move(thought=_known(onward))
    return Attempt(moves=(*right.moves[:kept], last), answer=onward.query, habits=(EARLY,))


def _longer(right: Attempt, entities: Mapping[str, Entity], shares: Shares, rng: random.Random) -> Attempt:
    """Return an attempt with needless calls: repeats and detours."""
    made: list[Move] = []
    habits = list(right.habits)
    for place, move in enumerate(right.moves):
        if place and rng.random() < shares.detour and (beside := _beside(right, place, entities, rng)):
            made.append(beside)
            habits.append(DETOUR)
        made.append(move)
        for _ in range(MOST_REPEATS if move.tool else 0):
            if rng.random() >= shares.repeat:
                break
            again = f"{_LOOK_UP}{move.query} again." if move.tool == SEARCH else "I calculate it again."
            made.append(replace(move, thought=again))
            habits.append(REPEAT)
    return Attempt(moves=tuple(made), answer=right.answer, habits=tuple(habits))


def _beside(right: Attempt, place: int, entities: Mapping[str, Entity], rng: random.Random) -> Move | None:
    """Return a look-up of another entity that the last article names; None if it names none."""
    before, move = right.moves[place - 1], right.moves[place]
    if before.tool != SEARCH:
        return None
    other = [name for name in entities[before.query].facts.values() if name in entities and name != move.query]
    if not other:
        return None
    query = rng.choice(other)
    return Move(thought=f"{_known(move)} {_LOOK_UP}{query}.", tool=SEARCH, query=query)


def _known(move: Move) -> str:
    """Return a thought without the announcement of the next look-up."""
    return move.thought.removesuffix(f"{_LOOK_UP}{move.query}.").strip()
