"""Several worlds in one run: each instance is played, judged, spliced, trained and scored in its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asked import run_id_of
from door import Door

from agentr_core.errors import ConfigError, DataFault, EnvironmentFault, ErrorBudgetSpent
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import collect, instances_by_tree_id
from agentr_core.methods.agent_r.critique import JUDGE_INSTRUCTION, critique
from agentr_core.methods.agent_r.splice import splice_pairs
from agentr_core.methods.eto.preferences import explore, prefer
from agentr_core.methods.faults import load, parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.environments import TEST
from agentr_core.recipes.recipe import identifying_data, resolved
from agentr_core.reports.html import render_html
from agentr_core.reports.markdown import render_markdown
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.instances import chosen_instances
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.samples.dataset import balance_shares
from agentr_core.stages.dataset import dataset
from agentr_core.stages.evaluate import evaluate, evaluation_id
from agentr_core.stages.report import Scoreboard, build_report, recipe_differences, world_comparison
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.codec.trajectories import load_episodes
from agentr_core.store.database import Store
from agentr_core.types import Instance, Message, Transition

RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"
TINY = {"name": "worlds", "model": {"path": "some/model"}}
WORLDS: dict[str, Any] = {
    "door": {"instances": {"train_limit": 0}},
    "gate": {
        "instances": {"train_limit": 4, "test_limit": 3},
        "search": {"depth": 2},
        "evaluation": {"max_steps": 1},
    },
}
EXPLORED: dict[str, Any] = {"door": {}, "gate": {"explore": {"max_steps": 1}}}


class Gate(Door):
    """The door again, as another world."""

    name = "gate"
    instruction = "You stand before a gate. Say the word."

    def instances(self, split: str) -> Sequence[Instance]:
        return [replace(instance, environment="gate") for instance in super().instances(split)]

    def reset(self, instance: Instance) -> str:
        return super().reset(instance).replace("Door", "Gate")


class RustyGate(Gate):
    """A gate that nobody can even try."""

    def step(self, action: str) -> Transition:
        raise EnvironmentFault("the gate is rusted")


def speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
    if JUDGE_INSTRUCTION in messages[-1].text:
        return "Reason: so it is.\nJudgement: Bad"
    return f"word {fingerprint(seed, number)}"


@pytest.fixture
def site(tmp_path: Path, tiny_model_dir: Path, open_store: Callable[[Path], Store]) -> Callable[..., RunContext]:
    """Return a maker of workplaces on one store, with a recipe of the doors and gates."""

    def make(*overrides: str, worlds: Any = None, gate: type[Door] = Gate, method: str = "agent-r") -> RunContext:
        sections: dict[str, Any] = {"search": {"dives": 3, "width": 3, "depth": 5, "max_new_tokens": 8}}
        if method == "eto":
            worlds = EXPLORED
            sections = {"eto": {"phases": ["dpo"], "explore": {"samples": 3}, "preferences": {"against": "own"}}}
        recipe = parse(
            {
                "name": "worlds",
                "method": method,
                "environments": worlds or WORLDS,
                "model": {"path": str(tiny_model_dir)},
                "data": {"max_length": 4096},
                "evaluation": {"max_steps": 5, "revision_test": {"cuts": 2, "max_steps": 5}},
                "errors": {"budget": 0.4},
                **sections,
            },
            overrides,
        )
        doors: dict[str, type[Door]] = {"door": Door, "gate": gate}
        return RunContext(
            recipe=recipe,
            method=method_of(recipe),
            run_id=run_id_of(recipe),
            root=tmp_path / "runs",
            store=open_store(tmp_path / "runs" / "store.duckdb"),
            make_environment=lambda world: doors[world](),
            load_model=lambda role, path: ScriptedModel(speak),
            progress=lambda done, total, note: None,
        )

    return make


async def make_data(ctx: RunContext) -> dict[str, Any]:
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    await collect(ctx, 1)
    await critique(ctx, 1)
    await splice_pairs(ctx, 1)
    return await dataset(ctx, 1)


def test_a_recipe_in_a_world_is_a_recipe_of_that_world_alone() -> None:
    recipe = parse(
        {
            **TINY,
            "environments": {**WORLDS, "gymnasium-Rooms-v0": {"name": "gymnasium", "options": {"id": "Rooms-v0"}}},
            "search": {"depth": 9, "width": 3},
            "evaluation": {"sets": {"wide": {"split": "wide", "environment": "gate"}}},
        }
    )
    door, gate, rooms = recipe.worlds().values()

    assert (gate.search.depth, gate.search.width, gate.evaluation.max_steps) == (2, 3, 1)
    assert (door.search.depth, door.evaluation.max_steps) == (9, recipe.evaluation.max_steps)
    assert (gate.instances.train_limit, gate.environment.name) == (4, "gate")
    assert (list(gate.evaluation.sets), list(door.evaluation.sets)) == (["wide"], [])
    assert (rooms.environment.name, rooms.environment.options) == ("gymnasium", {"id": "Rooms-v0"})
    with pytest.raises(DataFault, match="the recipe has no world 'yard'; it has door, gate, gymnasium-Rooms-v0"):
        recipe.in_world("yard")


def test_a_recipe_of_several_worlds_is_stored_and_read_again() -> None:
    recipe = parse({**TINY, "environments": WORLDS})
    plain = resolved(recipe)

    assert "environment" not in plain
    assert "instances" not in plain
    assert parse(plain, stored=True) == recipe


def test_a_recipe_of_one_world_knows_nothing_of_several() -> None:
    recipe = parse({**TINY, "evaluation": {"sets": {"more": {"split": "more"}}}})

    assert recipe.in_world("anything") is recipe
    assert "environments" not in identifying_data(recipe)
    assert "environment" not in identifying_data(recipe)["evaluation"]["sets"]["more"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"environment": {"name": "textcraft"}}, "environment: does not go with environments"),
        ({"instances": {"train_limit": 3}}, "instances: does not go with environments"),
        ({"environments": {"door": {"share": 0.5}, "gate": {}}}, "give every world a share"),
        ({"environments": {"door": {"share": 0.5}, "gate": {"share": 0.6}}}, "of 1 in all"),
        ({"environments": {"door": {"instances": {"test": "train"}}}}, "environments.door.instances: train and test"),
        ({"environments": EXPLORED}, "environments.gate.explore: belongs to another method than agent-r"),
        ({"environments": {"door": {"search": {"width": 3}}}}, "environments.door.search.width: unknown field"),
        ({"evaluation": {"sets": {"more": {"split": "more"}}}}, "say whose split it is, one of door, gate"),
        ({"evaluation": {"sets": {"gate": {"split": "more"}}}}, "a world has this name"),
        ({"method": "eto", "eto": {"expert": {"file": "some.jsonl"}}}, "eto.expert.file: a file is of one world"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({**TINY, "environments": WORLDS, **more})


@pytest.mark.parametrize("world", ["webshop", "sciworld", "textcraft"])
def test_the_three_worlds_of_the_paper_are_as_in_their_own_recipes(world: str) -> None:
    together = load(RECIPES / "agent-r-three-worlds.yaml").in_world(world)
    alone = load(RECIPES / f"{world}-agent-r.yaml")

    assert replace(together, name=alone.name, description=alone.description) == alone


def test_a_set_of_a_recipe_of_one_world_names_none() -> None:
    with pytest.raises(ConfigError, match="belongs to a recipe of several environments"):
        parse({**TINY, "evaluation": {"sets": {"more": {"split": "more", "environment": "door"}}}})


@pytest.mark.slow
async def test_each_world_draws_the_instances_that_it_would_draw_alone(site: Callable[..., RunContext]) -> None:
    together = site()
    apart = [site(worlds={name: world}) for name, world in WORLDS.items()]

    instance_lists = [await chosen_instances(ctx, 1) for ctx in apart]
    assert await chosen_instances(together, 1) == instance_lists[0] + instance_lists[1]
    assert [len(instances) for instances in instance_lists] == [6, 4]


@pytest.mark.slow
async def test_every_stage_works_in_the_world_of_each_instance(site: Callable[..., RunContext]) -> None:
    ctx = site("splice.mode=verified")
    summary = await make_data(ctx)
    await evaluate(ctx, 0)

    samples = load_samples(ctx.store, iteration_id=ctx.iteration_id(1)).values()
    openings = {(s.kind, s.instance.environment, s.messages[0].text) for s in samples if s.instance}
    assert openings == {
        (kind, env.name, env.instruction) for kind in ("revision", "good") for env in (Door(), Gate())
    }, "a sample begins with the instruction of its own world"
    deepest = ctx.store.rows(
        "select i.environment, max(n.depth) from node n join tree using (tree_id) join instance i using (instance_id) "
        "group by 1 order by 1"
    )
    assert dict(deepest) == {"door": 4, "gate": 3}, "a node at the depth of the search has children, which have none"
    episodes = load_episodes(ctx.store, evaluation_id(ctx, 0, TEST))
    assert {e.instance.environment: 0 for e in episodes} == {"door": 0, "gate": 0}
    assert [len(e.trajectory.steps) for e in episodes if e.instance.environment == "gate"] == [1, 1, 1]
    assert max(len(e.trajectory.steps) for e in episodes) > 1
    assert (await make_data(ctx))["dataset_hash"] == summary["dataset_hash"]
    assert (await collect(ctx, 1))["new"] == 0


@pytest.mark.slow
async def test_a_report_tells_of_each_world_and_of_all(site: Callable[..., RunContext]) -> None:
    ctx = site()
    await make_data(ctx)
    await evaluate(ctx, 0)

    (score,) = Scoreboard(ctx).up_to(0)
    door, gate = score.worlds
    assert (door.name, door.instances, gate.name, gate.instances) == ("door", 6, "gate", 3)
    assert score.success.n == door.success.n + gate.success.n
    assert score.by_depth == (), "classes of one world are not those of another"
    assert [part.depth for part in door.by_depth] == [1, 2]
    assert gate.reward is not None
    report = build_report(ctx, 1)
    assert report.environment == "door, gate"
    trees = {world: counts["trees"] for world, counts in report.item_counts_by_world.items()}
    assert trees == {"door": 6, "gate": 4}
    page = render_markdown(report)
    assert "mean of worlds" in page
    assert "## Score by world" in page
    assert "## Training data by world" in page
    assert "## Success by depth in each world" in page
    assert "Training data by world" in render_html(report)


@pytest.mark.slow
async def test_the_error_budget_is_that_of_all_worlds_together(site: Callable[..., RunContext]) -> None:
    ctx = site("errors.budget=0.4", gate=RustyGate)
    await start_run(ctx)
    await begin_iteration(ctx, 1)

    assert (await collect(ctx, 1))["trees"] == 10, "4 of 10 trees may fail, and all 4 gates do"
    second_ctx = site("errors.budget=0.39", gate=RustyGate)
    await start_run(second_ctx)
    await begin_iteration(second_ctx, 1)
    with pytest.raises(ErrorBudgetSpent):
        await collect(second_ctx, 1)
    assert len(instances_by_tree_id(second_ctx, 1, await chosen_instances(second_ctx, 1))) == 10


@pytest.mark.slow
async def test_preferences_of_several_worlds_keep_to_their_own(site: Callable[..., RunContext]) -> None:
    ctx = site(method="eto")
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    await explore(ctx, 1)
    await prefer(ctx, 1)

    longest = ctx.store.rows(
        "select i.environment, max(t.num_steps) from trajectory t join instance i using (instance_id) "
        "where t.source = 'rollout' group by 1 order by 1"
    )
    assert dict(longest)["gate"] == 1
    assert dict(longest)["door"] > 1
    openings = ctx.store.rows(
        "select distinct i.environment, m.text from preference p join instance i using (instance_id) "
        "join message m on m.sample_id = p.chosen_sample_id where m.position = 0 order by 1"
    )
    assert dict(openings) == {"door": Door.instruction, "gate": Gate.instruction}


@pytest.mark.slow
async def test_a_dataset_holds_the_shares_of_its_worlds(site: Callable[..., RunContext]) -> None:
    shares = {"door": {**WORLDS["door"], "share": 0.25}, "gate": {**WORLDS["gate"], "share": 0.75}}
    ctx = site(worlds=shares)
    await make_data(ctx)

    rows = dict(
        ctx.store.rows(
            "select i.environment, count(*) from dataset_row join sample using (sample_id) "
            "join instance i using (instance_id) group by 1"
        )
    )
    assert rows["gate"] == pytest.approx(3 * rows["door"], abs=3)
    left_out = ctx.store.rows("select count(*) from rejection where reason = 'world-share'")
    assert left_out[0][0] > 0


def test_shares_are_held_by_the_most_units_that_there_are() -> None:
    units = ["a"] * 10 + ["b"] * 4

    items, rejected = balance_shares(units, {"a": 0.5, "b": 0.5}, world_of=str, subject_of=str, seed=1)
    assert (items.count("a"), items.count("b"), len(rejected)) == (4, 4, 6)
    assert balance_shares(units, {}, world_of=str, subject_of=str, seed=1).kept_items == tuple(units)
    some = balance_shares(units, {"a": 0.2, "b": 0.3, "c": 0.5}, world_of=str, subject_of=str, seed=1).kept_items
    assert (some.count("a"), some.count("b")) == (3, 4), "a world without units leaves its share to the others"


async def run_evaluation(ctx: RunContext) -> RunContext:
    await start_run(ctx)
    await evaluate(ctx, 0)
    return ctx


@pytest.mark.long
@pytest.mark.slow
async def test_one_model_stands_beside_a_model_for_each_world(site: Callable[..., RunContext]) -> None:
    off = "evaluation.revision_test.enabled=false"
    together = await run_evaluation(site(off))
    door, gate = [await run_evaluation(site(off, worlds={name: world})) for name, world in WORLDS.items()]

    single, apart = world_comparison(together, [door, gate])
    assert (single.mode, apart.mode) == ("one model", "a model a world")
    assert (single.success, single.reward) == (apart.success, apart.reward), "the same model on the same instances"
    assert set(single.success) == {"door", "gate"}
    assert recipe_differences(together, [door, gate]) == []
    other_ctx = await run_evaluation(
        site(off, "seed=3", "environments.door.instances.test_limit=2", worlds={"door": {}})
    )
    assert recipe_differences(together, [other_ctx]) == [f"run {other_ctx.run_id} also differs in instances, seed"]
    with pytest.raises(ConfigError, match="played other held-out instances of door"):
        world_comparison(together, [other_ctx])
    with pytest.raises(ConfigError, match="are both of door"):
        world_comparison(together, [door, other_ctx])
    with pytest.raises(ConfigError, match="has one world"):
        world_comparison(door, [gate])
