"""ALFWorld on the real engine: games of all kinds made here, the contract, states kept and put
back, broken games.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from houses import GAMES, ROOT, maker, needs_engine
from toy import Script

from agentr_core.environments.alfworld.world import AlfWorld
from agentr_core.environments.contract import check
from agentr_core.episodes.rollout import play_replies
from agentr_core.errors import EnvironmentFault
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.search.grow import grow
from agentr_core.search.tree import leaf_paths

pytestmark = [pytest.mark.slow, needs_engine]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alfworld")
    maker().make(folder, GAMES)
    return folder


def make_env(homes: Path, *, admissible_commands: bool = False) -> AlfWorld:
    return AlfWorld(data_dir=str(homes), cache_dir=str(homes / "cache"), admissible_commands=admissible_commands)


@pytest.mark.parametrize("admissible", [False, True])
def test_it_keeps_the_contract(homes: Path, admissible: bool) -> None:
    assert check(lambda: make_env(homes, admissible_commands=admissible), instances_per_split=2) == ()


def test_the_expert_wins_each_kind_of_task(homes: Path) -> None:
    env = make_env(homes)
    instances = env.instances("train")
    for instance in instances:
        observation, outcomes = play_replies(env, instance, env.expert(instance) or ())
        assert "\nYour task is to: " in observation
        assert "Welcome" not in observation
        last = outcomes[-1]
        assert (last.step.reward, last.step.success, last.step.terminated) == (1.0, True, True), instance.key
        assert all(outcome.step.reward == 0.0 and outcome.step.valid for outcome in outcomes[:-1])
        assert len(outcomes) <= env.step_limit
    assert {env.depth(instance) for instance in instances} == {1, 2, 3, 4, 5, 6}
    env.close()


def test_what_is_not_possible_changes_nothing(homes: Path) -> None:
    env = make_env(homes, admissible_commands=True)
    observation = env.reset(env.instances("test")[0])
    actions = observation.rpartition("\n")[2]
    assert actions.startswith("AVAILABLE ACTIONS: go to ")
    for action in ("take mug 9 from moon 1", "", "go to desk 1\nlook", "help me"):
        step = env.step(action)
        assert step[:4] == (f"Nothing happens.\n{actions}", 0.0, False, False)
        assert step.info == {"success": False, "valid": False}
    env.close()


def test_a_snapshot_outlives_another_game_and_a_close(homes: Path) -> None:
    env = make_env(homes)
    instance, second = env.instances("train")[:2]
    actions = [env.parse(reply) for reply in env.expert(instance) or ()]
    env.reset(instance)
    records = []
    for action in actions:
        records.append((env.snapshot(), action, env.step(action)))
    for snapshot, action, step in reversed(records):
        env.restore(snapshot)
        assert env.step(action) == step
    env.reset(second)
    for snapshot, action, step in records:
        env.restore(snapshot)
        assert env.step(action) == step
    env.close()
    env.restore(records[-1][0])
    assert env.step(actions[-1]).info["success"]
    env.close()


async def test_a_search_tree_replays(homes: Path) -> None:
    env = make_env(homes)
    instance = env.instances("train")[0]
    actions = [env.parse(reply) for reply in env.expert(instance) or ()]
    wrong = ["look", *["go to the moon"] * (len(actions) - 1)]
    config = SearchConfig(dives=2 ** len(actions), width=2, depth=len(actions))

    tree = await grow(instance, env, Script(*zip(actions, wrong, strict=True)), config, seed=7)

    paths = [path.trajectory for path in leaf_paths(tree, "tree")]
    assert {path.success for path in paths} == {True, False}
    fresh = make_env(homes)
    for path in paths:
        observation, outcomes = play_replies(fresh, instance, [step.reply for step in path.steps])
        assert observation == path.first_observation
        assert [(o.step.observation, o.step.reward) for o in outcomes] == [
            (s.observation, s.reward) for s in path.steps
        ]
    env.close()
    fresh.close()


@pytest.mark.parametrize(
    ("part", "text"),
    [("pddl_problem", "(define (problem x)"), ("grammar", "action {"), ("pddl_domain", "nothing"), ("grammar", 3)],
)
def test_a_broken_game_is_named_and_the_next_one_plays(tmp_path: Path, homes: Path, part: str, text: object) -> None:
    source = next(homes.glob("json_2.1.1/train/*/*"))
    for split in ("train", "valid_seen", "valid_unseen"):
        for trial in ("trial_1", "trial_2"):
            folder = tmp_path / split / source.parent.name / trial
            folder.mkdir(parents=True)
            content = json.loads((source / "game.tw-pddl").read_text(encoding="utf-8"))
            content |= {part: text} if trial == "trial_1" else {}
            (folder / "game.tw-pddl").write_text(json.dumps(content), encoding="utf-8")
            (folder / "traj_data.json").write_bytes((source / "traj_data.json").read_bytes())
    env = AlfWorld(data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    broken, sound = env.instances("test")
    with pytest.raises(EnvironmentFault, match=rf"^game file {tmp_path}.*trial_1.*`alfworld-download`$"):
        env.reset(broken)
    with pytest.raises(EnvironmentFault, match="call reset first"):
        env.step("look")
    assert env.reset(sound).startswith("You are in the middle of a room.")
    env.close()


_DIGEST = """
import hashlib, sys
from agentr_core.environments.alfworld import AlfWorld
env = AlfWorld(data_dir=sys.argv[1], cache_dir=sys.argv[2], admissible_commands=True)
arguments = list(sys.argv)
seen = []
for instance in [env.instances("train")[0], env.instances("test")[0]]:
    seen.append(env.reset(instance))
    seen += [env.step(env.parse(reply)).observation for reply in env.expert(instance)]
assert sys.argv == arguments
print(hashlib.sha256("".join(seen).encode()).hexdigest())
"""


def test_every_process_sees_the_same_games(homes: Path, tmp_path: Path) -> None:
    def digest(seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", _DIGEST, str(homes), str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert digest("1") == digest("2") != ""


def test_the_script_makes_the_same_games_again(homes: Path, tmp_path: Path) -> None:
    def files(folder: Path) -> dict[str, str]:
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.glob("json_2.1.1/**/*.*")
            if path.is_file()
        }

    maker().make(tmp_path, GAMES | {"train": 2})
    hashes = files(tmp_path)
    assert hashes.items() <= files(homes).items()
    assert len(hashes) == 3 * 6
