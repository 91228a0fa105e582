"""What the tiny base model is taught: fair, solvable, true, and never a test instance."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from base_settings import BaseConfig
from crafting_samples import (
    REFUSED,
    Careless,
    Curriculum,
    careless_sample,
    drill_sample,
    expert_sample,
    judged_episode,
    mistake_sample,
    shuffled,
)

from agentr_core.environments.crafting.game import (
    CraftingGame,
    CraftingProblem,
    craft_command,
    display_name,
    ingredients_text,
    shortest_plan,
)
from agentr_core.environments.crafting.recipes import build_book
from agentr_core.environments.crafting.textcraft import TextCraft, rename
from agentr_core.types import Instance, Sample, SampleKind, Verdict

FAULTLESS = Careless()


def make(
    seed: int = 0,
    *,
    judge: float = 0.3,
    mistakes: float = 0.3,
    procedural: float = 0.4,
    renamed: float = 0.5,
    shaped: float = 0.0,
    depths: tuple[float, ...] = (1, 1, 1, 1),
    max_steps: int = 0,
    long: float = 0.0,
    judge_depths: tuple[float, ...] = (),
    drills: int = 0,
    questions: int = 100,
    careless_share: float = 0.0,
    careless: Careless = FAULTLESS,
) -> Curriculum:
    config = BaseConfig(
        judge_share=judge,
        careless_share=careless_share,
        forget_share=careless.forget,
        repeat_share=careless.repeat,
        mistake_share=mistakes,
        procedural_share=procedural,
        rename_share=renamed,
        shaped_share=shaped,
        depths=depths,
        max_steps=max_steps,
        long_share=long,
        judge_depths=judge_depths,
        drills=drills,
        drill_questions=questions,
    )
    return Curriculum(config, seed)


@pytest.fixture(scope="module")
def env() -> TextCraft:
    return TextCraft(expert="lazy")


@pytest.fixture(scope="module")
def names(env: TextCraft) -> list[str]:
    return sorted(item for item in env.book.items if item not in env.book.item_to_tag)


@pytest.fixture(scope="module")
def some(env: TextCraft) -> list[Instance]:
    """Training instances of every depth, and invented worlds."""
    train = env.instances("train")
    return [*train[::9], *env.instances("procedural")[:20]]


def goal_of(sample: Sample) -> str:
    """Return the goal in the first turn that states one."""
    text = next(m.text for m in sample.messages if "Goal: craft " in m.text)
    return text.split("Goal: craft ")[1].split(".")[0]


def test_a_sample_depends_on_seed_and_number_alone() -> None:
    forward = [make().sample(i) for i in range(30)]
    curriculum = make()
    backward = [curriculum.sample(i) for i in reversed(range(30))][::-1]
    assert forward == backward
    assert [make(1).sample(i) for i in range(30)] != forward


@pytest.mark.slow
def test_the_stream_leaves_nothing_out_but_the_unsolvable() -> None:
    curriculum = make()
    solvable = [sample for i in range(40) if (sample := curriculum.sample(i)) is not None]
    stream = iter(make())
    assert [next(stream) for _ in solvable] == solvable
    assert len(solvable) > 30


@pytest.mark.slow
def test_no_test_instance_is_ever_used(env: TextCraft) -> None:
    train = set(env.instances("train"))
    curriculum = make(renamed=0.5)
    for sample in filter(None, (curriculum.sample(i) for i in range(400))):
        assert sample.instance is not None
        if sample.instance.split == "procedural":
            assert sample.instance.index >= 10**6, "the first worlds stay free for searching and testing"
        else:
            assert sample.instance in train


@pytest.mark.slow
def test_no_goal_of_a_test_instance_is_taught_under_its_name(env: TextCraft) -> None:
    held_out = {display_name(env.problem(instance).goal) for instance in env.instances("test")}
    curriculum = make(procedural=0.0, renamed=0.0)
    goals = {goal_of(sample) for i in range(300) if (sample := curriculum.sample(i)) is not None}
    assert len(goals) > 100
    assert not goals & held_out


@pytest.mark.slow
def test_worlds_in_the_official_shape_alone_are_no_official_instances(env: TextCraft) -> None:
    curriculum = make(shaped=1.0, depths=(0.6, 0.4), drills=50, questions=6)
    samples = [sample for i in range(600) if (sample := curriculum.sample(i)) is not None]
    assert {sample.instance.split for sample in samples if sample.instance} == {"shaped"}
    depths = [env.depth(sample.instance) for sample in samples if sample.instance]
    assert set(depths) == {1, 2}
    assert depths.count(2) / len(depths) == pytest.approx(0.4, abs=0.07)
    assert all(sample.instance.index >= 10**6 - 4 for sample in samples if sample.instance)
    short = make(shaped=1.0, depths=(0.4, 0.4, 0.2), max_steps=5, judge=0.0, mistakes=0.0)
    replies = [sum(m.train for m in s.messages) for i in range(200) if (s := short.sample(i)) is not None]
    assert max(replies) == 5
    mixture = make(shaped=1.0, depths=(0.4, 0.4, 0.2), max_steps=5, long=0.3, judge=0.0, mistakes=0.0)
    replies = [sum(m.train for m in s.messages) for i in range(200) if (s := mixture.sample(i)) is not None]
    assert 0.02 < sum(number > 5 for number in replies) / len(replies) < 0.3
    drills = [curriculum.sample(i) for i in range(50)]
    assert max(sum(m.train for m in drill.messages) for drill in drills if drill) == 6


@pytest.mark.slow
def test_shares_are_kept() -> None:
    curriculum = make(judge=0.25, procedural=0.5)
    samples = [sample for i in range(600) if (sample := curriculum.sample(i)) is not None]
    num_judge = sum(sample.kind is SampleKind.JUDGE for sample in samples)
    num_procedural = sum(sample.instance is not None and sample.instance.split == "procedural" for sample in samples)
    assert num_judge / len(samples) == pytest.approx(0.25, abs=0.06)
    assert num_procedural / len(samples) == pytest.approx(0.5, abs=0.07)


@pytest.mark.slow
def test_only_replies_of_the_expert_or_the_judge_are_trained() -> None:
    curriculum = make(judge=0.5)
    for sample in filter(None, (curriculum.sample(i) for i in range(100))):
        replies = [m for m in sample.messages if m.train]
        assert all(m.role == "assistant" for m in replies)
        assert sample.messages[-1].train
        assert not sample.messages[1].train or sample.kind is SampleKind.JUDGE
        if sample.kind is SampleKind.JUDGE:
            assert len(replies) == 1


def test_a_renamed_problem_is_the_same_problem_under_other_names(
    env: TextCraft, names: list[str], some: list[Instance]
) -> None:
    for number, instance in enumerate(some):
        problem = env.problem(instance)
        variant = rename(problem, names, random.Random(number))
        assert (shortest_plan(variant, {}) is None) == (shortest_plan(problem, {}) is None)
        assert shapes(variant) == shapes(problem)
        items = {i.name for r in variant.commands for i in r.inputs if not i.is_tag} | {
            r.output for r in variant.commands
        }
        assert len(items) == len(
            {i.name for r in problem.commands for i in r.inputs if not i.is_tag} | {r.output for r in problem.commands}
        )


def shapes(problem: CraftingProblem) -> Counter[tuple[object, ...]]:
    """Return what renaming and shuffling leave alone: counts, and which inputs are of a kind."""
    return Counter(
        (r.count, r.output == problem.goal, tuple((i.count, i.is_tag and i.name) for i in r.inputs))
        for r in problem.commands
    )


@pytest.mark.slow
@pytest.mark.parametrize("renamed", [False, True])
def test_expert_replies_win_the_game_and_its_answers_are_real(
    env: TextCraft, names: list[str], some: list[Instance], renamed: bool
) -> None:
    num_episodes = 0
    for number, instance in enumerate(some):
        rng = random.Random(number)
        problem = rename(env.problem(instance), names, rng) if renamed else shuffled(env.problem(instance), rng)
        sample = expert_sample(problem, instance)
        if sample is None:
            continue
        num_episodes += 1
        game = CraftingGame(build_book(problem.commands, item_to_tag=problem.item_to_tag))
        turns = sample.messages[3:]
        item = ""
        for reply, answer in zip(turns[::2], [*turns[1::2], None], strict=True):
            assert item != problem.goal, "nothing is said after the goal is reached"
            observation, item = game.act(env.parse(reply.text))
            if answer is not None:
                assert observation == answer.text
        assert item == problem.goal
    assert num_episodes > 0.9 * len(some)


@pytest.mark.slow
def test_right_replies_are_trained_and_win_after_mistakes(env: TextCraft, some: list[Instance]) -> None:
    num_by_validity = {True: 0, False: 0}
    for number, instance in enumerate(some):
        problem = env.problem(instance)
        world = build_book(problem.commands, item_to_tag=problem.item_to_tag)
        sample = mistake_sample(problem, world, instance, random.Random(number))
        if sample is None:
            continue
        assert sample.messages[:3] == expert_sample(problem, instance).messages[:3]  # type: ignore[union-attr]
        turns = sample.messages[3:]
        replies, answers = turns[::2], turns[1::2]
        flags = [reply.train for reply in replies]
        assert flags[-1]
        assert 1 <= flags.count(False) <= 4
        start = flags.index(False)
        assert not any(flags[start : start + flags.count(False)]), "mistakes are in one stretch"
        game = CraftingGame(world)
        item = ""
        for reply, answer in zip(replies, [*answers, None], strict=True):
            observation, item = game.act(env.parse(reply.text))
            if answer is not None:
                assert observation == answer.text
        assert item == problem.goal
        commands = {ingredients_text(recipe) for recipe in problem.commands}
        for reply in replies:
            ingredients = reply.text.removeprefix("Thought: ").partition("\n")[0].split("; lacking ")[0]
            num_by_validity[ingredients in commands] += 1
            if reply.train:
                assert ingredients in commands
    assert min(num_by_validity.values()) > 10


def careless_episodes(env: TextCraft, some: list[Instance], careless: Careless) -> list[Sample]:
    samples = []
    for number, instance in enumerate(some):
        problem = env.problem(instance)
        world = build_book(problem.commands, item_to_tag=problem.item_to_tag)
        if sample := careless_sample(problem, world, instance, careless, random.Random(number)):
            samples.append(sample)
    assert len(samples) > 0.9 * len(some)
    return samples


def refusals(sample: Sample) -> list[str]:
    """The replies that the world refused."""
    turns = sample.messages[3:]
    return [r.text for r, a in zip(turns[::2], turns[1::2], strict=False) if a.text.startswith("Could not find")]


@pytest.mark.slow
def test_an_expert_that_neither_forgets_nor_repeats_is_the_faultless_one(env: TextCraft, some: list[Instance]) -> None:
    for sample in careless_episodes(env, some, FAULTLESS):
        right = expert_sample(env.problem(sample.instance), sample.instance)  # type: ignore[arg-type]
        assert right is None or sample.messages == right.messages


@pytest.mark.slow
def test_a_careless_expert_forgets_and_looks_again_and_all_of_it_is_trained(
    env: TextCraft, some: list[Instance]
) -> None:
    forgetful = 0
    for sample in careless_episodes(env, some, Careless(forget=1.0)):
        turns = sample.messages[3:]
        assert all(message.train for message in turns[::2])
        refused_replies = refusals(sample)
        forgetful += bool(refused_replies)
        assert all("; lacking nothing." in reply and "\nAction: craft" in reply for reply in refused_replies)
        for reply, answer, following in zip(turns[::2], turns[1::2], turns[2::2], strict=False):
            if answer.text.startswith("Could not find"):
                assert following.text != reply.text
        game = CraftingGame(build_book(env.problem(sample.instance).commands, item_to_tag=env.book.item_to_tag))  # type: ignore[arg-type]
        for reply, answer in zip(turns[::2], turns[1::2], strict=False):
            assert game.act(env.parse(reply.text))[0] == answer.text
    assert forgetful > 0.3 * len(some)


@pytest.mark.slow
def test_an_expert_that_always_repeats_never_leaves_its_first_refusal(env: TextCraft, some: list[Instance]) -> None:
    for sample in careless_episodes(env, some, Careless(forget=1.0, repeat=1.0)):
        refused_replies = refusals(sample)
        assert len(set(refused_replies)) <= 1
        assert not refused_replies or refused_replies[0] == sample.messages[-2].text, "to the last step"


@pytest.mark.slow
def test_the_curriculum_has_the_share_of_careless_episodes_that_it_is_asked_for() -> None:
    def episodes(share: float) -> list[Sample]:
        curriculum = make(judge=0, mistakes=0, shaped=1, careless_share=share, careless=Careless(forget=1.0))
        return [sample for index in range(60) if (sample := curriculum.sample(index))]

    num_refusals = [sum(bool(refusals(sample)) for sample in episodes(share)) for share in (0.0, 0.5, 1.0)]
    assert num_refusals[0] == 0
    assert 0 < num_refusals[1] < num_refusals[2]


@pytest.mark.slow
def test_every_step_of_a_faultless_expert_is_good(env: TextCraft, some: list[Instance]) -> None:
    for instance in some:
        problem = env.problem(instance)
        world = build_book(problem.commands, item_to_tag=problem.item_to_tag)
        steps = judged_episode(problem, world, random.Random(0), length=12, error_rate=0.0)
        assert {step.verdict for step in steps} <= {Verdict.GOOD}


@pytest.mark.slow
def test_the_oracle_calls_refusals_bad_and_looks_uncertain(env: TextCraft, some: list[Instance]) -> None:
    num_by_verdict: Counter[Verdict] = Counter()
    num_refusals = num_looks = 0
    for number, instance in enumerate(some):
        problem = env.problem(instance)
        world = build_book(problem.commands, item_to_tag=problem.item_to_tag)
        for step in judged_episode(problem, world, random.Random(number), length=12, error_rate=0.6):
            num_by_verdict[step.verdict] += 1
            if step.observation.startswith(("Could not", "Wrong item format")):
                num_refusals += 1
                assert step.verdict is Verdict.BAD, step
            if step.action == "inventory":
                num_looks += 1
                assert step.verdict is Verdict.UNCERTAIN, step
    assert min(num_by_verdict[v] for v in (Verdict.GOOD, Verdict.BAD, Verdict.UNCERTAIN)) > 20
    assert min(num_refusals, num_looks) > 20


@pytest.mark.slow
def test_a_judge_sample_ends_with_the_oracles_word() -> None:
    curriculum = make(judge=1.0)
    words = Counter(
        sample.messages[-1].text.rsplit("\nJudgement: ", 1)[1]
        for i in range(150)
        if (sample := curriculum.sample(i)) is not None
    )
    assert set(words) == {"Good", "Bad", "Uncertain"}


@pytest.mark.slow
def test_a_judge_reads_longer_worlds_than_the_expert_acts_in(env: TextCraft) -> None:
    curriculum = make(shaped=1.0, depths=(0.5, 0.5), max_steps=4, judge=0.5, judge_depths=(0.0, 0.0, 1.0))
    judge_goals: list[tuple[int | None, int]] = []
    expert_goals: list[tuple[int | None, int]] = []
    for sample in filter(None, map(curriculum.sample, range(120))):
        assert sample.instance is not None
        goal = (env.depth(sample.instance), len(env.expert(sample.instance) or ()))
        (judge_goals if sample.kind is SampleKind.JUDGE else expert_goals).append(goal)
    assert len(judge_goals) > 30
    assert len(expert_goals) > 30
    assert {depth for depth, _ in judge_goals} == {3}
    assert max(steps for _, steps in judge_goals) > 10
    assert {depth for depth, _ in expert_goals} == {1, 2}
    assert max(steps for _, steps in expert_goals) <= 4


@pytest.mark.slow
def test_a_judge_says_of_a_refused_action_that_it_came_to_nothing() -> None:
    curriculum = make(judge=1.0)
    num_refusals = 0
    for sample in filter(None, (curriculum.sample(i) for i in range(100))):
        observation = sample.messages[0].text.rpartition("\nObservation: ")[2]
        came_to_nothing = observation.startswith(("Could not", "Wrong item format"))
        num_refusals += came_to_nothing
        assert (REFUSED in sample.messages[-1].text) == came_to_nothing
    assert num_refusals > 10


def test_drills_come_first_and_change_nothing_after_them() -> None:
    plain, with_drills = make(), make(drills=20)
    assert [with_drills.sample(i) == plain.sample(i) for i in range(15, 30)] == [False] * 5 + [True] * 10
    for sample in map(with_drills.sample, range(20)):
        assert sample is not None
        assert all("Action:" not in message.text for message in sample.messages if message.train)


def test_a_drill_asks_twice_for_every_listed_item_and_answers_with_a_listed_command(
    env: TextCraft, some: list[Instance], names: list[str]
) -> None:
    for number, instance in enumerate(some):
        rng = random.Random(number)
        problem = rename(env.problem(instance), names, rng)
        sample = drill_sample(problem, instance, rng, 100)
        commands = [craft_command(recipe) for recipe in problem.commands]
        assert {line for line in sample.messages[2].text.splitlines() if line.startswith("craft ")} == set(commands)
        items = []
        for question, answer in zip(sample.messages[2::2], sample.messages[3::2], strict=True):
            item = question.text.rpartition("Goal: craft ")[2].removesuffix(".")
            items.append(item)
            assert answer.train
            ingredients = answer.text.removeprefix("Thought: ").removesuffix(".")
            command = next(r for r in problem.commands if display_name(r.output) == item)
            assert craft_command(command) == f"craft {command.count} {ingredients}"
        outputs = {display_name(recipe.output) for recipe in problem.commands}
        assert Counter(items) == Counter({item: 2 for item in outputs})
