"""Samples for a base model of the world `reasoning`: questions about invented universes, answered
by an agent with bad habits.

Each universe is drawn from a seed of its own. A question that ships, or whose solution looks up a
name of the shipped encyclopaedia, is left out. The episodes are played in the real world with its
search over the universe's articles. Nothing is run as Python: the only code is the expert's, and
what it prints is known (a test runs it and compares).

A habit (guessing, stopping early, asking twice, detours) turns the moves of a right solution into
those of an agent that has the habit. It only decides which calls are made; they are made for real
afterwards.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "reasoning"))

from base_settings import QuestionsConfig
from generators import Entity, articles, encyclopaedia_problems, number_problems, universe

from agentr_core.environments.reasoning.grammar import PYTHON, SEARCH
from agentr_core.environments.reasoning.problems import SHIPPED, Move, Problem, load
from agentr_core.environments.reasoning.toolbox import Tools
from agentr_core.environments.reasoning.world import ReasoningWorld, Rules, replies
from agentr_core.episodes.rollout import play_replies
from agentr_core.episodes.transcript import transcript_of
from agentr_core.fingerprint import derive_seed
from agentr_core.samples.record_files import records
from agentr_core.system import data_path
from agentr_core.tools.search.retriever import Document, Retriever
from agentr_core.tools.search.tool import LocalProvider, SearchTool
from agentr_core.types import Instance, Provenance, Sample, SampleKind, ToolCall

GUESS, EARLY, REPEAT, DETOUR, MALFORMED = "guess", "early", "repeat", "detour", "malformed"
MOST_REPEATS = 2
"""The most repeats of one call."""
_LOOK_UP = "I look up "
_FORM_WORDS = 4
_FRACTION = re.compile(r"\\frac\{(\d+)\}\{(\d+)\}")


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


@dataclass(frozen=True, slots=True)
class _Universe:
    """Entities, and the world in which questions about them, and about numbers, are asked."""

    entities: Mapping[str, Entity]
    world: ReasoningWorld
    problems: tuple[Problem, ...]


class Questions:
    """An endless stream of samples; sample i depends on the settings, the seed and i alone.

    Args:
        seed: another seed gives another stream, and other shares of habits for the forms of
            questions.
    """

    def __init__(self, config: QuestionsConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._universe = lru_cache(maxsize=2)(self._made)

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples from the first one on."""
        return filter(None, map(self.sample, count()))

    @property
    def instruction(self) -> str:
        """The instruction that begins every conversation."""
        return self._universe(0).world.instruction

    def sample(self, index: int) -> Sample | None:
        """Return sample number `index`: an episode, all its replies trained. None if the drawn
        question is left out because it overlaps with what ships.
        """
        number, place = divmod(index, self._config.questions)
        made = self._universe(number)
        problem = made.problems[place]
        if self._kept_for_others(problem):
            return None
        rng = random.Random(derive_seed("questions-curriculum", self._seed, index))
        plain = index < self._config.plain
        shares = Shares() if plain else shares_of(self._config, form_of(problem.question), self._seed)
        tried = attempt(problem, made.entities, shares, rng)
        written = replies(tried.moves, tried.answer)
        habits = tried.habits
        if not plain and rng.random() < self._config.malformed_share:
            written[-1] = malformed(written[-1], tried, rng)
            habits = (*habits, MALFORMED)
        instance = Instance(environment=made.world.name, split="made", index=place)
        _, outcomes = play_replies(made.world, instance, written)
        steps = [outcome.step for outcome in outcomes]
        return Sample(
            kind=SampleKind.EXPERT,
            messages=transcript_of(made.world).sample(made.world, problem.question, steps, [True] * len(steps)),
            instance=instance,
            provenance=Provenance(
                good_reward=steps[-1].reward, extra={"id": problem.id, "source": problem.source, "habits": habits}
            ),
        )

    def _made(self, number: int) -> _Universe:
        config, seed = self._config, derive_seed("questions-universe", self._seed, number)
        entities = universe(seed, people=config.people, towns=config.towns)
        subjects = [entity.name for entity in entities.values() if entity.kind != "river"]
        asked = encyclopaedia_problems(entities, subjects, hops=config.hops, seed=seed, prefix=f"made-{number}")
        counted = number_problems(seed, f"made-numbers-{number}")
        rng = random.Random(derive_seed(seed, "sources"))
        problems = tuple(
            next(counted if rng.random() < config.numbers_share else asked) for _ in range(config.questions)
        )
        documents = (Document(row["id"], row["title"], row["contents"]) for row in articles(entities))
        search = SearchTool(
            LocalProvider(Retriever.from_documents(documents), top_k=config.top_k), document_chars=config.document_chars
        )
        tools = Tools({SEARCH: search.call, PYTHON: _python(problems)}, blocking=False)
        # Habits may make more calls than an episode would allow.
        rules = Rules(python_calls=100, search_calls=100)
        return _Universe(entities, ReasoningWorld({"made": problems}, tools, rules), problems)

    def _kept_for_others(self, problem: Problem) -> bool:
        questions, names = self._shipped
        return problem.question in questions or not names.isdisjoint(move.query for move in problem.solution)

    @cached_property
    def _shipped(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the questions that ship, and the titles of the shipped encyclopaedia."""
        questions = frozenset(problem.question for split in load(SHIPPED).values() for problem in split)
        corpus = data_path("reasoning", "corpus.jsonl")
        return questions, frozenset(row["title"] for _, row in records(corpus, setting="corpus"))


def printed(problem: Problem) -> str:
    """Return what the expert's code for a number problem prints."""
    return _FRACTION.sub(r"\1/\2", problem.golds[0])


def malformed(reply: str, tried: Attempt, rng: random.Random) -> str:
    """Return a last reply that breaks the format: without a box, or with an unclosed thought."""
    if rng.random() < 0.5:
        return reply.replace(f"\\boxed{{{tried.answer}}}", tried.answer)
    return reply.replace("</think>", "")


def _python(problems: Sequence[Problem]) -> Callable[[str], ToolCall]:
    """Return a tool that knows what the code of some problems prints."""
    known = {move.query: printed(problem) for problem in problems for move in problem.solution if move.tool == PYTHON}
    return lambda code: ToolCall(tool=PYTHON, key=code, output=known[code])


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
