"""Stored episodes scored again: by a grader, by the world as it is now, by a judge; what was scored
is not scored again, and training data can be made by either score.
"""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from functools import partial
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from asked import run_id_of
from click.testing import CliRunner
from combination_lock import CombinationLock
from door import Door
from finished import finish
from readme import BLOCKS, COMMANDS

from agentr_core.environment import Repeatability
from agentr_core.environments import registry
from agentr_core.environments.graders import Command, Pattern, Rubric
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.episodes.rollout import play_replies
from agentr_core.errors import ConfigError, EnvironmentFault, ErrorBudgetSpent
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.agent_r.critique import JUDGE_INSTRUCTION, critique
from agentr_core.methods.agent_r.splice import splice_pairs
from agentr_core.methods.eto.preferences import explore_and_keep
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ReplyFunction, ScriptedModel
from agentr_core.protocols import ChatModel
from agentr_core.reports.document import Paragraph, Table
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.stages.regrade import Scoring, regrade, world_scoring
from agentr_core.stages.scorings import scoring_section
from agentr_core.store.codec.trajectories import trajectory_rows
from agentr_core.store.database import Store
from agentr_core.store.queries.scorings import episode_rescores, score_changes, score_comparisons
from agentr_core.system import LOOPBACK
from agentr_core.types import Grade, Instance, Message, StopReason, Trajectory
from agentr_core.viewer.server import app
from flows.cli import cli

pytestmark = pytest.mark.slow

RUN = "087920b9ddc460a6"
OPENED = 4
"""Locks that the stored episodes open; of each other one they end closed."""


@pytest.fixture(autouse=True)
def _lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORY_BY_NAME", {"combination-lock": CombinationLock})
    monkeypatch.setattr(registry, "entry_points", lambda **_: [SimpleNamespace(name="combination-lock")])


def play_episode(index: int) -> Trajectory:
    env = CombinationLock()
    instance = Instance(environment=env.name, split="train", index=index)
    replies = env.expert(instance) if index < OPENED else ["Action: try 9 9 8", "I give up.\nAnswer: none"]
    observation, outcomes = play_replies(env, instance, replies)
    stop = outcomes[-1].stop or StopReason.STEP_LIMIT
    return Trajectory.ended(instance, observation, [outcome.step for outcome in outcomes], stop)


@pytest.fixture
def ctx(tmp_path: Path) -> RunContext:
    """Return the workplace of a run with ten rollouts, the first of which was scored wrongly."""
    ctx = finish(tmp_path, RUN, [set()], episodes=0, environment={"name": "combination-lock"})
    for index in range(10):
        episode = play_episode(index)
        if not index:
            last = dataclasses.replace(episode.steps[-1], reward=0.0, success=False)
            episode = dataclasses.replace(episode, steps=(*episode.steps[:-1], last), reward=0.0, success=False)
        rows = trajectory_rows(f"t{index}", episode, source="rollout", iteration_id=ctx.iteration_id(0))
        ctx.store.write(rows)
    return ctx


class Counting(Pattern):
    """Wins for what opened the lock; fails on the episodes of some locks."""

    def __init__(self, fails: Sequence[int] = (), error: type[Exception] = ConfigError) -> None:
        super().__init__("opens", where="observation")
        self.asked: list[int] = []
        self._fails, self._error = fails, error

    def rule(self, trajectory: Trajectory) -> Grade | None:
        self.asked.append(trajectory.instance.index)
        if trajectory.instance.index in self._fails:
            raise self._error("no more")
        return super().rule(trajectory)


def opens(grader: Any = None) -> Scoring:
    return Scoring(name="regex", settings={"pattern": "opens"}, grader=grader or Pattern("opens", where="observation"))


async def test_the_world_plays_the_recorded_actions_again(ctx: RunContext) -> None:
    scoring = world_scoring(ctx)
    result = await regrade(ctx, scoring)
    assert (result.episodes, result.new, result.faults) == (10, 10, [])
    (comparison,) = score_comparisons(ctx.store, scoring.id, RUN)
    assert comparison == (0, "rollout", 10, 0.3, 0.4, 0.3, 0.4, 1, 0, 1, 0, 0)
    (change,) = score_changes(ctx.store, scoring.id, RUN, 5)
    assert change == ("t0", None, None, "combination-lock/train/0", 0.0, 1.0, "won", None)
    assert ctx.store.rows("select success from trajectory where trajectory_id = 't0'") == [(False,)]
    assert ctx.store.rows("select * from v_orphans") == []
    ((settings,),) = ctx.store.rows("select settings::varchar from scoring")
    assert json.loads(settings)["worlds"]["combination-lock"]["version"] == 1


async def test_a_disaster_and_an_early_end_are_scored_as_they_come(ctx: RunContext) -> None:
    class Stricter(CombinationLock):
        def step(self, action: str) -> Any:
            transition = super().step(action)
            return (
                transition._replace(reward=-1.0)
                if action == "try 9 9 8"
                else transition._replace(reward=transition.reward / 2)
            )

    strict = dataclasses.replace(ctx, make_environment=lambda _: Stricter())
    scoring = world_scoring(ctx)
    await regrade(strict, scoring)
    rewards = strict.store.rows("select reward, success, count(*) from regrade group by all order by all")
    assert rewards == [(0.0, False, 6), (0.5, True, 4)]


async def test_what_was_scored_is_not_scored_again(ctx: RunContext) -> None:
    broken = Counting(fails=[6])
    with pytest.raises(ConfigError, match="no more"):
        await regrade(ctx, opens(broken))
    num_rows = ctx.store.count("select count(*) from regrade")
    assert 0 < num_rows < 10
    grader = Counting()
    result = await regrade(ctx, opens(grader))
    assert (result.new, len(grader.asked)) == (10 - num_rows, 10 - num_rows)
    assert 6 in grader.asked
    assert (await regrade(ctx, opens(second_grader := Counting()))).new == 0
    assert second_grader.asked == []


async def test_a_fault_is_told_and_never_a_reward(ctx: RunContext) -> None:
    lax = dataclasses.replace(ctx.recipe.errors, budget=0.2, retries=0)
    tolerant = dataclasses.replace(ctx, recipe=dataclasses.replace(ctx.recipe, errors=lax))
    failing = Scoring(name="command", settings={}, grader=Command("grep -q 'train/7\"' && exit 3; echo 0.25"))
    result = await regrade(tolerant, failing)
    assert (result.new, len(result.faults)) == (9, 1)
    assert result.faults[0].startswith("EnvironmentFault: combination-lock/train/7: the command ended with status 3")
    assert ctx.store.rows("select distinct reward, success from regrade") == [(0.25, False)]
    assert ctx.store.count("select count(*) from event where stage = 'regrade'") == 1
    with pytest.raises(ErrorBudgetSpent, match=r"fix the cause, or raise errors.budget"):
        await regrade(tolerant, dataclasses.replace(failing, settings={"b": 1}, grader=Command("false")))


async def test_unreadable_replies_of_a_judge_are_counted(ctx: RunContext) -> None:
    def reply(messages: tuple[Message, ...], seed: int, number: int) -> str:
        if "Lock number 3 " in messages[-1].text:
            return "<think>Score: 1"
        return "<think>Score: 1</think>\nScore: " + ("8" if "The lock opens" in messages[-1].text else "2")

    roles: list[str] = []

    def load(role: str, path: Path) -> ChatModel:
        roles.append(role)
        return ScriptedModel(reply)

    judge_ctx = dataclasses.replace(ctx, load_model=load)
    scoring = Scoring(name="rubric", settings={}, grader=Rubric("It opens the lock."))
    assert (await regrade(judge_ctx, scoring)).faults == []
    (comparison,) = score_comparisons(ctx.store, scoring.id, RUN)
    assert (comparison.episodes, comparison.won, comparison.lost, comparison.unreadable) == (10, 1, 0, 1)
    assert comparison.new_reward == pytest.approx((3 * 0.8 + 6 * 0.2) / 9)
    assert ctx.store.rows("select reply from v_regrades where change = 'unreadable'") == [("<think>Score: 1",)]
    # The recipe has no judge of its own.
    assert roles == ["actor"]


def test_a_world_that_does_not_repeat_itself_cannot_score_again(
    ctx: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CombinationLock, "repeatability", Repeatability.NEVER)
    with pytest.raises(ConfigError, match="world combination-lock does not repeat itself, so it cannot score again"):
        world_scoring(ctx)


def call(ctx: RunContext, *words: str) -> Any:
    return CliRunner().invoke(cli, ["regrade", RUN[:3], "-w", str(ctx.root), *words])


@pytest.mark.slow
def test_the_command_shows_old_and_new(ctx: RunContext, tmp_path: Path) -> None:
    result = call(ctx, "--by", "regex", "--pattern", "opens", "--where", "observation")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == f"10 episodes of run {RUN}, 10 of them scored now by regex"
    assert lines[2].split() == ["0", "rollout", "10", "30.0", "40.0", "0.300", "0.400", "1", "0", "1", "0", "0"]
    assert "  won         0 -> 1  combination-lock/train/0  t0" in lines
    gold = tmp_path / "gold.jsonl"
    gold.write_text("".join(json.dumps({"id": index, "answer": "none"}) + "\n" for index in range(9)))
    report = json.loads(
        call(ctx, "--by", "exact", "--gold", str(gold), "--format", "json", "-o", "errors.budget=0.1").output
    )
    assert (report["new"], len(report["faults"])) == (9, 1)
    assert "combination-lock/train/9 has no answer in" in report["faults"][0]
    assert report["scores"][0]["won"] == 5
    assert report["settings"].keys() == {"gold"}


async def test_pages_and_report_show_old_and_new(ctx: RunContext) -> None:
    scoring = opens()
    await regrade(ctx, scoring)
    (section,) = scoring_section(ctx)
    assert (section.key, len(scoring_section(ctx, 0)), scoring_section(ctx, 1)) == ("scorings", 1, ())
    head, table = section.blocks
    assert head == Paragraph(f"Scored by regex, scoring {scoring.id}.")
    assert isinstance(table, Table)
    assert [row.cells for row in table.rows] == [
        ("0", "rollout", "10", "30.0", "40.0", "0.300", "0.400", "1", "0", "1", "0", "0")
    ]
    viewer = app(ctx.store.path, index=ctx.root / "texts.sqlite", hosts=LOOPBACK)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(viewer), base_url="http://localhost:4280") as http:
        texts = {path: (await http.get(path)).text for path in ("/scorings", f"/run/{RUN}", "/trajectory/t0")}
        address = f"/regrades?change=won&scoring={scoring.id}&run={RUN}&iteration=0&episodes_of=rollout"
        for path in ("/scorings", f"/run/{RUN}"):
            assert address in unescape(texts[path])
        assert '<td>0</td><td>1</td><td class="text good">won</td>' in texts["/trajectory/t0"]
        (row,) = (await http.get(address.replace("?", ".json?"))).json()["rows"]
        assert (row["trajectory_id"], row["reward"], row["new_reward"], row["change"]) == ("t0", 0.0, 1.0, "won")
        assert (await http.get("/regrades.json?change=changed")).json()["total"] == 1
        assert (await http.get("/regrades.json?change=same")).json()["total"] == 9


@pytest.mark.slow
def test_the_commands_of_the_manual_are_run(ctx: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = (text for language, text in BLOCKS if language == "python" and "json.load(sys.stdin)" in text)
    (tmp_path / "within.py").write_text(program, encoding="utf-8")
    (tmp_path / "gold.jsonl").write_text("".join(f'{{"id": {index}, "answer": 9}}\n' for index in range(10)))
    monkeypatch.chdir(tmp_path)
    commands = [command for command in COMMANDS if command.startswith("agentr regrade ")]
    assert len(commands) == 4
    for command in commands:
        # There are no evaluations here.
        words = [word for word in shlex.split(command)[1:] if word not in ("--only", "evaluations", "experience")]
        result = CliRunner().invoke(cli, [*words, "-w", str(tmp_path)], catch_exceptions=False)
        assert result.exit_code == 0
        assert f"10 episodes of run {RUN}" in result.output


def test_a_question_world_has_its_golds_and_a_model_that_cannot_judge_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the worlds that are shipped, not of the lock alone.
    monkeypatch.undo()
    ctx = finish(tmp_path, RUN, [set()], episodes=0, environment={"name": "reasoning", "options": {"top_k": 1}})
    golds = []
    with ctx.worlds() as ((_, env),):
        assert isinstance(env, ReasoningWorld)
        for number, instance in enumerate(env.instances("train")[:3]):
            golds.append(env.problem(instance).golds[0])
            observation, outcomes = play_replies(
                env, instance, [f"<answer>\\boxed{{{golds[-1] if number else 'nobody'}}}</answer>"]
            )
            stop = outcomes[-1].stop or StopReason.STEP_LIMIT
            episode = Trajectory.ended(instance, observation, [outcome.step for outcome in outcomes], stop)
            ctx.store.write(trajectory_rows(f"q{number}", episode, source="rollout", iteration_id=ctx.iteration_id(0)))
    gold = tmp_path / "gold.jsonl"
    gold.write_text("".join(json.dumps({"id": n, "answer": answer}) + "\n" for n, answer in enumerate(golds)))
    for by in (["--by", "exact"], ["--by", "numeric", "--gold", str(gold)]):
        (row,) = json.loads(call(ctx, *by, "--format", "json").output)["scores"]
        assert (row["success"], row["new_success"]) == pytest.approx((2 / 3, 2 / 3))
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("The answer is right.")
    judge = str(Path(__file__).parents[2] / "data" / "models" / "reasoning-tiny")
    result = call(ctx, "--by", "rubric", "--rubric", str(rubric), "--judge", judge, "--format", "json")
    (row,) = json.loads(result.output[result.output.index("{") :])["scores"]
    assert (result.exit_code, row["episodes"], row["unreadable"], row["new_success"]) == (0, 3, 3, None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--by", "regex"], "--by regex needs --pattern"),
        (["--by", "exact"], "--by exact needs --gold: world combination-lock has no right answers of its own"),
        (["--by", "regex", "--pattern", "("], "'(' is no regular expression"),
        (["--by", "world", "--success-from", "0.5"], "--success-from does not belong to --by world; leave it out"),
        (["--iteration", "3"], f"run {RUN} has no such episodes"),
        (["-o", "nope=1"], "nope"),
    ],
)
def test_mistakes_are_told_in_a_sentence(ctx: RunContext, words: list[str], told: str) -> None:
    result = call(ctx, *words)
    assert isinstance(result.exception, ConfigError)
    assert told in str(result.exception)


def door_site(folder: Path, model: Path, speak: ReplyFunction, more: dict[str, Any], *overrides: str) -> RunContext:
    """Return a workplace in the world of the door, whose recipe has the sections `more`."""
    plain = {"name": "door", "environment": {"name": "door"}, "model": {"path": str(model)}, **more}
    recipe = parse(plain, overrides)
    return RunContext(
        recipe=recipe,
        method=method_of(recipe),
        run_id=run_id_of(recipe),
        root=folder,
        store=Store(folder / "store.duckdb"),
        make_environment=lambda _: Door(),
        load_model=lambda role, path: ScriptedModel(speak),
        progress=lambda done, total, note: None,
    )


@pytest.mark.slow
async def test_training_data_is_made_by_either_score(tmp_path: Path, tiny_model_dir: Path) -> None:
    def speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
        return f"word {fingerprint(seed, number)}"

    eto = {"method": "eto", "eto": {"phases": ["rft"], "explore": {"samples": 3}}}
    site = partial(door_site, tmp_path, tiny_model_dir, speak, eto)

    async def sample_ids(ctx: RunContext) -> set[str]:
        await start_run(ctx)
        await begin_iteration(ctx, 1)
        await explore_and_keep(ctx, 1)
        rows = ctx.store.rows(
            "select t.copied_from, t.trajectory_id from sample s join trajectory t using (trajectory_id) "
            "where s.iteration_id = ?",
            ctx.iteration_id(1),
        )
        return {original or trajectory_id for original, trajectory_id in rows}

    registry._FACTORY_BY_NAME["door"] = Door
    first = site()
    successes = await sample_ids(first)
    scoring = Scoring(name="regex", settings={"pattern": "Wrong 4"}, grader=Pattern("Wrong 4", where="observation"))
    assert (await regrade(first, scoring)).new > len(successes) > 0
    second = site(f"data.scoring={scoring.id}")
    failures = await sample_ids(second)
    assert failures
    assert not failures & successes
    with pytest.raises(ConfigError, match=r"data.scoring: there is no scoring 0123; "):
        await sample_ids(site("data.scoring='0123'"))
    new_scoring = Scoring(name="regex", settings={"pattern": "x"}, grader=Pattern("x"))
    second.store.write({"scoring": [{"scoring_id": new_scoring.id, "grader": "regex", "settings": "{}"}]})
    with pytest.raises(ConfigError, match=r"data.scoring: (\d+) of \1 episodes have no score of scoring"):
        await sample_ids(site(f"data.scoring={new_scoring.id}"))


class Once(Pattern):
    """Fails on the first episode that it reads, whenever that comes again."""

    failed: Trajectory | None = None

    def rule(self, trajectory: Trajectory) -> Grade | None:
        self.failed = self.failed or trajectory
        if trajectory == self.failed:
            raise EnvironmentFault("unreadable")
        return super().rule(trajectory)


@pytest.mark.slow
async def test_trees_are_paired_by_either_score(tmp_path: Path, tiny_model_dir: Path) -> None:
    def speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
        if JUDGE_INSTRUCTION in messages[-1].text:
            return "Judgement: Bad"
        return f"word {fingerprint(seed, number)}"

    search = {"search": {"dives": 3, "width": 3, "depth": 6}}
    site = partial(door_site, tmp_path, tiny_model_dir, speak, search)

    async def ends(ctx: RunContext) -> tuple[set[str], set[str], set[str]]:
        """Return how good paths of pairs end, bad ones, and those that became samples."""
        await start_run(ctx)
        await begin_iteration(ctx, 1)
        for stage in (collect, critique, splice_pairs):
            await stage(ctx, 1)
        last = "(select step.observation from node n where n.tree_id = {0}.tree_id and n.node_index = {0}.{1})"
        queries = (
            f"select {last.format('p', 'good_leaf')} from pair p where iteration_id = ?",
            f"select {last.format('p', 'bad_leaf')} from pair p where iteration_id = ?",
            f"select {last.format('t', 'leaf')} from trajectory t where source = 'tree' and iteration_id = ?",
        )
        good, bad, samples = ({text for (text,) in ctx.store.rows(q, ctx.iteration_id(1))} for q in queries)
        return good, bad, samples

    registry._FACTORY_BY_NAME["door"] = Door
    first = site()
    success, failure = {"It opens."}, {"Wrong 4."}
    assert await ends(first) == (success, failure, success)
    scoring = Scoring(name="regex", settings={"pattern": "Wrong 4"}, grader=Pattern("Wrong 4", where="observation"))
    # Paths of trees are no episodes of evaluations.
    with pytest.raises(ConfigError, match="no such episodes and no search trees"):
        await regrade(first, scoring, evaluations=True)
    result = await regrade(first, scoring)
    ((leaves,),) = first.store.rows("select count(*) from v_nodes where stop is not null and action is not null")
    assert (result.episodes, result.paths, result.new, result.faults) == (0, leaves, leaves, [])
    assert (await regrade(first, scoring)).new == 0
    (comparison,) = (
        row for row in score_comparisons(first.store, scoring.id, first.run_id) if row.episodes_of == "tree"
    )
    assert comparison.episodes == leaves
    assert comparison.lost > 0 < comparison.won
    assert comparison.new_success == pytest.approx(1 - (comparison.success or 0))
    # The trees are taken over, and what was good in them is bad.
    second = site(f"data.scoring={scoring.id}")
    assert await ends(second) == (failure, success, failure)
    trees = first.store.rows("select count(*), count(copied_from) from tree")
    assert trees == [(2 * trees[0][1], trees[0][1])]
    assert first.store.rows("select * from v_orphans") == []
    # A path that became a sample says so on its page.
    ((path, reward),) = second.store.rows(
        "select trajectory_id, new_reward from v_regrades where run_id = ? and trajectory_id is not null "
        "and episodes_of = 'tree' limit 1",
        second.run_id,
    )
    assert [row.new_reward for row in episode_rescores(second.store, path)] == [reward] == [1.0]
    # One path that the grader cannot read is a small part of all, though a large one of its tree.
    failing = Once("x", where="observation")
    part = Scoring(name="regex", settings={"pattern": "once"}, grader=failing)
    assert len((await regrade(first, part)).faults) == 1
    with pytest.raises(ConfigError, match=rf"data.scoring: 1 of {leaves} paths of trees have no score of scoring"):
        await ends(site(f"data.scoring={part.id}"))
    new_scoring = Scoring(name="regex", settings={"pattern": "x"}, grader=Pattern("x"))
    second.store.write({"scoring": [{"scoring_id": new_scoring.id, "grader": "regex", "settings": "{}"}]})
    with pytest.raises(ConfigError, match=r"data.scoring: (\d+) of \1 paths of trees have no score of scoring"):
        await ends(site(f"data.scoring={new_scoring.id}"))
    with pytest.raises(ConfigError, match=r"data.scoring: there is no scoring 0123; "):
        await ends(site("data.scoring='0123'"))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["method=agent-r", "splice.mode=verified"], "splice.mode verified plays its splices and keeps them by the "),
        (["method=agent-r", "agent_r.phases=[sft,rl]"], "group RL uses rewards while it samples"),
        (["method=eto", "eto.phases=[sft]"], "nothing here is made of what was played before"),
        (
            ["method=eto", "eto.phases=[rft,dpo]", "eto.preferences.source=file", "eto.preferences.file=p.jsonl"],
            "pairs with eto.preferences.source file are not made of episodes or trees",
        ),
        (["method=eto"], ""),
        (["method=agent-r"], ""),
        (["method=agent-r", "splice.mode=direct"], ""),
    ],
)
def test_what_goes_by_rewards_of_the_world_reads_no_scoring(overrides: list[str], told: str) -> None:
    recipe = {"name": "r", "model": {"path": "m"}, "environment": {"name": "combination-lock"}}
    if not told:
        assert parse(recipe, [*overrides, "data.scoring=abc"]).data.scoring == "abc"
        return
    with pytest.raises(ConfigError, match=f"data.scoring: {told}"):
        parse(recipe, [*overrides, "data.scoring=abc"])
