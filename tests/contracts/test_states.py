"""Equal states and equal actions lead to equal results, in every world that tells its state."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from combination_lock import CombinationLock
from houses import GAMES, maker, needs_engine

from agentr_core.environment import MAX_DIFFERENT_SHARE, Environment
from agentr_core.environments import registry
from agentr_core.environments.alfworld.world import AlfWorld
from agentr_core.environments.contract import NONSENSE, StatePairs, check, state_pairs
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.environments.sciworld.tasks import first_numbers
from agentr_core.environments.sciworld.world import SciWorld
from agentr_core.environments.webshop.world import WebShop, buttons
from agentr_core.types import Instance
from flows.commands.environments import diagnose


def of_expert(env: Environment, instance: Instance) -> list[str]:
    return [*dict.fromkeys(map(env.parse, env.expert(instance) or ())), NONSENSE]


@pytest.mark.slow
def test_textcraft_tells_its_state() -> None:
    envs = TextCraft(), TextCraft()
    counts = StatePairs()
    for instance in envs[0].instances("train")[::60]:
        counts += state_pairs(envs, instance, [*of_expert(envs[0], instance), "inventory"], num_episodes=20)
    assert counts.pairs > 500
    assert counts.elsewhere == 0, counts.example


@pytest.mark.slow
def test_webshop_tells_its_state(tmp_path: Path) -> None:
    envs = WebShop(cache_dir=str(tmp_path)), WebShop(cache_dir=str(tmp_path), explain=False)

    def clicks(env: Environment) -> list[str]:
        assert isinstance(env, WebShop)
        labels = buttons(env.shop.catalogue, env._visit)
        return [*(f"click[{button}]" for button in labels), *searches]

    counts = StatePairs()
    for instance in envs[0].instances("train")[::200]:
        searches = [action for action in of_expert(envs[0], instance) if not action.startswith("click")]
        counts += state_pairs(envs, instance, clicks, num_episodes=10)
    assert counts.pairs > 500
    assert counts.elsewhere == 0, counts.example


@pytest.mark.slow
@needs_engine
def test_alfworld_tells_its_state(tmp_path: Path) -> None:
    maker().make(tmp_path, GAMES)
    envs = [AlfWorld(data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache")) for _ in range(2)]

    def commands(env: Environment) -> list[str]:
        assert isinstance(env, AlfWorld)
        return [*env._current_game().commands, NONSENSE]

    counts = StatePairs()
    for instance in envs[0].instances("train")[:3]:
        counts += state_pairs(envs, instance, commands, num_episodes=10, max_steps=30)
    assert counts.pairs > 300
    assert counts.elsewhere == 0, counts.example


@pytest.mark.slow
def test_sciworld_tells_its_state() -> None:
    envs = SciWorld(), SciWorld()
    counts = StatePairs()
    for task in ("boil", "power-component"):
        instance = Instance(environment="sciworld", split="train", index=first_numbers("agentgym")[task])
        actions = [*of_expert(envs[0], instance), "look around", "inventory", "wait1", "go to hallway"]
        counts += state_pairs(envs, instance, actions, num_episodes=4, max_steps=15)
    assert counts.pairs > 30
    assert counts.elsewhere <= MAX_DIFFERENT_SHARE * counts.pairs, counts.example


class Vague(TextCraft):
    """Tells the kinds of what it carries, not how many there are."""

    def state(self) -> str:
        return ",".join(sorted(self.inventory))


@pytest.mark.slow
def test_a_state_that_leaves_out_what_matters_is_told() -> None:
    counts: list[StatePairs] = []
    faults = check(Vague, instances_per_split=2, on_states=counts.append)
    assert {fault.rule for fault in faults} == {"state"}
    assert counts[0].elsewhere > MAX_DIFFERENT_SHARE * counts[0].pairs
    assert faults[0].detail.startswith(
        f"{counts[0].pairs:,} pairs of equal state and action, {counts[0].elsewhere:,} led"
    )
    assert ", such as textcraft/" in faults[0].detail


def test_what_rarely_leads_elsewhere_is_no_violation() -> None:
    assert StatePairs(pairs=100, elsewhere=1).is_sound
    assert not StatePairs(pairs=100, elsewhere=2).is_sound
    assert StatePairs().is_sound


def test_a_world_without_a_state_is_not_asked() -> None:
    counts: list[StatePairs] = []
    assert check(CombinationLock, instances_per_split=1, on_states=counts.append) == ()
    assert counts == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (TextCraft, r"keeps the contract; \d+ pairs of equal state and action, 0 led elsewhere"),
        (Vague, r"state: \d+ pairs of equal state and action, \d+ led elsewhere, such as textcraft/.*"),
    ],
)
def test_the_doctor_counts_states(kind: type[TextCraft], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORY_BY_NAME", {"world": kind})
    monkeypatch.setattr(registry, "entry_points", lambda **_: [SimpleNamespace(name="world")])
    (report,) = diagnose("world", {})
    assert (report["status"] == "broken") is (kind is Vague)
    assert set(report["states"]) == {"pairs", "elsewhere"}
    assert re.fullmatch(told, report["detail"]), report["detail"]
