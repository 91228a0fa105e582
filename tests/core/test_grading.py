"""Grades after an episode, questions within a step, and tool calls: played, stored and found
again.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from door import Door
from toy import Growing, Line, Policy, Script, instance

from agentr_core.environment import Environment
from agentr_core.environments import contract
from agentr_core.episodes.grading import grade_episode
from agentr_core.episodes.rollout import EnvironmentPool, act, no_helper, restore_state, roll_out_episode
from agentr_core.episodes.units import UnitError
from agentr_core.errors import ConfigError, ErrorBudgetSpent, IllTypedAnswer, ModelFault, ModelUnavailable
from agentr_core.evaluation.episodes import EpisodeResult, Player, episode_plans, play_all
from agentr_core.methods.agent_r.splice import check_models, play_prefix
from agentr_core.methods.faults import parse
from agentr_core.recipes.agent_r import SearchConfig, SpliceConfig
from agentr_core.recipes.recipe import ErrorsConfig
from agentr_core.runtime.episode_shard import draws_of, load_ungraded, ungraded_id
from agentr_core.search.grow import grow
from agentr_core.search.tree import leaf_paths
from agentr_core.store.codec.trajectories import expansion_rows, load_trajectories, load_trees, trajectory_rows
from agentr_core.store.codec.trajectories import tree_rows as rows_of_tree
from agentr_core.store.database import Store
from agentr_core.store.tables import TreeHead
from agentr_core.types import (
    OUT_OF_ROOM,
    Answer,
    Critique,
    Grade,
    Message,
    Node,
    PathPair,
    Question,
    Sampling,
    StopReason,
    ToolCall,
    Trajectory,
    Transition,
    Tree,
    TreePath,
)

SAMPLING = Sampling()


class Examiner:
    """Whoever came to the goal passes; of others a model says how well they did."""

    asks = "judge"

    def rule(self, trajectory: Trajectory) -> Grade | None:
        return Grade(reward=1.0, success=True) if trajectory.success else None

    def question(self, trajectory: Trajectory) -> Question:
        way = " ".join(step.action for step in trajectory.steps)
        return Question(role="judge", messages=(Message(role="user", text=f"How good is: {way}?"),))

    def read(self, trajectory: Trajectory, reply: str) -> Grade | None:
        try:
            reward = float(reply)
        except ValueError:
            return None
        return Grade(reward=reward, success=reward >= 0.75)


class Exam(Line):
    grader = Examiner()


class RuledExam(Exam):
    """Like an exam, but the rule always decides."""

    grader = type("Marker", (Examiner,), {"asks": None})()


@pytest.mark.parametrize(
    ("env", "splice", "fits"),
    [
        (Exam(), {"mode": "verified"}, False),
        (Exam(), {"mode": "verified", "prune": True}, False),
        (Exam(), {"mode": "continued"}, True),
        (Exam(), {"mode": "blind"}, True),
        (RuledExam(), {"mode": "verified"}, True),
        (Line(), {"mode": "verified", "prune": True}, True),
    ],
)
def test_what_a_model_grades_is_not_spliced_by_its_live_reward(env: Line, splice: dict[str, Any], fits: bool) -> None:
    recipe = parse({"name": "r", "model": {"path": "m"}, "splice": splice})
    if fits:
        check_models(recipe, env, [])
    else:
        with pytest.raises(ConfigError, match="a model of role judge grades episodes"):
            check_models(recipe, env, [])


class Judge:
    """Says `words`, after it could not be reached a number of times."""

    def __init__(self, words: str = "0.25", *, away: int = 0) -> None:
        self.words = words
        self.away = away
        self.questions: list[Question] = []

    async def __call__(self, question: Question, *, seed: int, session: str) -> Answer:
        self.questions.append(question)
        if self.away:
            self.away -= 1
            raise ModelUnavailable("the judge is out")
        return answer(self.words, role=question.role, seed=seed)


def answer(text: str, *, role: str = "judge", seed: int = 0) -> Answer:
    return Answer(
        role=role,
        model="m",
        prompt_hash="p",
        seed=seed,
        text=text,
        finish_reason="stop",
        prompt_tokens=3,
        completion_tokens=1,
    )


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Store:
    return Store(tmp_path / "store.duckdb")


async def run(env: Environment, *rounds: Sequence[str], judge: Judge | None = None, max_steps: int = 4) -> Trajectory:
    options = {} if judge is None else {"helper": judge}
    return await roll_out_episode(
        instance(1),
        env,
        Script(*rounds),
        max_steps=max_steps,
        sampling=SAMPLING,
        seed=3,
        **options,  # type: ignore[arg-type]
    )


async def test_a_rule_decides_without_a_model_and_a_model_where_there_is_none() -> None:
    judge = Judge("0.75")
    goal_trajectory, by_rule = await grade_episode(Exam(), await run(Exam(), ["right"]), judge, seed=1)
    assert by_rule is not None
    assert (by_rule.answer, by_rule.grade, goal_trajectory.reward, judge.questions) == (
        None,
        Grade(reward=1.0, success=True),
        1.0,
        [],
    )

    trajectory = await run(Exam(), ["right"], ["stop"])
    graded_trajectory, by_model = await grade_episode(Exam(), trajectory, judge, seed=1)
    assert by_model is not None
    assert by_model.before.reward == pytest.approx(1 / 3)
    assert not by_model.before.success
    assert (graded_trajectory.reward, graded_trajectory.success, graded_trajectory.stop) == (
        0.75,
        True,
        StopReason.SUCCESS,
    )
    assert (graded_trajectory.steps[-1].reward, graded_trajectory.steps[-1].success) == (0.75, True)
    assert graded_trajectory.steps[:-1] == trajectory.steps[:-1]
    assert [question.messages[0].text for question in judge.questions] == ["How good is: right stop?"]
    assert judge.questions[0].sampling.temperature == 0.0


async def test_what_has_no_end_to_grade_keeps_its_reward() -> None:
    judge = Judge()
    fall = await run(Exam(), ["jump"])
    episode = await run(Exam(), ["look"])
    cut = [replace(episode, stop=stop) for stop in sorted(OUT_OF_ROOM)]
    for trajectory in (fall, *cut, replace(episode, steps=())):
        assert await grade_episode(Exam(), trajectory, judge, seed=1) == (trajectory, None)
    plain = await run(Line(), ["look"])
    assert await grade_episode(Line(), plain, judge, seed=1) == (plain, None)
    assert judge.questions == []
    limit, grading = await grade_episode(Exam(), await run(Exam(), ["look"]), judge, seed=1)
    assert grading is not None
    assert (limit.stop, limit.reward, limit.success) == (StopReason.STEP_LIMIT, 0.25, False)


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ("well done", ModelFault, "no grade can be read from 'well done'"),
        ("1.5", IllTypedAnswer, r"the reward is 1.5; a grader scales its rewards to \[0, 1\]"),
        ("nan", IllTypedAnswer, "the reward is nan"),
    ],
)
async def test_no_fault_becomes_a_reward(words: str, kind: type[Exception], said: str) -> None:
    trajectory = await run(Exam(), ["stop"])
    with pytest.raises(kind, match=said):
        await grade_episode(Exam(), trajectory, Judge(words), seed=1)
    with pytest.raises(ConfigError, match="asks a model of role judge"):
        await play([], Policy(["stop"]), helper=None)


LENIENT = ErrorsConfig(budget=1.0, retries=1)


async def play(
    kept: list[EpisodeResult],
    sample: Policy,
    *,
    helper: Judge | None,
    ungraded: dict[str, EpisodeResult] | None = None,
    errors: ErrorsConfig = LENIENT,
) -> tuple[dict[str, EpisodeResult], list[UnitError]]:
    unit_errors: list[UnitError] = []
    environments = EnvironmentPool(lambda _: Exam())
    player = Player(
        environments=environments,
        sample=sample,
        sampling=SAMPLING,
        max_steps=4,
        helper=helper or no_helper,
        ungraded=ungraded or {},
    )
    try:
        results = await play_all(
            PLANS, player, concurrency=2, errors=errors, on_error=unit_errors.append, on_ungraded=kept.append
        )
    finally:
        environments.close()
    return results, unit_errors


PLANS = episode_plans([instance(i) for i in range(3)], episodes=1, seed=7)


async def test_a_judge_that_comes_back_is_asked_again_and_nothing_is_played_twice() -> None:
    whole, none = await play([], Policy(["look", "stop"]), helper=Judge())
    model, judge = Policy(["look", "stop"]), Judge(away=2)
    ungraded_results: list[EpisodeResult] = []
    results, errors = await play(ungraded_results, model, helper=judge)
    assert results.keys() == whole.keys()
    assert {k: r.trajectory for k, r in results.items()} == {k: r.trajectory for k, r in whole.items()}
    assert (none, ungraded_results) == ([], [])
    assert [(e.kind, e.phase, e.is_final) for e in errors] == [("ModelUnavailable", "grade", False)] * 2
    assert len(model.requests) == sum(len(r.replies) for r in results.values())


@pytest.mark.slow
async def test_an_episode_that_cannot_be_graded_waits_and_only_its_grade_is_asked_for(store: Store) -> None:
    ungraded_results: list[EpisodeResult] = []
    results, errors = await play(ungraded_results, Policy(["look", "stop"]), helper=Judge(away=99))
    assert results == {}
    assert {e.phase for e in errors} == {"grade"}
    assert [result.plan.key for result in ungraded_results] == [plan.key for plan in PLANS]
    for result in ungraded_results:
        key = ungraded_id(result.plan.key)
        store.write(trajectory_rows(key, result.trajectory, source="ungraded", draws=draws_of(result)))

    ungraded_episodes = load_ungraded(store, {ungraded_id(plan.key): plan for plan in PLANS})
    model = Policy()
    second_results, errors = await play([], model, helper=Judge(), ungraded=ungraded_episodes)
    assert (model.requests, errors) == ([], [])
    whole, _ = await play([], Policy(["look", "stop"]), helper=Judge())
    assert {k: r.trajectory for k, r in second_results.items()} == {k: r.trajectory for k, r in whole.items()}
    assert {k: draws_of(r) for k, r in second_results.items()} == {k: draws_of(r) for k, r in whole.items()}
    assert [r.invalid_actions for r in second_results.values()] == [r.invalid_actions for r in whole.values()]


async def test_what_was_played_is_kept_also_when_the_stage_stops() -> None:
    ungraded_results: list[EpisodeResult] = []
    with pytest.raises(ErrorBudgetSpent):
        await play(
            ungraded_results, Policy(["stop"]), helper=Judge(away=99), errors=ErrorsConfig(budget=0.0, retries=0)
        )
    assert ungraded_results


@pytest.mark.slow
async def test_a_grade_is_stored_with_its_words(store: Store) -> None:
    trajectory = await run(Exam(), ["right"], ["stop"])
    graded_trajectory, grading = await grade_episode(Exam(), trajectory, Judge("0.5"), seed=1)
    store.write(trajectory_rows("t", graded_trajectory, source="rollout", grading=grading))
    assert load_trajectories(store, ["t"])["t"] == graded_trajectory
    rows = store.query(
        "select t.reward, t.success, g.given_by, g.environment_reward, a.role, a.model, a.purpose, a.text "
        "from trajectory t join grade g on g.owner_id = t.trajectory_id "
        "join answer a using (kind, owner_id, position)"
    )
    assert rows.values.tolist() == [[0.5, False, "model", pytest.approx(1 / 3), "judge", "m", "grade", "0.5"]]
    assert store.query("select * from v_contradictions").empty
    assert not set(store.query("select child from v_orphans")["child"]) & {"grade", "answer", "tool_call"}


def store_tree(store: Store, growing: Growing) -> Tree:
    root = Tree(
        instance=instance(1),
        first_observation="The goal is 3 to the right.",
        nodes=(Node(index=0, parent=-1, depth=0, step=None),),
        dives_done=0,
        seed=1,
    )
    head = TreeHead(
        tree_id="t",
        iteration_id="i",
        checkpoint_id="c",
        config={},
        instance=root.instance,
        first_observation=root.first_observation,
        seed=1,
    )
    store.write(rows_of_tree(head, root))
    for expansion in growing.expansions:
        store.write(expansion_rows(head, expansion))
    return load_trees(store, ["t"])["t"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mcts", "rollouts"])
async def test_the_leaves_of_a_search_have_the_graders_rewards(store: Store, method: str) -> None:
    config = SearchConfig(dives=3, width=2, depth=3, method=method)  # type: ignore[arg-type]
    judge, growing = Judge("0.25"), Growing()
    tree = await grow(
        instance(1), Exam(), Policy(["right", "stop", "look"]), config, seed=1, helper=judge, on_expansion=growing
    )
    assert judge.questions
    for path in leaf_paths(tree, "t"):
        is_success = path.trajectory.stop is StopReason.SUCCESS
        assert path.trajectory.reward == (1.0 if is_success else 0.25)
    assert store_tree(store, growing) == tree
    by = dict(store.query("select given_by, count(*) from grade group by all").values.tolist())
    assert sum(by.values()) == len(leaf_paths(tree, "t"))
    assert by["model"] == store.query("select count(*) as n from answer where purpose = 'grade'")["n"][0]
    assert store.query("select * from v_contradictions").empty


class Library(Line):
    """A line on which looking asks a summariser what there is to see, twice, with a tool each."""

    def step(self, action: str) -> Transition:
        self._open = 2 if action == "look" else 0
        self._calls: tuple[ToolCall, ...] = ()
        transition = super().step(action)
        self._seen = transition.observation
        return self._ask(transition)

    def answer(self, reply: str) -> Transition:
        self._open -= 1
        self._seen += f" {reply}"
        call = ToolCall(
            tool="search",
            provider="wiki",
            parameters={"q": "where", "top": 2},
            key="where",
            status="ok" if self._open else "empty",
            milliseconds=1.5,
            cached=not self._open,
            output=f"page {reply}",
        )
        self._calls = (*self._calls, call)
        return self._ask(Transition(self._seen, 0.0, False, False, {"success": False, "valid": True}))

    def _ask(self, transition: Transition) -> Transition:
        question = Question(role="summariser", messages=(Message(role="user", text=self._seen),))
        more = {"question": question} if self._open else {"tool_calls": self._calls}
        return transition._replace(info={**transition.info, **more})


async def test_a_splice_goes_on_from_steps_with_the_answers_that_were_recorded_with_them() -> None:
    bad = await run(Library(), ["look"], ["left"], ["left"], judge=Judge("a lamp"), max_steps=3)
    good = await run(Library(), ["right"], ["right"])
    pair = PathPair(
        good=TreePath(tree_id="t", nodes=(1, 2), trajectory=good),
        bad=TreePath(tree_id="t", nodes=(3, 4, 5), trajectory=bad),
        split=0,
    )
    config = SpliceConfig(mode="continued", action="left")
    critique = Critique(verdicts=(), first_error=1)
    prefix = play_prefix(pair, critique, Library(), config, seed=0)
    assert isinstance(prefix, tuple)
    assert prefix[:2] == bad.steps[:2]
    assert [a.text for a in prefix[0].answers] == ["a lamp", "a lamp"]
    with pytest.raises(ConfigError, match="line asks a model in its steps, but no model can be asked here"):
        play_prefix(pair, critique, Library(), replace(config, action="look"), seed=0)


@pytest.mark.parametrize("mode", ["verified", "continued", "blind"])
def test_splices_are_not_verified_where_steps_ask_models(mode: str) -> None:
    recipe = parse({"name": "r", "model": {"path": "m"}, "splice": {"mode": mode}})
    silent = type("Silent", (Library,), {"asks_in_steps": False})()
    check_models(recipe, silent, [])
    if mode == "verified":
        with pytest.raises(ConfigError, match=r"^splice.mode: steps of line ask a model, and none is asked when"):
            check_models(recipe, Library(), [])
    else:
        check_models(recipe, Library(), [])


def test_worlds_are_told_apart_by_what_they_have() -> None:
    assert Exam().grader is not None
    assert Library().has(Environment.answer)
    assert Line().grader is None
    assert not Line().has(Environment.answer)


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_step_asks_a_model_and_goes_on_with_its_answer(store: Store, blocking: bool) -> None:
    judge = Judge("a lamp")
    trajectory = await run(Library(blocking=blocking), ["look"], ["right"], judge=judge)
    look = trajectory.steps[0]
    assert look.observation == "You are at 0. a lamp a lamp"
    assert [a.text for a in look.answers] == ["a lamp", "a lamp"]
    assert len({a.seed for a in look.answers}) == 2
    assert [q.role for q in judge.questions] == ["summariser"] * 2
    assert [c.status for c in look.tool_calls] == ["ok", "empty"]
    assert trajectory.success

    store.write(trajectory_rows("t", trajectory, source="rollout"))
    assert load_trajectories(store, ["t"])["t"] == trajectory
    rows = store.query(
        "select position, number, tool, provider, parameters->>'$.q' as q, key, status, milliseconds, cached, "
        "strlen(output) from tool_call order by number"
    )
    assert rows.values.tolist() == [
        [0, 0, "search", "wiki", "where", "where", "ok", 1.5, False, 11],
        [0, 1, "search", "wiki", "where", "where", "empty", 1.5, True, 11],
    ]
    # A replay takes the recorded answers, and asks nobody.
    env = Library()
    assert restore_state(env, instance(1), trajectory.steps[:2], first_observation=trajectory.first_observation)
    assert env.snapshot() == (3, 1)
    env.reset(instance(1))
    with pytest.raises(ConfigError, match="line asks a model in its steps, but no model can be asked here"):
        act(env, "Action: look")


@pytest.mark.slow
@pytest.mark.parametrize("can_snapshot", [True, False])
async def test_a_search_asks_in_its_steps_and_resumes_from_what_is_stored(store: Store, can_snapshot: bool) -> None:
    config = SearchConfig(dives=3, width=2, depth=3)

    async def search(tree: Tree | None = None, growing: Growing | None = None, judge: Judge | None = None) -> Tree:
        return await grow(
            instance(1),
            Library(can_snapshot=can_snapshot),
            Policy(["look", "right"]),
            config,
            seed=1,
            tree=tree,
            helper=judge or Judge("a lamp"),
            on_expansion=growing,
        )

    growing = Growing()
    whole = await search(growing=growing)
    assert any(node.step.answers for node in whole.nodes if node.step)
    half = Growing()
    half.expansions = growing.expansions[:2]
    judge = Judge("a lamp")
    assert replace(await search(store_tree(store, half), judge=judge), dives_done=whole.dives_done) == whole
    later = sum(len(node.step.answers) for e in growing.expansions[2:] for node in e.created if node.step)
    assert len(judge.questions) == later


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"tool_calls": "none"}, "they must be a sequence of types.ToolCall"),
        ({"tool_calls": [ToolCall(tool=7)]}, "tool is 7; it must be a text"),  # type: ignore[arg-type]
        ({"tool_calls": [ToolCall(tool="t", milliseconds=float("inf"))]}, "milliseconds is inf"),
        ({"tool_calls": [ToolCall(tool="t", parameters={"x": float("nan")})]}, "not JSON"),
        ({"tool_calls": [ToolCall(tool="t", parameters={"x": object()})]}, "not JSON"),
        ({"tool_calls": [ToolCall(tool="t", output="\ud800")]}, "half a surrogate pair"),
        ({"question": "what?"}, "it must be a types.Question"),
        ({"question": Question(role="judge", messages=())}, "asks a model in its steps"),
    ],
)
def test_ill_typed_calls_and_questions_are_told(info: dict[str, object], said: str) -> None:
    class Odd(Line):
        def step(self, action: str) -> Transition:
            transition = super().step(action)
            return transition._replace(info={**transition.info, **info})

    env = Odd()
    env.reset(instance())
    with pytest.raises((IllTypedAnswer, ConfigError), match=said):
        act(env, "Action: look")


async def test_a_question_to_a_world_that_takes_no_answer_is_told() -> None:
    class Mute(Line):
        def step(self, action: str) -> Transition:
            transition = super().step(action)
            question = Question(role="judge", messages=())
            return transition._replace(info={**transition.info, "question": question})

    with pytest.raises(IllTypedAnswer, match="an environment that asks needs a method answer"):
        await run(Mute(), ["look"], judge=Judge())


class Clerk(Door):
    """A door behind which a model says what there is; whether it was opened well, a grader says."""

    grader = Examiner()

    def step(self, action: str) -> Transition:
        self._done = super().step(action)._replace(reward=0.0, info={"success": False})
        question = Question(role="summariser", messages=(Message(role="user", text=self._done.observation),))
        return Transition("", 0.0, False, False, {"success": False, "question": question})

    def answer(self, reply: str) -> Transition:
        return self._done._replace(observation=reply)


def test_the_contract_holds_for_worlds_that_ask_and_are_graded() -> None:
    assert contract.check(lambda: Clerk(knows=True)) == ()
