"""The curriculum of the tiny base model: reading drills, expert episodes and judged steps, most
with renamed items.

In some episodes the expert goes wrong for a while and then recovers; only its right replies are
trained. In others it is careless, and all its replies are trained.

Renaming forces the model to read the commands: no name keeps a recipe from one episode to the next.
Members of a kind of item (planks, wool) only swap names among themselves, since commands do not say
which item is of which kind. Sources are invented worlds and the training instances; no test
instance is ever touched.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agentr_core.base_model.expert_episodes import Careless, careless_sample, expert_sample, mistake_sample, opening
from agentr_core.base_model.mistakes import corrupt, misread
from agentr_core.environments.crafting import TextCraft, text
from agentr_core.environments.crafting.game import CraftingGame
from agentr_core.environments.crafting.oracle import Standing, judge
from agentr_core.environments.crafting.planner import CraftingProblem, chain, plan
from agentr_core.environments.crafting.recipes import RecipeBook, build_book
from agentr_core.environments.crafting.renaming import free_names, rename
from agentr_core.environments.crafting.shaped import MAX_DEPTH
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.critique.prompt import judge_messages
from agentr_core.recipes.training import BaseConfig
from agentr_core.types import Instance, Message, Sample, SampleKind, Verdict

FIRST_INDEX = 10**6
"""The first index of the invented worlds to learn from; those before it stay free for tests and for
search.
"""
MISREAD_SHARE = 0.5
"""The share of misread commands among the errors in judged episodes; the others are actions out of
place.
"""
REFUSED = "that came to nothing."
"""What a judge says about an action that was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedStep:
    """One played action with the oracle's verdict and the reason it would give."""

    action: str
    observation: str
    verdict: Verdict
    reason: str


class Curriculum:
    """An endless stream of samples for TextCraft, from `config.judge_share` to
    `config.drill_questions`; sample i depends on the seed and i alone.
    """

    def __init__(self, config: BaseConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._careless = Careless(forget=config.forget_share, repeat=config.repeat_share)
        self._env = TextCraft(expert="lazy")
        self._train = self._env.instances("train")
        self._names = free_names(self._env.book)

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples from the first one on."""
        index = 0
        while True:
            if (sample := self.sample(index)) is not None:
                yield sample
            index += 1

    def name_texts(self) -> list[str]:
        """Return every name that may occur, as it appears in a text."""
        return [f" {text.display(name)}" for name in sorted(self._env.book.items | self._env.book.tags)]

    def sample(self, index: int) -> Sample | None:
        """Return sample number `index`, or None where the drawn instance has no solution within
        `expert_episodes.MAX_STEPS`.
        """
        config = self._config
        rng = random.Random(derive_seed("base-curriculum", self._seed, index))
        instance = self._draw(rng)
        problem = self._env.problem(instance)
        if instance.split != "shaped":
            # The commands of a drill may make test goals: these are never asked for under their
            # real names.
            renamed = index < config.drills or instance.split == "procedural" or rng.random() < config.rename_share
            problem = rename(problem, self._names, rng) if renamed else shuffled(problem, rng)
        if index < config.drills:
            return drill_sample(problem, instance, rng, config.drill_questions)
        world = build_book(problem.commands, item_to_tag=problem.item_to_tag)
        if rng.random() < config.judge_share:
            if instance.split == "shaped" and config.judge_depths:
                instance = self._draw_shaped(rng, config.judge_depths, max_steps=0)
                problem = self._env.problem(instance)
                world = build_book(problem.commands, item_to_tag=problem.item_to_tag)
            return judge_sample(problem, world, instance, rng)
        if config.careless_share and rng.random() < config.careless_share:
            return careless_sample(problem, world, instance, self._careless, rng)
        if rng.random() < config.mistake_share:
            return mistake_sample(problem, world, instance, rng)
        return expert_sample(problem, instance)

    def _draw(self, rng: random.Random) -> Instance:
        config = self._config
        if config.shaped_share and rng.random() < config.shaped_share:
            any_length = bool(config.long_share) and rng.random() < config.long_share
            return self._draw_shaped(rng, config.depths, max_steps=0 if any_length else config.max_steps)
        if rng.random() < config.procedural_share:
            return Instance(environment="textcraft", split="procedural", index=rng.randrange(FIRST_INDEX, 10**9))
        return rng.choice(self._train)

    def _draw_shaped(self, rng: random.Random, depths: Sequence[float], *, max_steps: int) -> Instance:
        depth = rng.choices(range(1, len(depths) + 1), depths)[0]
        while True:
            index = rng.randrange(FIRST_INDEX, 10**9) // MAX_DEPTH * MAX_DEPTH + depth - 1
            instance = Instance(environment="textcraft", split="shaped", index=index)
            if not max_steps or len(self._env.expert(instance) or ()) in range(1, max_steps + 1):
                return instance


def shuffled(problem: CraftingProblem, rng: random.Random) -> CraftingProblem:
    """Return the problem with its commands listed in another order."""
    return replace(problem, commands=tuple(rng.sample(problem.commands, len(problem.commands))))


def drill_sample(problem: CraftingProblem, instance: Instance, rng: random.Random, questions: int) -> Sample:
    """Return questions about the listed commands, each answered by what the command takes: practice
    in reading alone.

    Every item that can be made is asked for twice, up to the given number of questions; for an item
    made by several commands the answer is that of the one listed first.
    """
    listed = {recipe.output: recipe for recipe in reversed(problem.commands)}
    asked = [item for _ in range(2) for item in rng.sample(sorted(listed), len(listed))][:questions]
    messages = opening(text.first_observation(replace(problem, goal=asked[0])))
    for item, following in itertools.zip_longest(asked, asked[1:]):
        messages.append(Message(role="assistant", text=f"Thought: {text.takes(listed[item])}.", train=True))
        if following is not None:
            messages.append(Message(role="user", text=text.goal_line(following)))
    return Sample(kind=SampleKind.EXPERT, messages=tuple(messages), instance=instance)


def judge_sample(problem: CraftingProblem, world: RecipeBook, instance: Instance, rng: random.Random) -> Sample | None:
    """Return one judged step of a faulty episode: the judge's reply is trained."""
    steps = judged_episode(problem, world, rng, length=rng.randint(1, 12))
    if not steps:
        return None
    # Each verdict that occurs is equally likely, so that good steps do not drown out the errors.
    by_verdict: dict[Verdict, list[int]] = {}
    for position, step in enumerate(steps):
        by_verdict.setdefault(step.verdict, []).append(position)
    position = rng.choice(by_verdict[rng.choice(sorted(by_verdict))])
    step = steps[position]
    log = [(before.action, before.observation) for before in steps[:position]]
    prompt = judge_messages(text.first_observation(problem), log, step.action, step.observation)
    reply = f"Reason: {step.reason}\nJudgement: {step.verdict.value.capitalize()}"
    return Sample(
        kind=SampleKind.JUDGE,
        messages=(*prompt, Message(role="assistant", text=reply, train=True)),
        instance=instance,
    )


def judged_episode(
    problem: CraftingProblem, world: RecipeBook, rng: random.Random, *, length: int, error_rate: float = 0.5
) -> list[JudgedStep]:
    """Return up to `length` steps of an expert that errs at the given rate, each judged by the
    oracle.
    """
    game = CraftingGame(world)
    steps: list[JudgedStep] = []
    present = Standing(inventory={}, plan=plan(problem, {}))
    while present.plan is not None and len(steps) < length and not present.inventory.get(problem.goal):
        hops = chain(problem, present.inventory, present.plan)
        action = expected = text.action_of(hops[-1], present.plan.items)
        if rng.random() < error_rate:
            wrong = misread(problem, present.plan, present.inventory, rng) if rng.random() < MISREAD_SHARE else None
            if wrong is not None:
                action = text.action_of(chain(problem, present.inventory, wrong)[-1], wrong.items)
            else:
                action = corrupt(problem, present.plan, expected, [step.action for step in steps], rng)
        observation, made = game.act(action)
        after = Standing(inventory=game.inventory, plan=plan(problem, game.inventory))
        verdict = judge(problem, present, after, action, expected=expected, made=made)
        reason = text.chain_text(hops) if made or action == "inventory" else REFUSED
        steps.append(JudgedStep(action=action, observation=observation, verdict=verdict, reason=reason))
        present = after
    return steps
