"""Stages of ET-Agent's curriculum from their plan to their report, and killed on the way: equal
rows and equal weights.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import curricula
import groups
import pytest
from turning import turn
from wheel import PATIENCE, all_rows, kill_group, launched, wait_for

from agentr_core.errors import ConfigError
from agentr_core.methods.et_agent.evaluate import evaluate
from agentr_core.methods.faults import load
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Store
from flows.commands.plan import describe

pytestmark = pytest.mark.slow
_CHOICE = "select * exclude (iteration_id, created_at) from selection order by instance_id"
BRANCHING = {"branching": {"initial_rollouts": 2, "branch_probability": 0.9}}
_GROUPS = (
    "select r.step, r.number, r.episode, r.advantage, r.shaped, t.reward, s.position, s.reply, s.observation "
    "from rl_rollout r join trajectory t using (trajectory_id) join step s using (trajectory_id) order by all"
)


@pytest.fixture(scope="module")
def model(save_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return curricula.save_model(tmp_path_factory.mktemp("models") / "phrases", save_tiny_model)


def store_of(file: Path) -> Store:
    return Store(file.parent / "runs" / "store.duckdb")


def test_two_stages_run_from_their_plan_to_their_report(tmp_path: Path, model: Path) -> None:
    models = {"judge": {"path": str(model), "device": "cpu", "dtype": "float32", "max_batch": 32, "workers": 1}}
    file = curricula.write(tmp_path, model, et_agent={"behaviour": {"votes": 2, "nudge": True}}, models=models)
    assert "an iteration rl plays 8 questions 4 times each, chooses at most 4 of them" in describe(file, [])
    done = asyncio.run(turn(file))

    store = done.store
    selection = store.query("select * from v_selection order by iteration, instance_id")
    assert selection.groupby("iteration")["instance_id"].count().tolist() == [8, 8]
    assert set(selection["reason"]) >= {"chosen", "alike"}
    assert (selection[selection["selected"]]["s_corr"] > 0).all(), "only questions with right and wrong answers"
    strangers = (
        "select g.* from rl_group g anti join selection s "
        "on s.iteration_id = g.iteration_id and s.instance_id = g.instance_id and s.selected"
    )
    assert store.query(strangers).empty, "groups are of selected questions"
    assert store.query("select count(*) n from rl_rollout where shaped is null")["n"].tolist() == [0]
    assert set(store.query("select reward from rl_rollout join trajectory using (trajectory_id)")["reward"]) <= {0, 1}
    lines = store.query("select parent_id, config->>'$.reward.sigma_calls' sigma from checkpoint order by sigma")
    assert lines["sigma"].dropna().tolist() == ["0.2", "0.5"]
    assert store.query("select * from v_orphans").empty
    _measures(store)
    asyncio.run(_votes_are_asked_again_where_they_are_missing(file))
    page = done.report.read_text(encoding="utf-8")
    for title in (
        "Selected questions",
        "Reinforcement learning by step",
        "Behaviour",
        "Calls of tools",
        "chosen questions",
    ):
        assert title in page
    assert "this iteration coloured, the base dashed" in page, "the radar"
    assert page.count("P above base, points") == 1, "no row without a value in the table of sources"


def _measures(store: Store) -> None:
    """Fail unless every evaluation has rows of behaviour, of each source, too."""
    metrics = store.query(
        "select i.iteration, m.name, m.value, m.low, m.high, m.n from metric m join evaluation e "
        "on m.scope = 'evaluation' and m.scope_id = e.evaluation_id join iteration i using (iteration_id)"
    )
    for iteration in range(3):
        names = set(metrics[metrics["iteration"] == iteration]["name"])
        of_behaviour = {"performance", "efficiency", "tool_productivity", "reasoning_length", "exact_match", "f1"}
        assert {f"{of}{name}" for of in ("", "source-rivers-0/", "source-rivers-1/") for name in of_behaviour} <= names
        assert "nudged_right" in names
        assert "conciseness" not in names, "this judge says neither yes nor no"
    votes = "select number, count(*) n from answer where purpose = 'conciseness' group by number order by number"
    assert store.query(votes)["n"].tolist() == [18, 18]
    parts = store.query("select distinct part from timing where stage = 'evaluate conciseness'")["part"]
    assert {"generate", "store"} <= set(parts)
    episodes = store.query(
        "select v.name, t.success from episode e join evaluation v using (evaluation_id) "
        "join trajectory t using (trajectory_id)"
    )
    failures = episodes[(episodes["name"] == "test") & ~episodes["success"]]
    assert len(episodes[episodes["name"] == "nudged"]) == len(failures) > 0
    whole = metrics[metrics["name"] == "performance"]
    assert (whole["n"] == 6).all()
    assert (whole["low"] <= whole["value"]).all()


async def _votes_are_asked_again_where_they_are_missing(file: Path) -> None:
    """Fail unless an evaluation that was ended among its votes goes on to the same rows."""
    store, sql = store_of(file), "select * from answer order by all"
    before = store.query(sql)
    with store.transaction() as con:
        con.execute(
            "delete from assessment where purpose = 'conciseness' and number = 1 and trajectory_id in "
            "(select trajectory_id from trajectory join iteration using (iteration_id) where iteration = 0)"
        )
    assert len(store.query(sql)) == len(before) - 6
    await evaluate(await groups.begun(file), 0)
    assert store.query(sql).equals(before)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The recipe of a stage that nobody disturbed."""
    file = curricula.write(tmp_path_factory.mktemp("calm"), model, grpo=BRANCHING)
    asyncio.run(curricula.stage(file))
    return file


@pytest.mark.long
def test_branches_begin_with_the_steps_of_their_parent(calm: Path) -> None:
    store = store_of(calm)
    branches = store.rows(
        "select child_id, parent_id, operator, position from derivation join rl_rollout on trajectory_id = child_id"
    )
    assert branches
    for child_id, parent_id, operator, position in branches:
        child, parent = load_trajectories(store, [child_id, parent_id]).values()
        assert operator == "branch"
        assert child.steps[:position] == parent.steps[:position]
        assert all(step.logprobs for step in child.steps), "so that what it was given is trained, too"
    sizes = store.query("select count(*) n from rl_rollout group by iteration_id, step, number")
    assert (sizes["n"] == 4).all()


def alike(file: Path, calm: Path) -> None:
    """Fail unless a run has the selection, the groups and the weights of the calm one."""
    for question in (_CHOICE, _GROUPS, "select weights_sha256 from checkpoint order by all"):
        assert store_of(file).query(question).equals(store_of(calm).query(question)), question


def has(file: Path, question: str) -> bool:
    store = store_of(file)
    return store.path.exists() and bool(store.query(f"select count(*) > 0 found from {question}")["found"][0])


@pytest.mark.parametrize(
    "moments",
    [
        ("trajectory where source = 'rollout'",),
        pytest.param(("trajectory where source = 'rollout'", "selection"), marks=pytest.mark.long),
    ],
    ids=["rollouts", "rollouts and selection"],
)
@pytest.mark.long
def test_killed_before_its_training_and_in_it_a_stage_ends_as_if_it_had_not_been(
    calm: Path, tmp_path: Path, model: Path, process_env: dict[str, str], moments: tuple[str, ...]
) -> None:
    file = curricula.write(tmp_path, model, grpo=BRANCHING)
    for moment in moments:
        with launched([sys.executable, "-m", "curricula", str(file)], env=process_env) as process:
            wait_for(process, partial(has, file, moment))
            kill_group(process)
    with launched([sys.executable, "-m", "curricula", str(file), "2"], env=process_env) as process:
        process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    rows = all_rows(store_of(file))
    asyncio.run(curricula.stage(file))

    assert rows <= all_rows(store_of(file)), "what was stored stays as it was"
    alike(file, calm)


@pytest.mark.long
def test_where_steps_are_dear_it_goes_through_the_same_stages(tmp_path: Path) -> None:
    """TextCraft has no tools: an episode costs its steps."""
    file = tmp_path / "textcraft.yaml"
    file.write_text(TEXTCRAFT.format(folder=tmp_path), encoding="utf-8")
    asyncio.run(curricula.stage(file))
    store = store_of(file)
    selection = store.query("select * from selection where selected")
    assert (selection["s_corr"] > 0).all()
    assert (selection["s_tool"] > 0).any(), "steps differ where nobody calls a tool"
    assert store.query("select count(*) n from tool_call")["n"].tolist() == [0]
    extremes = store.query(
        "select min(r.shaped) low, max(r.shaped) high, arg_min(r.shaped, t.num_steps) of_shortest, "
        "arg_max(r.shaped, t.num_steps) of_longest from rl_rollout r join trajectory t using (trajectory_id) "
        "where t.success and r.shaped > 0 group by r.step, r.number having min(t.num_steps) < max(t.num_steps)"
    )
    assert (extremes["of_shortest"] == extremes["high"]).all()
    assert (extremes["of_longest"] == extremes["low"]).all()
    assert store.query("select sum(trained_tokens) n from rl_step")["n"][0] > 0


TEXTCRAFT = """\
name: textcraft-curriculum
method: et-agent
workspace: {folder}/runs
iterations: 1
environment: {{name: textcraft}}
model: {{path: data/models/textcraft-tiny, device: cpu, dtype: float32, max_batch: 64, workers: 1}}
instances: {{train_limit: 14, test_limit: 4}}
et_agent:
  phases: [rl]
  curriculum: {{rollouts: 4, questions: 4, counts: steps, sigma_calls: [0.5], sigma_length: [0.0]}}
grpo: {{steps: 1, groups: 2, num_generations: 4, max_steps: 12, max_new_tokens: 72, repeats: 2}}
training: {{bf16: false, num_threads: 1}}
evaluation: {{revision_test: {{enabled: false}}}}
"""


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        ("et_agent", {"curriculum": {"sigma_calls": [0.1]}}, "sigma_calls: the recipe has 2 iterations rl and 1 num"),
        ("training", {"lora_r": 8, "use_dora": True}, "training.use_dora: group RL trains plain LoRA adapters"),
        ("et_agent", {"phases": ["rft"]}, "grpo: has no use without an iteration rl"),
        ("grpo", {"repeats": 1}, "grpo.repeats: 1 would end every episode"),
    ],
)
def test_a_wrong_recipe_is_told(tmp_path: Path, section: str, fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(curricula.write(tmp_path, tmp_path, **{section: fields}))
    assert said in str(error.value)
