"""The curriculum of a base model for the world `reasoning`: questions about invented universes,
answered by an agent with bad habits.

Each universe is drawn from a seed of its own. A question that ships, or whose solution looks up a
name of the shipped encyclopaedia, is left out. The episodes are played in the real world with its
search over the universe's articles. Nothing is run as Python: the only code is the expert's, and
what it prints is known (a test runs it and compares).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count

from agentr_core.base_model.habits import MALFORMED, Attempt, Shares, attempt, form_of, shares_of
from agentr_core.data_files import data_path
from agentr_core.environments.reasoning.grammar import PYTHON, SEARCH
from agentr_core.environments.reasoning.made import encyclopaedia, numbers
from agentr_core.environments.reasoning.made.universe import Entity, universe
from agentr_core.environments.reasoning.problems import Problem
from agentr_core.environments.reasoning.question_sets import SHIPPED, load
from agentr_core.environments.reasoning.toolbox import Tools
from agentr_core.environments.reasoning.world import ReasoningWorld, Rules, replies
from agentr_core.episodes.replay import play
from agentr_core.episodes.transcript import transcript
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes.questions_base import QuestionsConfig
from agentr_core.samples.json_lines import records
from agentr_core.tools.search.corpus import Document
from agentr_core.tools.search.providers import InProcess
from agentr_core.tools.search.retriever import Retriever
from agentr_core.tools.search.tool import SearchTool
from agentr_core.types import Instance, Provenance, Sample, SampleKind, ToolCall

_FRACTION = re.compile(r"\\frac\{(\d+)\}\{(\d+)\}")


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
        _, outcomes = play(made.world, instance, written)
        steps = [outcome.step for outcome in outcomes]
        return Sample(
            kind=SampleKind.EXPERT,
            messages=transcript(made.world, problem.question, steps, train=[True] * len(steps)),
            instance=instance,
            provenance=Provenance(
                good_reward=steps[-1].reward, extra={"id": problem.id, "source": problem.source, "habits": habits}
            ),
        )

    def _made(self, number: int) -> _Universe:
        config, seed = self._config, derive_seed("questions-universe", self._seed, number)
        entities = universe(seed, people=config.people, towns=config.towns)
        subjects = [entity.name for entity in entities.values() if entity.kind != "river"]
        asked = encyclopaedia.problems(entities, subjects, hops=config.hops, seed=seed, prefix=f"made-{number}")
        counted = numbers.problems(seed, f"made-numbers-{number}")
        rng = random.Random(derive_seed(seed, "sources"))
        problems = tuple(
            next(counted if rng.random() < config.numbers_share else asked) for _ in range(config.questions)
        )
        documents = (Document(row["id"], row["title"], row["contents"]) for row in encyclopaedia.articles(entities))
        search = SearchTool(
            InProcess(Retriever.of(documents), top_k=config.top_k), document_chars=config.document_chars
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
