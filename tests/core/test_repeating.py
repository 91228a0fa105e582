"""Worlds that do not repeat themselves to the letter: search, resume and evaluation go on, and the
store says so.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from toy import ACTIONS, Line, Policy, Script, instance

from agentr_core.environment import Repeatability, is_repetition
from agentr_core.episodes.rollout import EnvironmentPool, play_replies, restore_state
from agentr_core.episodes.units import UnitError
from agentr_core.errors import EnvironmentUnavailable, ReplayDiverged, ReplayDrifted, Transient
from agentr_core.evaluation.episodes import EpisodePlan, Player, play_all
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.collect import MAX_RESTARTS, TreeShard, TreeWork, latest_restart_ids, restarted_id
from agentr_core.methods.faults import parse
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.recipes.recipe import ErrorsConfig
from agentr_core.runtime.equipment import Checkpoint, Equipment
from agentr_core.search.grow import grow
from agentr_core.store.codec.trajectories import load_trees, unfinished_tree_ids
from agentr_core.store.database import Store, Writer
from agentr_core.types import Instance, Sampling, Transition


class ShuffledLine(Line):
    """A line that lists what is there in any order, as ScienceWorld's server does after a
    replay.
    """

    repeatability = Repeatability.UNORDERED

    def __init__(self) -> None:
        super().__init__(can_snapshot=False)

    def step(self, action: str) -> Transition:
        things = ["a mug", "an axe", "a jay"]
        random.shuffle(things)
        transition = super().step(action)
        return transition._replace(observation=f"{transition.observation}\nYou see: {', '.join(things)}.")


class Server:
    """What environments of one server share: the words that it begins every episode with."""

    def __init__(self) -> None:
        self.words = "one"
        self.steps = 0
        self.restart_at = -1


class Forgetful(Line):
    """A line on a server that begins with other words after a restart, as TextCraft's does with its
    hash seed.
    """

    repeatability = Repeatability.NEVER

    def __init__(self, server: Server) -> None:
        super().__init__(can_snapshot=False)
        self._server = server

    def reset(self, instance: Instance) -> str:
        return f"{super().reset(instance)} Today: {self._server.words}."

    def step(self, action: str) -> Transition:
        self._server.steps += 1
        if self._server.steps == self._server.restart_at:
            self._server.words += " more"
        return super().step(action)


class Exact(Forgetful):
    """The same, but promising that it repeats itself."""

    repeatability = Repeatability.EXACT


def test_what_is_promised_is_what_is_compared() -> None:
    assert Repeatability(Line().repeatability) is Repeatability.EXACT
    assert Repeatability(ShuffledLine().repeatability) is Repeatability.UNORDERED
    assert is_repetition("a, b", "a, b", Repeatability.EXACT)
    assert not is_repetition("a, b", "b, a", Repeatability.EXACT)
    assert is_repetition("You see:\n\ta mug\n\tan axe", "You see:\n\tan axe\n\ta mug", Repeatability.UNORDERED)
    assert not is_repetition("a, a, b", "a, b, b", Repeatability.UNORDERED)
    assert not is_repetition("Got 2 logs", "Got 3 logs", Repeatability.NEVER)


async def test_a_search_goes_back_to_states_that_are_equal_up_to_order() -> None:
    config = SearchConfig(dives=3, width=3, depth=6)
    tree = await grow(instance(2), ShuffledLine(), Policy(), config, seed=5)
    plain = await grow(instance(2), Line(can_snapshot=False), Policy(), config, seed=5)
    assert [(n.parent, n.step and n.step.action, n.stop) for n in tree.nodes] == [
        (n.parent, n.step and n.step.action, n.stop) for n in plain.nodes
    ]
    # What was sampled from is what is stored, in the order of that time.
    assert all(n.step is None or "You see: " in n.step.observation or n.stop for n in tree.nodes)


async def test_a_cut_episode_goes_on_up_to_order_and_what_is_lost_may_heal() -> None:
    outcomes = play_replies(ShuffledLine(), instance(3), ["Action: look", "Action: right"])[1]
    steps = tuple(outcome.step for outcome in outcomes)
    restore_state(ShuffledLine(), instance(3), steps)

    strict = ShuffledLine()
    strict.repeatability = Repeatability.EXACT
    elsewhere = (replace(steps[0], observation="You see: a jay, an axe, a mug.\nYou are at 0."), *steps[1:])
    with pytest.raises(ReplayDiverged) as exc_info:
        restore_state(strict, instance(3), elsewhere)
    assert not isinstance(exc_info.value, Transient)
    with pytest.raises(ReplayDrifted, match="line does not promise to repeat itself to the letter"):
        restore_state(ShuffledLine(), instance(3), steps[::-1])

    errors: list[UnitError] = []
    environments = EnvironmentPool(lambda _: ShuffledLine())
    plans = [EpisodePlan(instance=instance(3), seed=1, prefix=steps)]
    results = await play_all(
        plans,
        Player(environments=environments, sample=Script(["right"]), max_steps=9, sampling=Sampling()),
        errors=ErrorsConfig(budget=0.0),
        concurrency=1,
        on_error=errors.append,
    )
    assert [result.trajectory.success for result in results.values()] == [True]
    assert errors == []


async def collect_trees(folder: Path, server: Server, kind: type[Forgetful] = Forgetful, *, retries: int = 0) -> Store:
    """Grow what is missing of three trees, as a collection does, with no budget for errors."""
    recipe = parse(
        {
            "name": "forgetful",
            "environment": {"name": "door"},
            "model": {"path": "m"},
            "search": {"dives": 3, "width": 3, "depth": 5},
            "errors": {"budget": 0.0, "retries": retries},
        }
    )
    equipment = Equipment(
        recipe=recipe,
        run_id="run",
        make_environment=lambda _: kind(server),
        load_model=lambda role, path: ScriptedModel(
            lambda messages, seed, number: "Action: " + random.Random(derive_seed(seed, number)).choice(ACTIONS[:3])
        ),
        progress=lambda done, total, note: None,
    )
    store = Store(folder / "store.duckdb")
    instances = {f"tree {i}": instance(i) for i in range(2, 5)}
    ids = dict(zip(latest_restart_ids(store, list(instances)), instances.items(), strict=True))
    missing = unfinished_tree_ids(store, list(ids))
    begun = load_trees(store, missing)
    shard = TreeShard(
        iteration=1,
        checkpoint=Checkpoint(id="policy", path=folder, weights_sha256=""),
        trees=tuple(
            TreeWork(tree_id=key, first_id=ids[key][0], instance=ids[key][1], partial_tree=begun.get(key))
            for key in missing
        ),
        done=0,
        total=len(instances),
    )
    async with Writer(store) as writer:
        await shard.work(equipment, writer)
    return store


def finished_trees(store: Store) -> dict[str, str]:
    """Return the first observation of the trees that are finished, by id."""
    rows = store.query("select tree_id, first_observation from tree where finished order by 1").values.tolist()
    return dict(rows)


@pytest.mark.slow
async def test_a_restart_of_the_server_begins_trees_anew_without_costing_the_budget(tmp_path: Path) -> None:
    server = Server()
    server.restart_at = 40
    store = await collect_trees(tmp_path, server)

    trees = finished_trees(store)
    assert len(trees) == 3
    assert any("one more" in observation for observation in trees.values())
    events = store.query("select level, class, message from event").values.tolist()
    assert events
    assert {(level, kind) for level, kind, _ in events} == {("warning", "TreeBegunAnew")}
    assert all("is grown anew from its root, as " in message for _, _, message in events)
    tree_ids = [f"tree {i}" for i in range(2, 5)]
    assert set(latest_restart_ids(store, tree_ids)) == set(trees)
    nodes = store.query("select t.tree_id from node n join tree t using (tree_id) where not t.finished")
    assert len(nodes) > 0, "what there was of a tree stays"


@pytest.mark.slow
async def test_a_run_goes_on_after_a_restart_in_between(tmp_path: Path) -> None:
    server = Server()

    class Dying(Forgetful):
        def step(self, action: str) -> Transition:
            if self._server.words == "one" and self._server.steps > 30:
                raise EnvironmentUnavailable("the server is gone")
            return super().step(action)

    with pytest.raises(Exception, match="failed, and of"):
        await collect_trees(tmp_path, server, Dying)
    server.words = "two"
    store = await collect_trees(tmp_path, server, Dying)
    trees = finished_trees(store)
    assert len(trees) == 3
    await collect_trees(tmp_path, server, Dying)
    assert finished_trees(store) == trees

    # A world that promises more is believed: trees of an earlier process may be those of another
    # version of it, but what it does within one process is a fault.
    folder = tmp_path / "exact"
    folder.mkdir()
    server.words, server.steps, server.restart_at = "one", 0, 40
    with pytest.raises(Exception, match="the environment is not deterministic"):
        await collect_trees(folder, server, Exact)
    assert len(finished_trees(await collect_trees(folder, server, Exact))) == 3


def test_restarts_have_ids_of_their_own() -> None:
    ids = [restarted_id("tree", number) for number in range(MAX_RESTARTS + 1)]
    assert ids[0] == "tree"
    assert len(set(ids)) == len(ids)
