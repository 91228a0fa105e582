"""ScienceWorld on its real simulator: rules of the two settings, restored states, faults of Java,
misuse.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from toy import Script
from worlds import served_world

from agentr_core.environments.agentgym.wire import WIRE_FORMATS
from agentr_core.environments.agentgym.worlds import SciWorld as Client
from agentr_core.environments.contract import check
from agentr_core.environments.sciworld import simulator as sciworld_simulator
from agentr_core.environments.sciworld.simulator import JavaSettings, SharedSimulators, Simulator
from agentr_core.environments.sciworld.tasks import first_numbers
from agentr_core.environments.sciworld.world import UNKNOWN_ACTION_PREFIX, SciWorld
from agentr_core.episodes.rollout import play_replies, restore_state, roll_out_episode
from agentr_core.errors import ConfigError, DataFileError, EnvironmentFault, EnvironmentUnavailable
from agentr_core.store.codec.trajectories import load_trajectories, trajectory_rows
from agentr_core.store.database import Store
from agentr_core.types import Instance, Sampling, StopReason

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PATIENCE = 600.0


def instance(task: str, number: int = 0, *, numbering: str = "agentgym", split: str = "train") -> Instance:
    index = first_numbers(numbering)[task] + number  # type: ignore[arg-type]
    return Instance(environment="sciworld", split=split, index=index)


@pytest.fixture
def env() -> Iterator[SciWorld]:
    world = SciWorld()
    yield world
    world.close()


def test_what_follows_a_menu_and_is_none_of_its_numbers_is_refused(env: SciWorld) -> None:
    env.reset(instance("boil"))
    for action in ("open door to kitchen", "go to kitchen"):
        assert env.step(action).info["valid"]
    menu = env.step("look at door")
    assert menu.observation.startswith("Ambiguous request: Please enter the number")
    refusal = env.step("open door")
    assert refusal.observation.startswith("Unknown action.")
    assert (menu.info["valid"], refusal.info["valid"]) == (True, False)
    env.step("look at door")
    assert env.step("0").info["valid"]


def test_the_examples_that_come_along_are_what_the_simulator_says(env: SciWorld) -> None:
    for line in (ROOT / "data" / "examples" / "sciworld.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        opening, *texts = (turn["value"] for turn in record["conversations"])
        index = int(record["id"].rpartition("/")[2])
        observation, outcomes = play_replies(
            env, Instance(environment="sciworld", split="train", index=index), texts[::2]
        )
        assert observation == opening
        assert [outcome.step.observation for outcome in outcomes][:-1] == texts[1::2]
        assert outcomes[-1].stop is StopReason.SUCCESS


def write_lists(folder: Path, train: Sequence[int], test: Sequence[int]) -> str:
    """Write files like AgentGym's and return the folder."""
    for split, numbers in (("train", train), ("test", test)):
        items = [{"item_id": f"sciworld_{number}", "conversations": []} for number in numbers]
        (folder / f"sciworld_{split}.json").write_text(json.dumps(items))
    return str(folder)


@pytest.mark.long
@pytest.mark.slow
def test_the_setting_of_eto_keeps_the_contract(tmp_path: Path) -> None:
    # The other setting is checked by `agentr env doctor`, in tests/flows/test_env_cli.py.
    short = first_numbers("eto")["identify-life-stages-2"]
    lists = write_lists(tmp_path, [short], [short + 9])
    assert check(lambda: SciWorld(setting="eto", ids_dir=lists)) == ()


@pytest.mark.slow
def test_splits_are_the_simulators_own(env: SciWorld) -> None:
    sizes = {split: len(env.instances(split)) for split in env.splits()}
    assert sum(sizes.values()) == 4339
    boil = [i.index for split in env.splits() for i in env.instances(split) if i.index < 30]
    assert boil == list(range(30))
    assert [len([i for i in env.instances(split) if i.index < 30]) for split in env.splits()] == [14, 7, 9]


def test_the_first_observation_is_the_task_and_the_room(env: SciWorld) -> None:
    task, _, room = env.reset(instance("boil")).partition("\n")
    assert task.startswith("Your task is to boil water.")
    assert room.startswith("This ")
    assert "\nYou also see:\n" in room


def test_time_passes_only_with_what_takes_time(env: SciWorld) -> None:
    env.reset(instance("boil"))
    moves = [env.step(action).info["moves"] for action in ("look around", "inventory", "dance", "wait1", "wait")]
    assert moves[:3] == [0, 0, 0]
    assert moves[3] > 0
    assert moves[4] - moves[3] == 11


def test_what_is_no_action_is_told_and_marked(env: SciWorld) -> None:
    env.reset(instance("boil"))
    for action in ("dance", "", "focus", "öffne\ndie Tür", "look \udcff", "9" * 5000):
        transition = env.step(action)
        assert (transition.observation, transition.reward, transition.terminated) == (UNKNOWN_ACTION_PREFIX, 0.0, False)
        assert transition.info["valid"] is False
    assert env.step("look around").info["valid"] is True


@pytest.mark.slow
def test_a_wrong_focus_is_a_disaster_and_in_eto_keeps_the_best_score(env: SciWorld) -> None:
    begun = instance("find-living-thing")
    env.reset(begun)
    last = env.step("focus on agent")
    assert (last.reward, last.terminated, last.info["success"]) == (-1.0, True, False)
    assert (last.info["raw_score"], last.info["wrong_focus"]) == (-100, True)
    with pytest.raises(EnvironmentFault, match="the episode is over; call reset first"):
        env.step("look around")

    eto = SciWorld(setting="eto")
    begun = instance("find-living-thing", numbering="eto")
    actions = [eto.parse(reply) for reply in eto.expert(begun) or ()]
    eto.reset(begun)
    rewards: list[float] = []
    for action in actions:
        if rewards and 0 < rewards[-1] < 1:
            break
        rewards.append(eto.step(action).reward)
    last = eto.step("focus on agent")
    assert last.reward == rewards[-1] > 0
    assert (last.terminated, last.info["success"], last.info["raw_score"]) == (True, False, -100)
    eto.close()


def test_eto_begins_with_the_task_alone_and_rewards_are_not_rounded() -> None:
    eto = SciWorld(setting="eto")
    variation = instance("find-living-thing", numbering="eto")
    observation = eto.reset(variation)
    heading, _, task = observation.partition("\n")
    assert heading == "Task Description:"
    assert task.startswith("Your task is to find a")
    assert "\n" not in task
    assert eto.step("open door to kitchen").reward == pytest.approx(0.083333, abs=1e-6)
    assert eto.step("look around").reward == pytest.approx(0.083333, abs=1e-6)

    plain = SciWorld()
    plain.reset(instance("find-living-thing"))
    assert plain.step("open door to kitchen").reward == 0.08
    eto.close()
    plain.close()


def test_a_wrong_focus_as_the_first_action_in_eto_is_a_disaster_that_can_count_minus_one() -> None:
    eto = SciWorld(setting="eto")
    variation = instance("find-living-thing", numbering="eto")
    eto.reset(variation)
    last = eto.step("focus on agent")
    assert (last.reward, last.terminated, last.info["success"]) == (-1.0, True, False)
    outcome = play_replies(eto, variation, ["Action: focus on agent"])[1][0]
    assert (outcome.step.reward, outcome.stop) == (0.0, StopReason.DISASTER)
    eto.close()


def test_the_clock_of_the_simulator_and_the_steps_of_eto_cut_an_episode(env: SciWorld) -> None:
    env.reset(instance("boil"))
    ends = [env.step("wait").truncated for _ in range(10)]
    assert ends == [False] * 9 + [True]

    eto = SciWorld(setting="eto")
    eto.reset(instance("lifespan-longest-lived", numbering="eto"))
    cut = [eto.step("look around") for _ in range(10)]
    assert [(each.terminated, each.truncated) for each in cut] == [(False, False)] * 9 + [(False, True)]
    eto.close()


@pytest.mark.slow
def test_a_restored_state_answers_as_before_whoever_else_plays(env: SciWorld) -> None:
    # Animals wander there; it is the task in which the plain simulator lists them in another order
    # each time.
    variation = instance("identify-life-stages-2")
    actions = [env.parse(reply) for reply in env.expert(variation) or ()]
    env.reset(variation)
    steps = [env.step(action) for action in actions[:6]]
    snapshot = env.snapshot()
    steps += [env.step(action) for action in actions[6:]]
    assert steps[-1].info["success"]

    worlds = [SciWorld() for _ in range(5)]
    for world in worlds:
        world.reset(instance("boil"))
        world.step("wait1")
    env.restore(snapshot)
    assert [env.step(action) for action in actions[6:]] == steps[6:]
    for world in worlds:
        world.close()


def test_matching_executes_the_nearest_action_and_tells_both() -> None:
    env = SciWorld(match=True)
    env.reset(instance("boil", 3))
    step = env.step("please open the kitchen door")
    assert step.info["matched"] == "open door to kitchen"
    assert step.observation == "The door is now open."
    snapshot = env.snapshot()
    second_step = env.step("go kitchen")
    env.restore(snapshot)
    assert env.step("go kitchen") == second_step
    assert "open door to kitchen" not in env.valid_actions()
    env.close()


async def test_what_the_agent_wrote_and_what_was_carried_out_are_both_stored(tmp_path: Path, env: SciWorld) -> None:
    matching = SciWorld(match=True)
    sample = Script(["please open the kitchen door"], ["look around"])
    trajectories = [
        await roll_out_episode(instance("boil", 3), world, sample, max_steps=2, sampling=Sampling(), seed=1)
        for world in (matching, env)
    ]
    store = Store(tmp_path / "store.duckdb")
    for name, trajectory in zip(("matched", "plain"), trajectories, strict=True):
        store.write(trajectory_rows(name, trajectory, source="rollout"))

    rows = store.query("select action, matched from v_steps where trajectory_id = 'matched'").values.tolist()
    assert rows == [["please open the kitchen door", "open door to kitchen"], ["look around", "look around"]]
    by_id = load_trajectories(store)
    assert by_id == {"matched": trajectories[0], "plain": trajectories[1]}
    assert [step.matched for step in by_id["plain"].steps] == [None, None]
    restore_state(matching, instance("boil", 3), by_id["matched"].steps)
    assert matching.step("go kitchen").info["matched"] == "go to kitchen"
    matching.close()


def test_the_same_experiment_over_http(env: SciWorld) -> None:
    variation = instance("find-living-thing")
    with served_world(SciWorld, WIRE_FORMATS["sciworld"], {variation.index: variation}) as world:
        client = Client(url=world.url, train=str(variation.index), test="0")
        client_observation, observation = client.reset(client.instances("train")[0]), env.reset(variation)
        assert client_observation == observation
        for action in ("look around", "dance", "focus on agent"):
            client_step, step = client.step(action), env.step(action)
            assert client_step[:4] == step[:4]
            assert client_step.info["success"] == step.info["success"]
        client.close()


@pytest.fixture
def lone() -> Iterator[tuple[SciWorld, SharedSimulators]]:
    """An environment with a simulator that no other test uses."""
    simulators = SharedSimulators(lambda: Simulator(JavaSettings()), 1)
    env = SciWorld()
    env.__dict__["_simulators"] = simulators
    yield env, simulators
    simulators.close()


@pytest.mark.slow
def test_a_simulator_that_is_killed_or_hangs_costs_one_error_and_the_next_episode_works(
    lone: tuple[SciWorld, SharedSimulators],
) -> None:
    env, simulators = lone
    variation = instance("boil")
    observation = env.reset(variation)
    with simulators.lend_at(env.snapshot().path, env) as standing:
        simulator = standing.simulator
    os.kill(simulator.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentUnavailable, match=r"simulator ended at 'look around' with code -9"):
        env.step("look around")

    assert env.reset(variation) == observation
    with simulators.lend_at(env.snapshot().path, env) as standing:
        simulator = standing.simulator
    # The answer may take minutes where a machine is slow; for this one, which never comes, nobody
    # should wait.
    for connection in simulator._client.deque:
        connection.socket.settimeout(0.2)
    os.kill(simulator.pid, signal.SIGSTOP)
    os.waitpid(simulator.pid, os.WUNTRACED)
    with pytest.raises(EnvironmentUnavailable, match=r"gave no answer to 'look around' within"):
        env.step("look around")
    assert not Path(f"/proc/{simulator.pid}").exists()
    assert env.reset(variation) == observation


_PLAYER = """
import sys, time
from agentr_core.environments.sciworld import SciWorld
from agentr_core.types import Instance
env = SciWorld()
env.reset(Instance(environment="sciworld", split="train", index=0))
with env._simulators.lend_at(env.snapshot().path, env) as standing:
    print(standing.simulator.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["of itself", "by a kill"])
def test_nothing_is_left_running_when_the_process_ends(end: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PLAYER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        pidfd = os.pidfd_open(int(process.stdout.readline()))
        if end == "by a kill":
            process.kill()
        else:
            process.stdin.close()
        events, _, _ = select.select([pidfd], [], [], PATIENCE)
        os.close(pidfd)
    assert events, "the Java process lives on"


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^Java cannot be run as /no/java \(No such file or directory\); set envi"):
        SciWorld(java="/no/java").reset(instance("boil"))
    silent = tmp_path / "java"
    silent.write_text("#!/bin/sh\necho Unrecognized option\nexit 1\n")
    silent.chmod(0o755)
    with pytest.raises(ConfigError, match=r"^Java does not start a simulator of ScienceWorld: Unrecognized option$"):
        SciWorld(java=str(silent)).reset(instance("boil"))
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    with pytest.raises(EnvironmentUnavailable, match=r"^no simulator of ScienceWorld started within 0.1 seconds; on a"):
        SciWorld(java=str(slow), timeout_s=0.1).reset(instance("boil"))

    monkeypatch.setattr(sciworld_simulator, "find_spec", lambda package: None if package == "scienceworld" else package)
    with pytest.raises(ConfigError, match=r"^the environment sciworld needs scienceworld: in the checkout, pip i"):
        SciWorld()


def test_another_version_of_the_simulator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sciworld_simulator, "VARIATIONS", {"boil": 31})
    with pytest.raises(ConfigError, match=r"scienceworld 1\.2\.3 has 30 variations of boil and should have 31"):
        Simulator(JavaSettings())


def test_published_lists_are_the_splits(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"^environment\.options\.ids_dir: .*sciworld_train\.json is neither"):
        SciWorld(ids_dir=str(tmp_path))
    lists = write_lists(tmp_path, [5, 1100], [4338])
    world, shipped_world = (SciWorld(ids_dir=lists, numbering=n) for n in ("agentgym", "agentgym-shipped"))
    assert world.splits() == ("train", "test")
    assert [i.index for i in world.instances("train")] == [5, 1100]
    assert world.identity(world.instances("train")[1]) == "power-component/4"
    assert shipped_world.identity(shipped_world.instances("train")[1]) == "measure-melting-point-unknown-substance/4"
    with pytest.raises(ConfigError, match=r"ids_dir: the numbering agentgym has no variation 4339"):
        SciWorld(ids_dir=write_lists(tmp_path, [5], [4339]))
    with pytest.raises(ConfigError, match=r"ids_dir: instance 5 is in both train and test"):
        SciWorld(ids_dir=write_lists(tmp_path, [5], [5]))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("setting", "hard"),
        ("numbering", "mine"),
        ("simulators", 0),
        ("simulators", True),
        ("memory_mb", 8),
        ("timeout_s", 0),
        ("match", "yes"),
    ],
)
def test_a_wrong_option_is_told(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^environment\.options\.{option} must be .*not {value!r}$"):
        SciWorld(**{option: value})  # type: ignore[arg-type]


def test_misuse_is_told(env: SciWorld) -> None:
    with pytest.raises(ConfigError, match=r"^sciworld has no split 'attic'; it has train, dev, test$"):
        env.instances("attic")
    for key in ("sciworld/train/4339", "sciworld/attic/0", "webshop/train/0"):
        name, split, index = key.split("/")
        with pytest.raises(EnvironmentFault, match=rf"^sciworld has no instance {key}; its splits are"):
            env.reset(Instance(environment=name, split=split, index=int(index)))
    with pytest.raises(EnvironmentFault, match="there is no episode; call reset first"):
        env.step("look around")


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("Thought: x\nAction: open door to kitchen", "open door to kitchen"),
        ("Thought:\nx\n\nAction:\nlook around", "look around"),
        ("Action: wait\nAction: wait1\nObservation: y", "wait1"),
        ("look around", ""),
        ("", ""),
    ],
)
def test_parser(env: SciWorld, reply: str, action: str) -> None:
    assert env.parse(reply) == action
