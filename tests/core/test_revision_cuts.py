"""Where failed episodes are cut that groups go on from: by the judge, by the fall of value, or by
chance, and what is told of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from toy import Line

from agentr_core.errors import ConfigError, ModelFault, PromptTooLong
from agentr_core.methods.faults import parse
from agentr_core.methods.grpo.cuts import cuts_of, largest_drop
from agentr_core.methods.grpo.report import step_sections
from agentr_core.methods.grpo.rollouts import cut_beginning
from agentr_core.methods.table import method_of, plans_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime.context import RunContext
from agentr_core.store.codec.ledger import Group, group_rows, iteration_rows, rl_step_rows
from agentr_core.store.codec.samples import derivation_rows
from agentr_core.store.codec.trajectories import trajectory_rows
from agentr_core.store.database import Store, Writer
from agentr_core.store.tables import merge
from agentr_core.types import Answer, Derivation, Instance, Question, Step, StopReason, Trajectory

ROOM = Instance(environment="line", split="train", index=0)
RL: dict[str, Any] = {"name": "x", "method": "grpo", "environment": {"name": "textcraft"}, "model": {"path": "m"}}


def trajectory(*actions: str, reward: float = 0.0, summary_at: int | None = None) -> Trajectory:
    steps = [Step(reply=action, action=action, observation=f"after {action}", reward=0.0) for action in actions]
    if summary_at is not None:
        steps.insert(summary_at, Step(reply="So far.", action="", observation="", reward=0.0, summary_of=summary_at))
    stop = StopReason.SUCCESS if reward == 1 else StopReason.STEP_LIMIT
    return Trajectory(
        instance=ROOM, first_observation="A line.", steps=tuple(steps), reward=reward, success=reward == 1, stop=stop
    )


def test_the_cut_is_before_the_step_at_which_the_mean_of_the_group_falls_most() -> None:
    group = [
        trajectory("a", "b", "c", "x"),
        trajectory("a", "b", "c", "y", reward=1.0),
        trajectory("a", "b", "d", reward=1.0),
        trajectory("a", "e", "f"),
        trajectory("g", "h"),
    ]
    # The mean of all is .4, of those behind a .5, behind b 2/3, behind c .5.
    assert largest_drop(group, 0) == 3
    assert largest_drop(group, 3) == 1, "what follows a choice loses nothing of its own"
    assert largest_drop(group, 4) == 0
    assert largest_drop(group, 2) is None, "it only rises"
    assert largest_drop([trajectory("a", "b"), trajectory("a", "c")], 0) is None, "nothing was won"


def test_a_beginning_may_be_told_where_it_ends() -> None:
    whole = trajectory("a", "b", "c")
    assert cut_beginning("t", whole, seed=0, cut=2).steps == whole.steps[:2]
    assert cut_beginning("t", whole, seed=0, cut=0).steps == ()
    assert cut_beginning("t", whole, seed=0, cut=None) == cut_beginning("t", whole, seed=0)


@dataclass
class Judge:
    """Calls some actions bad, and remembers what it was asked."""

    bad: tuple[str, ...]
    asked: list[tuple[str, int]] = field(default_factory=list)
    breaks: int = 0
    longest: int = 10_000

    async def __call__(self, question: Question, *, seed: int, session: str) -> Answer:
        text = question.messages[0].text
        if len(text) > self.longest:
            raise PromptTooLong("no room")
        action = text.rpartition("Action: ")[2].partition("\n")[0]
        self.asked.append((action, seed))
        if self.breaks and len(self.asked) == self.breaks:
            raise ModelFault("the server is gone")
        assert question.role == "judge"
        return Answer(
            role="judge",
            model="m",
            prompt_hash="",
            seed=seed,
            text=f"Judgement: {'Bad' if action in self.bad else 'Good'}",
            finish_reason="stop",
            prompt_tokens=1,
            completion_tokens=1,
        )


@pytest.fixture
def ctx(tmp_path: Path, open_store: Callable[[Path], Store]) -> Callable[..., RunContext]:
    def make(*overrides: str) -> RunContext:
        recipe = parse(RL | {"errors": {"budget": 0.9}}, ["grpo.revision_share=0.5", *overrides])
        context = RunContext(
            recipe=recipe,
            method=method_of(recipe),
            run_id="r",
            root=tmp_path,
            store=open_store(tmp_path / "store.duckdb"),
            make_environment=lambda _: Line(),
            load_model=lambda role, path: ScriptedModel(lambda messages, seed, number: ""),
            progress=lambda done, total, note: None,
        )
        context.store.write(iteration_rows(context.iteration_id(1), run_id="r", iteration=1))
        return context

    return make


def cut(ctx: RunContext, failed: dict[str, Trajectory], judge: Judge, seed: int = 0) -> dict[str, int]:
    async def work() -> dict[str, int]:
        async with Writer(ctx.store) as writer:
            return await cuts_of(ctx, 1, failed, judge, writer, seed=seed)

    return asyncio.run(work())


FAILED = {
    "late": trajectory("a", "b", "x"),
    "sound": trajectory("c", "d"),
    "wrong": trajectory("x", "a"),
    "summed": trajectory("e", "f", "x", "x", summary_at=2),
}


@pytest.mark.slow
def test_the_judge_says_where_and_is_asked_once(ctx: Callable[..., RunContext]) -> None:
    run_ctx, judge = ctx("grpo.revision_cut=verdict"), Judge(bad=("x",))
    cuts = {"late": 2, "wrong": 0, "summed": 3}
    assert cut(run_ctx, FAILED, judge) == cuts, "summaries are steps, and are not judged"
    assert len(judge.asked) == 3 + 2 + 2 + 4
    assert len({seed for _, seed in judge.asked}) == 4, "one for each position in the episodes of an instance"
    silent = Judge(bad=())
    assert cut(run_ctx, FAILED, silent, seed=1) == cuts
    assert silent.asked == [], "its words are stored"
    rejections = run_ctx.store.rows(
        "select subject, reason, detail from rejection where stage = 'reinforce' order by subject"
    )
    assert rejections == [
        ("sound", "no-error-found", "no step is bad; it is cut at random"),
        ("wrong", "error-at-the-start", "the group begins at the start"),
    ]
    assert not run_ctx.store.rows("select * from v_orphans where child in ('edit', 'rejection')")


@pytest.mark.slow
def test_after_an_interruption_the_same_is_asked_and_only_what_is_missing(ctx: Callable[..., RunContext]) -> None:
    whole = Judge(bad=("x",))
    run_ctx = ctx("grpo.revision_cut=verdict", "seed=1")
    assert cut(run_ctx, {"late": FAILED["late"]}, whole) == {"late": 2}
    with run_ctx.store.transaction() as con:
        con.execute("delete from edit where text like '%Bad'")
    second_judge = Judge(bad=("x",))
    assert cut(run_ctx, {"late": FAILED["late"]}, second_judge) == {"late": 2}
    assert second_judge.asked == [entry for entry in whole.asked if entry[0] == "x"]


@pytest.mark.slow
def test_votes_are_drawn_apart_and_a_long_log_is_halved(ctx: Callable[..., RunContext]) -> None:
    run_ctx = ctx("grpo.revision_cut=verdict", "critique={votes: 3, temperature: 1}")
    judge = Judge(bad=("x",), longest=760)
    long = {"long": trajectory(*(f"step number {n}" for n in range(12)), "x")}
    assert cut(run_ctx, long, judge) == {"long": 12}
    assert len(judge.asked) == 3 * 13
    assert len({seed for _, seed in judge.asked}) == 3 * 13


@pytest.mark.slow
def test_an_episode_that_cannot_be_judged_is_cut_at_random_and_told(ctx: Callable[..., RunContext]) -> None:
    run_ctx = ctx("grpo.revision_cut=verdict")
    assert cut(run_ctx, {"late": FAILED["late"], "wrong": FAILED["wrong"]}, Judge(bad=("x",), breaks=1)) == {"wrong": 0}
    reasons = dict(run_ctx.store.rows("select subject, reason from rejection"))
    assert reasons == {"late": "not-judged", "wrong": "error-at-the-start"}


@pytest.mark.slow
def test_the_value_is_that_of_the_episodes_own_group(ctx: Callable[..., RunContext]) -> None:
    run_ctx, judge = ctx("grpo.revision_cut=value"), Judge(bad=())
    key = run_ctx.iteration_id(1)
    groups = [
        [trajectory("a", "b", "x"), trajectory("a", "b", "c", reward=1.0)],
        [trajectory("a", "x"), trajectory("a", "y")],
        [trajectory("x", "b"), trajectory("a", "b", reward=1.0)],
    ]
    for number, episodes in enumerate(groups):
        episode_by_id = {f"{number}.{index}": episode for index, episode in enumerate(episodes)}
        group = Group(number=number, draw=0, policy="p", instance=ROOM, prefix=0, episodes=episode_by_id)
        rows = [trajectory_rows(name, t, source="rollout", iteration_id=key) for name, t in episode_by_id.items()]
        run_ctx.store.write(merge([*rows, group_rows(group, [0.0, 0.0], iteration_id=key, step=1, has_contrast=True)]))
    failures = {f"{number}.0": episodes[0] for number, episodes in enumerate(groups)}
    assert cut(run_ctx, failures, judge) == {"0.0": 2, "2.0": 0}
    assert judge.asked == []
    made_of = [Derivation(child="c", parent=parent, operator="revision") for parent in ("0.0", "1.0")]
    run_ctx.store.write(derivation_rows(made_of[:1], iteration_id=key))
    run_ctx.store.write(derivation_rows([Derivation(child="d", parent="1.0", operator="revision")], iteration_id=key))
    measures = dict.fromkeys(("reward", "pass_at_1", "pass_at_n", "mixed_share", "recovered"), 0.5)
    counts = dict.fromkeys(
        ("drawn_again", "episode_tokens", "episode_steps", "cut_share", "sampled_tokens", "trained_tokens"), 1
    )
    run_ctx.store.write(rl_step_rows(key, 1, {**measures, **counts, "learning_rate": 0.1}))
    (section, *_) = step_sections(run_ctx, 1)
    assert (
        "Of the failed episodes 1 were cut before the largest drop of their group's value, 1 at random "
        "(no-drop-found); for 1 that is the first step, and a group began at the start."
    ) in section.note


def test_nothing_is_asked_where_the_cut_is_drawn(ctx: Callable[..., RunContext]) -> None:
    judge = Judge(bad=("x",))
    assert cut(ctx(), FAILED, judge) == {}
    assert judge.asked == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["grpo.revision_cut=verdict"], "grpo.revision_cut: cuts the failed episodes that groups go on from, and"),
        (["critique.votes=3", "critique.temperature=1"], "critique: has no use without grpo.revision_cut: verdict"),
        (
            ["grpo={revision_share: 0.5, revision_cut: verdict}", "critique.scan_from=root"],
            "critique.scan_from: an episode is judged from its first step on",
        ),
        (
            ["method=et-agent", "et_agent.phases=[rft, rl]", "grpo={revision_share: 0.5, revision_cut: verdict}"],
            "grpo.revision_cut: verdict asks the judge as section critique says, which method et-agent has not",
        ),
    ],
)
def test_faults_are_named(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as fault:
        parse(RL, overrides)
    assert said in str(fault.value)


def test_only_verdicts_ask_a_judge() -> None:
    for by, roles in (
        ("verdict", ("actor", "scorer", "judge")),
        ("value", ("actor", "scorer")),
        ("random", ("actor", "scorer")),
    ):
        recipe = parse(RL, [f"grpo={{revision_share: 0.5, revision_cut: {by}}}"])
        (plan, *_) = plans_of(recipe)
        assert plan.stage("reinforce").roles == roles
        demands = method_of(recipe).demands(recipe, 1, 1)
        assert ("cut" in demands) == (by == "verdict")
        assert any("judge's first error" in line for line in method_of(recipe).describe(recipe, 1, 1)) == (
            by == "verdict"
        )
