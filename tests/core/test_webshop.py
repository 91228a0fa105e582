"""WebShop as an environment: replies and actions, the expert on all goals, snapshots in a tree, and
misuse.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from shop import entry, write
from toy import Script

from agentr_core.environments.contract import check
from agentr_core.environments.webshop.world import WebShop
from agentr_core.episodes.rollout import play_replies
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.search.grow import grow
from agentr_core.search.tree import leaf_paths
from agentr_core.types import Instance

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("webshop"))


@pytest.fixture
def env(cache: str) -> WebShop:
    return WebShop(cache_dir=cache)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["synthetic", "human"])
def test_the_expert_earns_everything_on_shipped_goals(cache: str, kind: str) -> None:
    env = WebShop(goals=kind, cache_dir=cache)  # type: ignore[arg-type]
    for split in env.splits():
        for instance in env.instances(split)[::4]:
            replies = env.expert(instance)
            assert replies is not None, instance.key
            assert len(replies) <= env.step_limit
            env.reset(instance)
            last = [env.step(env.parse(reply)) for reply in replies][-1]
            assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, True), instance.key


def test_human_goals_keep_the_contract(cache: str) -> None:
    assert check(lambda: WebShop(goals="human", cache_dir=cache)) == ()


def test_shipped_splits_share_no_product_and_no_text(env: WebShop) -> None:
    goals = {split: [env.goal(instance) for instance in env.instances(split)] for split in env.splits()}
    assert {split: len(split_goals) for split, split_goals in goals.items()} == {"test": 317, "dev": 163, "train": 1084}
    for part in ("row", "instruction"):
        value_sets = [{getattr(goal, part) for goal in split_goals} for split_goals in goals.values()]
        assert sum(map(len, value_sets)) == len(set.union(*value_sets)), part


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("Thought: x\nAction: search[red mug]", "search[red mug]"),
        ("Thought 1: x\nAction 1: click[Buy Now]", "click[Buy Now]"),
        ("Thought:\nx\n\nAction:\nclick[< Prev]", "click[< Prev]"),
        ("Action: search[a]\nAction: search[b]", "search[b]"),
        ("Action: click[a]\nObservation: made up", "click[a]"),
        ("Action: click[a].", "click[a]"),
        ("search[mug]", "search[mug]"),
        ("I would search[mug]", "I would search[mug]"),
        ("Thought: no action", ""),
        ("Action: buy it", "buy it"),
        ("Action:", ""),
        ("", ""),
    ],
)
def test_parser(env: WebShop, reply: str, action: str) -> None:
    assert env.parse(reply) == action


def test_an_action_that_cannot_be_done_leaves_the_page(env: WebShop) -> None:
    page = env.reset(env.instances("test")[0])
    for action in ("click[buy now]", "dance", "search[]"):
        transition = env.step(action)
        assert transition[:4] == (page, 0.0, False, False)
        assert transition.info == {"success": False, "valid": False}
    assert env.step("").observation == f"Invalid Action.\n\n{page}"


def test_an_action_that_cannot_be_done_can_be_explained(cache: str) -> None:
    env = WebShop(explain=True, cache_dir=cache)
    page = env.reset(env.instances("test")[0])
    assert env.step("dance").observation == (
        f"'dance' cannot be done here; search[words], or click one of: nothing.\n\n{page}"
    )
    env.step("search[zzz]")
    observation = env.step("click[buy now]").observation
    assert observation.startswith(
        "'click[buy now]' cannot be done here; search[words], or click one of: back to search, next >."
    )


def test_a_wrong_purchase_earns_a_part_and_is_no_success(tmp_path: Path) -> None:
    instruction = {
        "attributes": ["big", "blue"],
        "instruction": "Find me big mugs",
        "instruction_attributes": ["big", "blue"],
    }
    raw = [entry(f"B{number:02}", "Mug", options={"size": ["large", "x-large"]}) for number in range(20)]
    folder = write(tmp_path, raw, {each["asin"]: {**instruction, "instruction": each["asin"]} for each in raw})
    env = WebShop(data_dir=str(folder), cache_dir=str(tmp_path / "cache"))
    instance = next(i for i in env.instances("train") if env.goal(i).options == (("size", "large"),))
    env.reset(instance)
    for action in ("search[mug]", "click[B00]", "click[x-large]", "click[buy now]"):
        last = env.step(action)
    # Of two attributes, one option and the price the price alone is met, or both attributes of the
    # very product too.
    assert last.reward in (1 / 4, 3 / 4)
    assert (last.terminated, last.info["success"]) == (True, False)
    assert f"max 1.0) [SEP] {last.reward} [SEP]" in last.observation


def test_snapshots_are_copies(env: WebShop) -> None:
    instance, second = env.instances("test")[:2]
    env.reset(instance)
    page = env.step("search[coffee]").observation
    snapshot = env.snapshot()
    env.step("click[next >]")
    env.reset(second)
    env.restore(snapshot)
    assert env.step("dance").observation == page
    assert env.snapshot() == snapshot


async def test_a_search_tree_over_the_shop_replays(env: WebShop) -> None:
    instance = next(each for each in env.instances("train") if env.depth(each) == 2)
    actions = [env.parse(reply) for reply in env.expert(instance) or ()]
    wrong = ["search[zzz]", "click[back to search]", *["click[buy now]"] * (len(actions) - 2)]
    policy = Script(*zip(actions, wrong, strict=True))

    tree = await grow(instance, env, policy, SearchConfig(dives=8, width=2, depth=8), seed=7)

    paths = [path.trajectory for path in leaf_paths(tree, "tree")]
    assert {path.reward for path in paths if path.success} == {1.0}
    assert any(0 < path.reward < 1 and not path.success for path in paths)
    for path in paths:
        observation, outcomes = play_replies(env, instance, [step.reply for step in path.steps])
        assert observation == path.first_observation
        assert [(o.step.observation, o.step.reward) for o in outcomes] == [
            (s.observation, s.reward) for s in path.steps
        ]


def test_misuse_is_told_in_one_sentence(env: WebShop, cache: str) -> None:
    with pytest.raises(ConfigError, match=r"webshop has no split 'validation'; it has test, dev, train"):
        env.instances("validation")
    for wrong in ("webshop/test/99999", "webshop/test/-1", "webshop/shelf/0", "textcraft/test/0"):
        name, split, index = wrong.split("/")
        with pytest.raises(EnvironmentFault, match=rf"has no instance {wrong}; it has \d+ goals"):
            env.reset(Instance(environment=name, split=split, index=int(index)))
    with pytest.raises(EnvironmentFault, match="there is no episode; call reset first"):
        WebShop(cache_dir=cache).step("search[mug]")
    for option, value in (("goals", "both"), ("split", "random")):
        options: dict[str, Any] = {option: value}
        with pytest.raises(ConfigError, match=rf"^environment\.options\.{option} must be .* not '{value}'"):
            WebShop(**options)
    for number in (-1, "many", True):
        with pytest.raises(
            ConfigError, match=rf"^environment\.options\.limit must be a whole number .* not {number!r}"
        ):
            WebShop(limit=number)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^environment\.options\.data_dir: there is no folder"):
        WebShop(data_dir="/nowhere")


_DIGEST = """
import hashlib, sys
from agentr_core.environments.webshop import WebShop
env = WebShop(cache_dir=sys.argv[1])
seen = [repr(env.goal(i)) for i in env.instances("test")]
for i in env.instances("test")[:10]:
    seen.append(env.reset(i))
    seen += [repr(env.step(env.parse(reply))) for reply in env.expert(i)]
print(hashlib.sha256("".join(seen).encode()).hexdigest())
"""


@pytest.mark.slow
def test_every_process_sees_the_same_shop(tmp_path: Path) -> None:
    def digest(seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", _DIGEST, str(tmp_path / seed)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert digest("1") == digest("2") != ""


def catalogue_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("webshop_make", ROOT / "data" / "webshop" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_makes_the_shipped_catalogue_byte_for_byte() -> None:
    files = catalogue_script().make()
    assert {name: (ROOT / "data" / "webshop" / name).read_text(encoding="utf-8") for name in files} == files
    assert sum(len(text.encode()) for text in files.values()) < 1 << 20
