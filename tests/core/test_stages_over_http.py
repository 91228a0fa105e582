"""The stages of a run with the world behind a server that breaks now and then: the trees of the
world in process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from asked import run_id_of
from door import Door
from served import answer
from worlds import World, served_world

from agentr_core.environment import Environment
from agentr_core.environments.agentgym import worlds
from agentr_core.environments.agentgym.server import number_instances
from agentr_core.environments.agentgym.wire import WIRE_FORMATS
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import collect, finished_trees
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.stages.evaluate import evaluate
from agentr_core.store.database import Store
from agentr_core.types import Instance, Tree


class RemoteDoor(worlds.TextCraft):
    """The door in the contract of TextCraft, under the name that it has here."""

    name = Door.name
    instruction = Door.instruction
    step_limit = Door.step_limit

    def parse(self, reply: str) -> str:
        return Door().parse(reply)

    def depth(self, instance: Instance) -> int | None:
        return Door().depth(instance)


def workplace(root: Path, model_dir: Path, make: Callable[[], Environment]) -> RunContext:
    recipe = parse(
        {
            "name": "door",
            "environment": {"name": "door"},
            "model": {"path": str(model_dir)},
            "search": {"dives": 3, "width": 3, "depth": 5, "max_new_tokens": 8},
            "instances": {"train_limit": 0},
            "evaluation": {"max_steps": 5, "revision_test": {"enabled": False}},
            "errors": {"budget": 0},
            "scale": {"concurrency": 3},
        }
    )
    return RunContext(
        recipe=recipe,
        method=method_of(recipe),
        run_id=run_id_of(recipe),
        root=root,
        store=Store(root / "store.duckdb"),
        make_environment=lambda _: make(),
        load_model=lambda role, path: ScriptedModel(lambda _, seed, number: f"word {fingerprint(seed, number)}"),
        progress=lambda done, total, note: None,
    )


def without_validity(tree: Tree) -> Tree:
    """Return a tree without what no server of AgentGym's tells: whether an action was taken."""
    nodes = (replace(node, step=node.step and replace(node.step, valid=None)) for node in tree.nodes)
    return replace(tree, nodes=tuple(nodes))


async def collect_trees(ctx: RunContext) -> dict[str, Tree]:
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    await collect(ctx, 1)
    return finished_trees(ctx, 1)


@pytest.mark.slow
async def test_collection_from_a_broken_server_gives_the_trees_of_the_world(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    local_trees = await collect_trees(workplace(tmp_path / "here", tiny_model_dir, Door))

    with served_world(Door, WIRE_FORMATS["textcraft"], number_instances(Door(), ("train", "test"))) as world:
        world.faults |= {("/step", number): answer(500, b"") for number in range(9, 5000, 40)}
        ctx = workplace(tmp_path / "there", tiny_model_dir, remote(world))
        served_trees = await collect_trees(ctx)
        await evaluate(ctx, 0)

        assert served_trees == {tree: without_validity(grown) for tree, grown in local_trees.items()}
        assert len(served_trees) == 6
        assert len(world.bodies("/step")) > 40, "no fault was met in the middle of a tree"
        assert ctx.store.query("select count(*) n from event")["n"][0] == 0
        assert ctx.store.query("select count(*) n from episode")["n"][0] == 6
        assert world.open_ids() == []


def remote(world: World) -> Callable[[], Environment]:
    """Return a maker of clients; both splits of the door begin at 0, so that it is served by
    place.
    """
    return lambda: RemoteDoor(url=world.url, train="0-5", test="6-11", retries=10)
