"""Samples for a base model of TextCraft: reading drills, expert episodes and judged steps, most
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

from base_settings import BaseConfig

from agentr_core.environments.crafting.game import (
    INSTRUCTION,
    ChainLink,
    CraftingGame,
    CraftingProblem,
    Inventory,
    Plan,
    Progress,
    action_of,
    action_verdict,
    apply_last_link,
    chain,
    chain_text,
    craft_command,
    display_name,
    first_observation,
    goal_line,
    ingredients_text,
    lazy_reply,
    observation_of,
    shortest_plan,
    with_recipe,
)
from agentr_core.environments.crafting.recipes import RecipeBook, build_book
from agentr_core.environments.crafting.textcraft import MAX_DEPTH, TextCraft, free_names, rename
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.critique import judge_messages
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
MAX_STEPS = 40
_SLIP_SHARE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Careless:
    """How likely a careless expert errs, in [0, 1].

    `forget`: where it holds part of what a command takes, it overlooks the rest and crafts.
    `repeat`: it does what was just refused once more.
    """

    forget: float = 0.0
    repeat: float = 0.0


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
        return [f" {display_name(name)}" for name in sorted(self._env.book.items | self._env.book.tags)]

    def sample(self, index: int) -> Sample | None:
        """Return sample number `index`, or None where the drawn instance has no solution within
        `MAX_STEPS`.
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
    messages = opening(first_observation(replace(problem, goal=asked[0])))
    for item, following in itertools.zip_longest(asked, asked[1:]):
        messages.append(Message(role="assistant", text=f"Thought: {ingredients_text(listed[item])}.", train=True))
        if following is not None:
            messages.append(Message(role="user", text=goal_line(following)))
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
    prompt = judge_messages(first_observation(problem), log, step.action, step.observation)
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
    present = Progress(inventory={}, plan=shortest_plan(problem, {}))
    while present.plan is not None and len(steps) < length and not present.inventory.get(problem.goal):
        hops = chain(problem, present.inventory, present.plan)
        action = expected = action_of(hops[-1], present.plan.item_by_tag)
        if rng.random() < error_rate:
            wrong = misread(problem, present.plan, present.inventory, rng) if rng.random() < MISREAD_SHARE else None
            if wrong is not None:
                action = action_of(chain(problem, present.inventory, wrong)[-1], wrong.item_by_tag)
            else:
                action = corrupt(problem, present.plan, expected, [step.action for step in steps], rng)
        observation, made = game.act(action)
        after = Progress(inventory=game.inventory, plan=shortest_plan(problem, game.inventory))
        verdict = action_verdict(problem, present, after, action, expert_action=expected, output=made)
        reason = chain_text(hops) if made or action == "inventory" else REFUSED
        steps.append(JudgedStep(action=action, observation=observation, verdict=verdict, reason=reason))
        present = after
    return steps


def expert_sample(problem: CraftingProblem, instance: Instance) -> Sample | None:
    """Return an episode of the lazy expert, all its replies trained."""
    chosen = shortest_plan(problem, {})
    if chosen is None:
        return None
    messages = opening(first_observation(problem))
    inventory: dict[str, int] = {}
    for _ in range(MAX_STEPS):
        hops = chain(problem, inventory, chosen)
        apply_last_link(inventory, hops, chosen.item_by_tag)
        messages.append(Message(role="assistant", text=lazy_reply(hops, chosen.item_by_tag), train=True))
        if inventory.get(problem.goal):
            return Sample(kind=SampleKind.EXPERT, messages=tuple(messages), instance=instance)
        messages.append(Message(role="user", text=observation_of(hops[-1])))
    return None


def mistake_sample(
    problem: CraftingProblem, world: RecipeBook, instance: Instance, rng: random.Random
) -> Sample | None:
    """Return an episode of the lazy expert that misreads a command for 1 to 4 replies, which are
    not trained.
    """
    game = CraftingGame(world)
    chosen = shortest_plan(problem, {})
    if chosen is None:
        return None
    start = rng.randrange(chosen.num_steps)
    stop = start + rng.randint(1, 4)
    messages = opening(first_observation(problem))
    for number in range(MAX_STEPS):
        if number == start:
            chosen = misread(problem, chosen, game.inventory, rng)
        elif number == stop:
            chosen = shortest_plan(problem, game.inventory)
        if chosen is None:
            return None
        hops = chain(problem, game.inventory, chosen)
        right = not start <= number < stop
        messages.append(Message(role="assistant", text=lazy_reply(hops, chosen.item_by_tag), train=right))
        observation, made = game.act(action_of(hops[-1], chosen.item_by_tag))
        if made == problem.goal:
            return Sample(kind=SampleKind.EXPERT, messages=tuple(messages), instance=instance) if right else None
        messages.append(Message(role="user", text=observation))
    return None


def careless_sample(
    problem: CraftingProblem, world: RecipeBook, instance: Instance, careless: Careless, rng: random.Random
) -> Sample | None:
    """Return an episode of a careless expert, all its replies trained, those that are refused, too.

    It may end without reaching the goal. None where the goal is out of reach.
    """
    game = CraftingGame(world)
    chosen = shortest_plan(problem, {})
    if chosen is None:
        return None
    messages = opening(first_observation(problem))
    hops: tuple[ChainLink, ...] = ()
    refused = False
    for _ in range(MAX_STEPS):
        if not (refused and rng.random() < careless.repeat):
            hops = chain(problem, game.inventory, chosen)
            if not refused and (short := _overlooking(hops, game.inventory)) and rng.random() < careless.forget:
                hops = short
        messages.append(Message(role="assistant", text=lazy_reply(hops, chosen.item_by_tag), train=True))
        observation, made = game.act(action_of(hops[-1], chosen.item_by_tag))
        if made == problem.goal:
            break
        messages.append(Message(role="user", text=observation))
        refused = not made
    return Sample(kind=SampleKind.EXPERT, messages=tuple(messages), instance=instance)


def _overlooking(hops: tuple[ChainLink, ...], inventory: Inventory) -> tuple[ChainLink, ...]:
    """Return the chain up to the first command of which part is held, as if nothing of it were
    lacking; empty if there is no such command.
    """
    for number, hop in enumerate(hops):
        if hop.missing and any(i.name in inventory for i in hop.recipe.inputs):
            return (*hops[:number], replace(hop, missing=None))
    return ()


def opening(first_observation: str) -> list[Message]:
    """Return the turns before the first reply."""
    return [
        Message(role="user", text=INSTRUCTION),
        Message(role="assistant", text=TextCraft.acknowledgement),
        Message(role="user", text=first_observation),
    ]


def misread(problem: CraftingProblem, right: Plan, inventory: Inventory, rng: random.Random) -> Plan | None:
    """Return the plan of an agent that takes one ingredient of a command from another line; None if
    there is no such plan.

    The command is one that the next action depends on. Most often that line also lists the
    preceding ingredient of the command.
    """
    recipe = rng.choice(chain(problem, inventory, right)).recipe
    position = rng.randrange(len(recipe.inputs))
    others = [other for other in problem.commands if other.output != recipe.output]
    slips = [
        after
        for other in others
        for before, after in zip(other.inputs, other.inputs[1:], strict=False)
        if position and before == recipe.inputs[position - 1]
    ]
    choices = slips if slips and rng.random() < _SLIP_SHARE else [i for other in others for i in other.inputs]
    choices = [ingredient for ingredient in choices if ingredient not in recipe.inputs]
    if not choices:
        return None
    inputs = (*recipe.inputs[:position], rng.choice(choices), *recipe.inputs[position + 1 :])
    return with_recipe(problem, right, replace(recipe, inputs=inputs))


def corrupt(problem: CraftingProblem, present: Plan, expected: str, done: Sequence[str], rng: random.Random) -> str:
    """Return the action of a confused agent in place of the expected one, after the actions done so
    far.
    """
    kind = rng.randrange(6)
    recipe = rng.choice(problem.commands)
    item = rng.choice(recipe.inputs).name
    if kind == 0:
        return "inventory"
    if kind == 1 and done:
        return rng.choice(done)
    if kind == 2:
        return craft_command(recipe)
    if kind == 3:
        return f"get {rng.randint(1, 9)} {display_name(item)}"
    words = expected.split()
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    if kind == 4 and numbers:
        spot = rng.choice(numbers)
        words[spot] = str(max(1, int(words[spot]) + rng.choice((-2, -1, 1, 2))))
        return " ".join(words)
    wanted = rng.choice([*present.recipe_by_item] or [problem.goal])
    return (
        craft_command(present.recipe_by_item[wanted])
        if wanted in present.recipe_by_item
        else f"get 1 {display_name(problem.goal)}"
    )
