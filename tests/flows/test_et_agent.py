"""ET-Agent from its plan to its report, and a flywheel that is killed on the way."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from authors_files import FORMS, reinforced, web, write_forms, write_rows
from families import FAMILY, MATH, RIVER, answers_of, begun, cast
from turning import turn
from wheel import PATIENCE, all_rows, launched

from agentr_core.environments.reasoning.problems import load as load_questions
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.errors import ConfigError
from agentr_core.methods.et_agent.evolve import evolve
from agentr_core.methods.et_agent.selection import select_rft
from agentr_core.methods.faults import load
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.instances import held_out_by_set
from agentr_core.runtime.start import start_run
from agentr_core.stages.evaluate import evaluate
from agentr_core.system import data_path
from agentr_core.types import Message
from flows.commands.plan import describe
from flows.preflight.checks import check
from tasks.wiring import load_recipe, quiet_context, run_reference

pytestmark = pytest.mark.slow
RECIPE = """\
name: family
method: et-agent
workspace: {workspace}
iterations: 1
environment: {{name: door}}
model: {{path: {model}, device: cpu, dtype: float32, max_batch: 16, workers: 1}}
et_agent:
  phases: [rft]
  flywheel:
    fresh: 2
    rounds: 2
    policy: expand-all
    correct: [C0, C1]
    most_members: 12
    max_steps: 3
    max_new_tokens: 6
    reflector: {{max_new_tokens: 8}}
    editor: {{max_new_tokens: 8}}
training: {{learning_rate: 1.0e-3, bf16: false, num_threads: 1, num_train_epochs: [1]}}
evaluation: {{max_steps: 4, max_new_tokens: 6, revision_test: {{enabled: false}}}}
"""


def write(folder: Path, model: Path, more: str = "{}") -> Path:
    """Write the recipe into a folder; its workspace lies there, too."""
    file = folder / "family.yaml"
    recipe = yaml.safe_load(RECIPE.format(workspace=folder / "runs", model=model)) | yaml.safe_load(more)
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


@pytest.mark.usefixtures("door_installed")
def test_an_iteration_rft_runs_from_its_plan_to_its_report(tmp_path: Path, door_model: Path) -> None:
    file = write(tmp_path, door_model)
    text = describe(file, [])
    assert "a flywheel of 2 rounds (expand-all) on 6 questions" in text
    done = asyncio.run(turn(file))

    store = done.store
    assert store.query("select * from v_orphans").empty
    families = store.query("select members, rounds, ended_by from family")
    assert len(families) == 6
    assert (families["members"] <= 12).all()
    counts = store.query("select operator, count(*) n from v_families group by all").set_index("operator")["n"]
    assert counts["fresh"] == 12
    assert counts["C0"] > 0
    assert counts["I3"] > 0
    ((kind, samples),) = store.rows("select kind, count(*) from sample group by all")
    assert (kind, samples > 0) == ("good", True)
    assert store.rows("select count(*) from message where train and token_ids is null")[0][0] < samples * 4
    lineage = store.query(
        "select checkpoint_in, parent_id, dataset_id from iteration join checkpoint on checkpoint_out = checkpoint_id "
        "where iteration = 1"
    )
    assert lineage["parent_id"].tolist() == lineage["checkpoint_in"].tolist()
    assert not lineage["dataset_id"].isna().any()
    assert store.query("select max(iteration) as newest from v_evaluations")["newest"].tolist() == [1]
    page = done.report.read_text(encoding="utf-8")
    assert "The flywheel by operator" in page
    assert "C0 a fresh one beside a right one" in page


SEARCHES = ["environment.options.tools=[search]"]
OWN_FILES = """\
name: own-files
method: et-agent
iterations: 1
environment:
  name: reasoning
  options:
    top_k: 1
    search_api_key: k
    search_by_source: {dapo: {searched: web}, gpqa: {searched: web}}
model: {device: cpu, dtype: float32, max_batch: 64, workers: 1}
instances: {train_limit: 0}
et_agent: {phases: [rft], flywheel: {fresh: 2, rounds: 0, max_steps: 4, max_new_tokens: 80}}
training: {learning_rate: 1.0e-4, bf16: false, num_threads: 1, num_train_epochs: [1]}
evaluation: {max_steps: 4, max_new_tokens: 80, max_episode_seconds: 600, revision_test: {enabled: false}}
"""


def own_files(folder: Path, web_url: str) -> Path:
    """Write question files as the authors have them, and a recipe that trains on some of them and
    tests on one of each form.
    """
    problems = load_questions(("numbers",))["train"][:6]
    rows = [
        {"id": n, "question": problem.question, "answer": problem.golds[0]} for n, problem in enumerate(problems[:3])
    ]
    write_rows(folder, "train.json", [{**row, "source": "dapo"} for row in rows])
    write_rows(folder, "train.parquet", [reinforced(problem.question, problem.golds[0]) for problem in problems[3:]])
    recipe = yaml.safe_load(OWN_FILES) | {"workspace": f"{folder}/runs"}
    recipe["model"]["path"] = str(data_path("models", "reasoning-tiny"))
    recipe["environment"]["options"] |= {
        "questions": [
            {"path": f"{folder}/train.json", "split": "train"},
            f"{folder}/train.parquet",
            *write_forms(folder, "test"),
        ],
        "web_url": web_url,
        "cache_dir": f"{folder}/cache",
    }
    file = folder / "own.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def test_the_files_of_the_authors_are_planned_and_evaluated(tmp_path: Path) -> None:
    golds: dict[str, str] = {}

    def reply(messages: tuple[Message, ...], seed: int, number: int) -> str:
        if not messages[-1].spans:
            return "<think>?</think>\n<search>Ada</search>"
        return f"<think>.</think>\n<answer>\\boxed{{{golds[messages[-2].text.strip()]}}}</answer>"

    async def play(file: Path) -> RunContext:
        recipe = load_recipe(file, SEARCHES)
        ctx = quiet_context(run_reference(recipe), recipe)
        await start_run(ctx)
        with ctx.worlds() as worlds:
            for instance in held_out_by_set(ctx)["test"]:
                world = worlds.env_of(instance)
                assert isinstance(world, ReasoningWorld)
                golds[world.problem(instance).question.strip()] = world.problem(instance).golds[-1]
        ctx = replace(ctx, load_model=lambda role, path: ScriptedModel(reply))
        await evaluate(ctx, 0)
        return ctx

    with web() as (url, queries):
        file = own_files(tmp_path, url)
        assert f"each ends with {len(FORMS)} held-out episodes" in describe(file, SEARCHES)
        ctx = asyncio.run(play(file))
    assert ctx.store.rows("select reward, stop, count(*) from v_episodes group by all") == [(1, "success", len(FORMS))]
    calls = dict(ctx.store.rows("select provider, sum(calls) from v_tool_calls group by all"))
    assert calls == {"bm25": len(FORMS) - 1, "serper": 1}
    assert queries == ["ada"]


@pytest.mark.long
def test_the_files_of_the_authors_are_trained_on(tmp_path: Path) -> None:
    with web() as (url, _):
        done = asyncio.run(turn(own_files(tmp_path, url), "evaluation.max_episode_tokens=60"))
    stops = dict(done.store.rows("select stop, count(*) from v_episodes group by all"))
    assert sum(stops.values()) == 2 * len(FORMS)
    assert stops["token_limit"] > 0
    assert "token limit" in done.report.read_text(encoding="utf-8").lower()
    assert done.store.rows("select count(*) from family") == [(6,)]
    assert done.store.rows("select max(iteration) from v_evaluations") == [(1,)]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("et_agent.phases=[]", "et_agent.phases: name at least one of rft and rl"),
        ("et_agent.flywheel.correct=[C0,C0]", "et_agent.flywheel.correct: an operator is named twice"),
        ("et_agent.flywheel.temperature=0", "et_agent.flywheel.temperature: at 0 all fresh trajectories"),
        ("et_agent.flywheel.fresh=99", "et_agent.flywheel.most_members: 12 leaves no room for 99"),
        ("et_agent.flywheel.incorrect=[I9]", "et_agent.flywheel.incorrect.0"),
        ("data.use=good", "data.use: belongs to method agent-r"),
        (
            "models={reflector: {backend: openai, server: {model: wise}}}",
            "et_agent.flywheel.incorrect: I1 and I4 begin the reply of the reflector",
        ),
        ("method=agent-r", "et_agent: belongs to another method than agent-r"),
    ],
)
def test_a_wrong_recipe_is_told(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, tmp_path), [override])
    assert said in str(caught.value)


@pytest.mark.usefixtures("door_installed")
def test_thoughts_are_not_written_anew_where_steps_have_none(tmp_path: Path, door_model: Path) -> None:
    recipe = load(write(tmp_path, door_model), ["et_agent.flywheel.correct=[C2]"])
    with pytest.raises(ConfigError, match="steps of door have no thought apart from the action; leave it out"):
        check(recipe)


async def run_flywheel(root: Path, model: Path) -> RunContext:
    """Return a workplace with a flywheel and its selection done, whatever was there before."""
    ctx = await begun(root, model, cast(), FAMILY, problems=(MATH, RIVER))
    await evolve(ctx, 1)
    await select_rft(ctx, 1)
    return ctx


@pytest.mark.parametrize(
    "replies", [pytest.param(6, marks=pytest.mark.long), 10, pytest.param(15, marks=pytest.mark.long)]
)
async def test_killed_it_goes_on_from_what_is_stored(
    tmp_path: Path, tiny_model_dir: Path, replies: int, process_env: dict[str, str]
) -> None:
    calm = answers_of(await run_flywheel(tmp_path / "calm", tiny_model_dir))
    root, staff = tmp_path / "killed", cast()
    command = [sys.executable, "-m", "families", str(root), str(tiny_model_dir), str(replies)]
    with launched(command, env=process_env) as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == -9, err

    ctx = await begun(root, tiny_model_dir, staff, FAMILY, problems=(MATH, RIVER))
    rows = {row for row in all_rows(ctx.store) if row[0] in ("trajectory", "step", "edit", "derivation")}
    num_edits = len(ctx.store.rows("select 1 from edit"))
    assert rows
    await evolve(ctx, 1)
    await select_rft(ctx, 1)
    assert rows <= all_rows(ctx.store), "what was stored stays as it was"
    assert answers_of(ctx) == calm
    num_requests = len(staff.requests("editor")) + len(staff.requests("reflector"))
    assert num_requests == len(calm["edit"]) - num_edits, "nobody was asked twice"
