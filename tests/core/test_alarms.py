"""What is watched while a run works: each alarm is raised once where it should be, and none by what
three seeds of `make run` measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentr_core.episodes.units import UnitError, run_all
from agentr_core.errors import AlarmRaised, EnvironmentFault
from agentr_core.methods.agent_r.report import oracle_agreement
from agentr_core.methods.faults import parse
from agentr_core.recipes.alarms import RULES, AlarmsConfig, Measures, Rule
from agentr_core.runtime.alarms import check_stage, watch_step
from agentr_core.runtime.context import RunContext, Stage
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.search.tree import leaf_paths
from agentr_core.stages.report import alarm_section
from agentr_core.store.codec.ledger import (
    checkpoint_rows,
    evaluation_rows,
    iteration_rows,
    load_alarms,
    metric_rows,
    rl_step_rows,
    training_step_rows,
    validation_rows,
)
from agentr_core.store.codec.trajectories import (
    critique_rows,
    finished_tree_rows,
    oracle_rows,
    pair_rows,
    trajectory_rows,
    tree_rows,
)
from agentr_core.store.database import Writer
from agentr_core.store.tables import Alarm, Draw, Rows, TreeHead, merge
from agentr_core.types import (
    Critique,
    FinishReason,
    Generation,
    Instance,
    Node,
    PathPair,
    Step,
    StepVerdict,
    StopReason,
    Trajectory,
    Tree,
    Verdict,
)
from tasks.wiring import RunRef, quiet_context

COLUMNS = ("entropy", "clip_share", "sampler_kl", "contrast", "gradient_norm", "cut_replies")
MAKE_RUN = {
    0: [
        (0.0750, 0.0045, 0.0010, 0.427, 0.0598, 0.0030),
        (0.0595, 0.0070, 0.0032, 0.427, 0.0528, 0.0062),
        (0.0481, 0.0037, 0.0013, 0.469, 0.0426, 0.0073),
        (0.0499, 0.0032, 0.0010, 0.427, 0.0384, 0.0068),
        (0.0474, 0.0018, 0.0015, 0.469, 0.0689, 0.0022),
        (0.0448, 0.0008, 0.0015, 0.406, 0.0390, 0.0023),
        (0.0460, 0.0008, 0.0001, 0.396, 0.0440, 0.0007),
        (0.0446, 0.0002, 0.0001, 0.375, 0.0422, 0.0019),
    ],
    1: [
        (0.0797, 0.0035, 0.0011, 0.375, 0.0528, 0.0044),
        (0.0945, 0.0095, 0.0052, 0.479, 0.0617, 0.0021),
        (0.0673, 0.0051, 0.0016, 0.469, 0.0588, 0.0010),
        (0.0720, 0.0030, 0.0008, 0.438, 0.0477, 0.0021),
        (0.0655, 0.0042, 0.0008, 0.427, 0.0533, 0.0025),
        (0.0630, 0.0015, 0.0003, 0.448, 0.0444, 0.0017),
        (0.0526, 0.0009, 0.0002, 0.344, 0.0479, 0.0040),
        (0.0587, 0.0006, 0.0001, 0.427, 0.0449, 0.0039),
    ],
    2: [
        (0.0586, 0.0022, 0.0007, 0.406, 0.0541, 0.0039),
        (0.0555, 0.0078, 0.0032, 0.458, 0.0487, 0.0017),
        (0.0479, 0.0048, 0.0023, 0.375, 0.0612, 0.0038),
        (0.0476, 0.0029, 0.0010, 0.427, 0.0466, 0.0107),
        (0.0477, 0.0031, 0.0010, 0.302, 0.0412, 0.0091),
        (0.0506, 0.0011, 0.0003, 0.271, 0.0599, 0.0093),
        (0.0432, 0.0010, 0.0003, 0.281, 0.0560, 0.0059),
        (0.0451, 0.0003, 0.0001, 0.219, 0.0492, 0.0005),
    ],
}
"""The steps of group RL in runs of textcraft-agent-r-rl-tiny, seeds 0 to 2."""


@pytest.mark.parametrize("seed", MAKE_RUN)
def test_no_seed_of_make_run_raises_any(seed: int) -> None:
    history = [dict(zip(COLUMNS, step, strict=True)) for step in MAKE_RUN[seed]]
    for number in range(1, len(history) + 1):
        assert AlarmsConfig().find_crossings(history[:number]) == []


HISTORIES: dict[str, tuple[list[float | None], list[float | None]]] = {
    # Values that are usual, and how they go on where something is wrong.
    "entropy": ([1.0, 0.8, None, 0.7], [0.15, 0.15]),
    "clip_share": ([0.01, 0.1], [0.12]),
    "sampler_kl": ([0.001, 0.05], [0.06]),
    "contrast": ([0.5, 0.0, 0.31, 0.0, 0.0], [0.0]),
    "gradient_norm": ([90.0, 1.0, 1.2, 0.9, 1.0, 9.0], [12.0]),
    "cut_replies": ([0.1, 0.3], [0.4]),
    "empty_replies": ([0.0, 0.05], [0.06]),
    "chosen_drop": ([0.0, -3.0, 70.0, 9.0, 20.0, 45.0], [30.0]),
    "unreadable_replies": ([0.2], [0.21]),
    "judge_agreement": ([0.3], [0.29]),
    "judge_drift": ([-0.3, 0.0], [0.01]),
    "held_out_drop": ([-0.1, 0.0], [0.02]),
    "error_budget": ([0.49], [0.5]),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_tells_what_is_wrong_from_what_is_usual(rule: Rule) -> None:
    name = rule.name
    silent: dict[str, Any] = {name: None}
    usual, wrong = HISTORIES[name]
    history: list[Measures] = []
    for value in (*usual, *wrong):
        assert AlarmsConfig().find_crossings(history) == []
        history.append({name: value})
    (crossing,) = AlarmsConfig().find_crossings(history)
    assert (crossing.name, crossing.threshold) == (name, getattr(AlarmsConfig(), name))
    assert crossing.message.count(";") >= 1, "what has happened, and what to do"
    assert AlarmsConfig(**silent).find_crossings(history) == [], "null silences it"
    assert AlarmsConfig().find_crossings([*history, {name: None}]) == [], "it is not known now"


def test_every_threshold_has_one_rule() -> None:
    fields = set(vars(AlarmsConfig())) - {"reaction"}
    assert {rule.name for rule in RULES} == fields == set(HISTORIES)
    assert len(RULES) == len(fields)


# What a stage has made, as rows of a store.

CRITIQUE = Stage(name="critique", about="", work=lambda ctx, iteration: asyncio.sleep(0), roles=("judge",))
EVALUATE = replace(CRITIQUE, name="evaluate", roles=("actor",))
EXPLORE = replace(CRITIQUE, name="explore", roles=("actor",), gathers=True)


class AlarmLog(list[Alarm]):
    """The alarms that people were told of."""

    @property
    def names(self) -> list[str]:
        return [alarm.name for alarm in self]


def start_context(folder: Path, heard: AlarmLog, *overrides: str) -> RunContext:
    """Return the workplace of a run whose first two iterations have begun."""
    server = {"backend": "openai", "server": {"model": "m", "base_url": "http://nowhere/v1"}}
    recipe = parse({"name": "r", "model": server}, overrides)
    quiet = quiet_context(RunRef(workspace=str(folder / "ws"), run_id="r"), recipe)
    ctx = replace(quiet, on_alarm=heard.append)
    asyncio.run(start_run(ctx))
    asyncio.run(begin_iteration(ctx, 1))
    ctx.store.write(iteration_rows(ctx.iteration_id(2), run_id="r", iteration=2, checkpoint_in="c"))
    return ctx


def answer(ctx: RunContext, iteration: int, replies: Sequence[str], *, cut: int = 0) -> None:
    """Store episodes of one reply each, of which some were cut by their token limit."""
    units: list[Rows] = []
    for number, reply in enumerate(replies):
        key = f"{iteration}-{number}"
        ending: FinishReason = "length" if number < cut else "stop"
        generation = Generation(text=reply, token_ids=(1,), finish_reason=ending, prompt_tokens=1, completion_tokens=1)
        step = Step(reply=reply, action="go", observation="seen", reward=0.0, token_ids=(1,), finish_reason=ending)
        episode = Trajectory(
            instance=Instance(environment="toy", split="train", index=number),
            first_observation="Start.",
            steps=(step,),
            reward=0.0,
            success=False,
            stop=StopReason.STEP_LIMIT,
        )
        units.append(
            trajectory_rows(
                key,
                episode,
                source="rollout",
                iteration_id=ctx.iteration_id(iteration),
                draws={0: Draw(seed=1, number=0, generation=generation)},
            )
        )
    ctx.store.write(merge(units))


def judge(
    ctx: RunContext, iteration: int, verdicts: Sequence[Verdict], errors: Collection[Verdict] = (Verdict.BAD,)
) -> None:
    """Store a tree for each verdict of the judge on a step that is worth less than its sibling;
    `errors` are the verdicts that count as an error.
    """
    units: list[Rows] = []
    key = ctx.iteration_id(iteration)
    win = Step(reply="win", action="win", observation="yes", reward=1.0, terminated=True, success=True, token_ids=(1,))
    loss = Step(reply="lose", action="lose", observation="no", reward=0.0, terminated=True, token_ids=(2,))
    good = Node(index=1, parent=0, depth=1, step=win, visits=1, value_sum=1.0, terminal=True, stop=StopReason.SUCCESS)
    bad = Node(index=2, parent=0, depth=1, step=loss, visits=1, terminal=True, stop=StopReason.FAILURE)
    root = Node(index=0, parent=-1, depth=0, step=None, visits=2, value_sum=1.0)
    for number, verdict in enumerate(verdicts):
        instance, tree_id = Instance(environment="toy", split="train", index=number), f"t{iteration}-{number}"
        tree = Tree(instance=instance, first_observation="Start.", nodes=(root, good, bad), dives_done=1, seed=1)
        head = TreeHead(
            tree_id=tree_id,
            iteration_id=key,
            checkpoint_id="c",
            config={},
            instance=instance,
            first_observation="Start.",
            seed=1,
        )
        paths = leaf_paths(tree, tree_id)
        pair = PathPair(good=paths[0], bad=paths[1], split=0)
        critique = Critique(
            verdicts=(StepVerdict(position=0, verdict=verdict, reply=verdict),),
            first_error=0 if verdict in errors else None,
        )
        units += [
            tree_rows(head, tree),
            finished_tree_rows(head, tree),
            pair_rows(tree_id, pair, iteration_id=key),
            critique_rows(tree_id, critique, iteration_id=key, nodes=pair.bad.nodes),
        ]
    ctx.store.write(merge(units))


GOOD, BAD, UNREAD = [Verdict.GOOD], [Verdict.BAD], [Verdict.UNPARSABLE]


@pytest.mark.slow
def test_a_judge_that_always_says_good_is_noticed(tmp_path: Path) -> None:
    alarms = AlarmLog()
    ctx = start_context(tmp_path, alarms)
    judge(ctx, 1, GOOD * 3)
    check_stage(ctx, 1, CRITIQUE)
    assert alarms == [], "three paths prove nothing"
    judge(ctx, 1, GOOD * 12)
    check_stage(ctx, 1, CRITIQUE)
    check_stage(ctx, 1, CRITIQUE)
    assert {alarm.id for alarm in alarms} == {alarm.id for alarm in load_alarms(ctx.store, ctx.iteration_id(1))}
    (stored_alarm,) = load_alarms(ctx.store, ctx.iteration_id(1))
    assert (stored_alarm.name, stored_alarm.stage, stored_alarm.step, stored_alarm.reaction) == (
        "judge_agreement",
        "critique",
        None,
        "tell",
    )
    assert ctx.store.query("select run_id, iteration, name from v_alarms").values.tolist() == [
        ["r", 1, "judge_agreement"]
    ]
    assert ctx.store.query("from v_orphans").empty


@pytest.mark.slow
def test_a_judge_that_the_oracle_contradicts_is_noticed(tmp_path: Path) -> None:
    alarms = AlarmLog()
    ctx = start_context(tmp_path, alarms)
    judge(ctx, 1, BAD * 12)
    check_stage(ctx, 1, CRITIQUE)
    assert alarms == []
    ctx.store.write(merge(oracle_rows(f"t1-{number}", {2: Verdict.GOOD}) for number in range(12)))
    check_stage(ctx, 1, CRITIQUE)
    assert alarms.names == ["judge_agreement"]


@pytest.mark.slow
def test_the_first_errors_that_the_oracle_is_compared_with_are_those_of_the_splices(tmp_path: Path) -> None:
    ctx = start_context(tmp_path, AlarmLog())
    judge(ctx, 1, [*UNREAD * 2, *GOOD], errors=(Verdict.BAD, Verdict.UNPARSABLE))
    ctx.store.write(merge(oracle_rows(f"t1-{number}", {2: Verdict.BAD}) for number in range(3)))
    agreement = oracle_agreement(ctx, 1)
    assert agreement is not None
    assert agreement.accuracy.value == 0
    assert agreement.first_error is not None
    assert agreement.first_error.value == pytest.approx(2 / 3)


@pytest.mark.slow
def test_a_judge_that_drifts_is_noticed_where_it_is_still_better_than_nothing(tmp_path: Path) -> None:
    alarms = AlarmLog()
    ctx = start_context(tmp_path, alarms)
    judge(ctx, 1, BAD * 30)
    check_stage(ctx, 1, CRITIQUE)
    judge(ctx, 2, [*BAD * 15, *GOOD * 15])
    check_stage(ctx, 2, CRITIQUE)
    assert alarms.names == ["judge_drift"]
    assert alarms[0].iteration_id == ctx.iteration_id(2)


@pytest.mark.slow
def test_verdicts_that_cannot_be_read_are_noticed(tmp_path: Path) -> None:
    alarms = AlarmLog()
    ctx = start_context(tmp_path, alarms, "alarms.judge_agreement=null")
    judge(ctx, 1, [*BAD * 20, *UNREAD * 4])
    check_stage(ctx, 1, CRITIQUE)
    assert alarms == []
    judge(ctx, 2, [*BAD * 10, *UNREAD * 10])
    check_stage(ctx, 2, CRITIQUE)
    assert alarms.names == ["unreadable_replies"]


@pytest.mark.slow
def test_cut_and_empty_replies_of_a_stage_are_noticed(tmp_path: Path) -> None:
    alarms = AlarmLog()
    ctx = start_context(tmp_path, alarms)
    answer(ctx, 1, ["go"] * 20, cut=5)
    check_stage(ctx, 1, EXPLORE)
    assert alarms == []
    answer(ctx, 2, [*["go"] * 14, *[" "] * 6], cut=12)
    check_stage(ctx, 2, EVALUATE)
    assert alarms == [], "they are of another stage"
    check_stage(ctx, 2, EXPLORE)
    assert alarms.names == ["cut_replies", "empty_replies"]


def store_evaluation(
    ctx: RunContext, *, low: float, high: float, losses: Sequence[float] = (), reward: float = 0.0
) -> None:
    """Store what an iteration trained, by loss or by a rising or falling reward, and what its model
    gained.
    """
    key = ctx.iteration_id(1)
    units = [
        checkpoint_rows("c1", path="one", weights_sha256="b", config={}, iteration_id=key),
        evaluation_rows("e", iteration_id=key, checkpoint_id="c1", name="test", split="test", config={}, finished=True),
        metric_rows("evaluation", "e", "gain_over_base", (low + high) / 2, low=low, high=high, n=100),
        *(
            training_step_rows("c1", number, loss=loss, trained_tokens=1, seconds=1.0, preference_measures={})
            for number, loss in enumerate(losses, start=1)
        ),
        *(rl_step(key, number, 0.5 + reward * number) for number in range(1, 5) if reward),
    ]
    ctx.store.write(merge(units))
    ctx.store.update("iteration", {"iteration_id": key, "checkpoint_out": "c1"})


def rl_step(key: str, number: int, reward: float) -> Rows:
    shares = dict.fromkeys(("pass_at_1", "pass_at_n", "mixed_share", "cut_share", "drawn_again"), 0)
    counts = dict.fromkeys(("episode_tokens", "episode_steps", "sampled_tokens", "trained_tokens"), 1)
    return rl_step_rows(
        key, number, {"reward": reward, "learning_rate": 0.1, "training_seconds": 1.0, **shares, **counts}
    )


FALLING, RISING = (0.5, 0.4, 0.3, 0.2), (0.2, 0.3, 0.4, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "low", "high", "raised"),
    [
        ({"losses": FALLING}, -0.3, -0.1, True),
        ({"losses": FALLING}, -0.3, 0.01, False),
        ({"losses": RISING}, -0.3, -0.1, False),
        ({"reward": 0.1}, -0.3, -0.1, True),
        ({"reward": -0.1}, -0.3, -0.1, False),
        ({"losses": FALLING, "reward": -0.1}, -0.3, -0.1, False),
    ],
)
def test_success_that_falls_while_training_goes_well_is_noticed(
    tmp_path: Path, trained: dict[str, object], low: float, high: float, raised: bool
) -> None:
    alarms = AlarmLog()
    ctx = start_context(tmp_path, alarms)
    store_evaluation(ctx, low=low, high=high, **trained)  # type: ignore[arg-type]
    check_stage(ctx, 1, EVALUATE)
    assert alarms.names == ["held_out_drop"] * raised


@pytest.mark.slow
def test_validations_that_fall_while_reward_rises_are_noticed(tmp_path: Path) -> None:
    alarms = AlarmLog()
    ctx = start_context(tmp_path, alarms, "alarms.contrast=null")
    key = ctx.iteration_id(1)
    for number, wins in enumerate((30, 28, 10, 9), start=1):
        units = [rl_step(key, number, 0.1 * number)]
        for each in range(40):
            episode = Trajectory(
                instance=Instance(environment="toy", split="dev", index=each),
                first_observation="Start.",
                steps=(),
                reward=float(each < wins),
                success=each < wins,
                stop=StopReason.SUCCESS if each < wins else StopReason.FAILURE,
            )
            name = f"v{number}-{each}"
            units += [
                trajectory_rows(name, episode, source="validation", iteration_id=key),
                validation_rows(key, number, [name]),
            ]
        ctx.store.write(merge(units))
        watch_step(ctx, 1, "reinforce", number, {"eval_success": wins / 40})
        # Fewer than four steps do not tell whether the reward rises.
        assert alarms.names == ["held_out_drop"] * (number == 4)
    assert alarms[0].step == 4


@pytest.mark.slow
async def test_half_of_an_error_budget_is_told_once(tmp_path: Path) -> None:
    alarms, errors = AlarmLog(), list[UnitError]()
    ctx = await asyncio.to_thread(start_context, tmp_path, alarms, "errors={budget: 0.2, retries: 0}")

    async def work(number: int) -> int:
        if number % 5 == 0:
            raise EnvironmentFault("no")
        return number

    async with Writer(ctx.store) as writer:
        store = ctx.on_error(writer, "explore", 1)

        def keep(error: UnitError) -> None:
            errors.append(error)
            store(error)

        await run_all(
            list(range(20)),
            work,
            key=str,
            errors=ctx.recipe.errors,
            on_error=keep,
            concurrency=1,
        )
    assert [error.spent for error in errors] == [0.25, 0.5, 0.75, 1.0]
    assert alarms.names == ["error_budget"] * 3
    (stored_alarm,) = load_alarms(ctx.store, ctx.iteration_id(1))
    assert "50% of the error budget is spent" in stored_alarm.message
    await asyncio.to_thread(check_stage, ctx, 1, EXPLORE)
    assert [alarm.id for alarm in alarms] == [stored_alarm.id] * 4, "who tells people tells each once"


@pytest.mark.slow
@pytest.mark.parametrize("reaction", ["stop", "back"])
def test_a_run_ends_after_a_stage_until_the_alarm_is_silent(tmp_path: Path, reaction: str) -> None:
    alarms = AlarmLog()
    ctx = start_context(tmp_path, alarms, f"alarms.reaction={reaction}")
    judge(ctx, 1, GOOD * 12)
    for _ in range(2):
        with pytest.raises(AlarmRaised, match=r"alarm judge_agreement: .* same command goes on after this stage"):
            check_stage(ctx, 1, CRITIQUE)
    for silent in (AlarmsConfig(judge_agreement=None, reaction="stop"), AlarmsConfig()):
        check_stage(replace(ctx, recipe=replace(ctx.recipe, alarms=silent)), 1, CRITIQUE)
    assert len(load_alarms(ctx.store, ctx.iteration_id(1))) == 1


@pytest.mark.slow
def test_a_report_has_a_line_for_each_alarm(tmp_path: Path) -> None:
    ctx = start_context(tmp_path, AlarmLog())
    assert alarm_section(ctx, 1) == ()
    judge(ctx, 1, GOOD * 12)
    check_stage(ctx, 1, CRITIQUE)
    (section,) = alarm_section(ctx, 1)
    (line,) = section.blocks
    assert str(line).count("judge_agreement, critique: the judge names the same first error as the tree")
    assert "name another model in models.judge." in str(line)
