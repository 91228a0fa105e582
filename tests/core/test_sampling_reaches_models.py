"""What a recipe says of sampling is what models are asked with, beside the stops of the world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import FAMILY, MATH, begun, cast
from toy import Line, Script, instance
from toy_paths import ToyTree

from agentr_core.environments.reasoning.grammar import STOPS
from agentr_core.methods.agent_r.critique import judge_paths, scans_of
from agentr_core.methods.et_agent.evolve import evolve
from agentr_core.methods.eto import rollout_config
from agentr_core.methods.faults import parse
from agentr_core.recipes.agent_r import CritiqueConfig, SearchConfig
from agentr_core.search.grow import grow
from agentr_core.stages.evaluate import evaluate
from agentr_core.types import Sampling

SET: dict[str, Any] = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "stop": ("END",)}
DRAWN = Sampling(temperature=0.7, max_new_tokens=50, **SET)


def flywheel(**fields: Any) -> dict[str, Any]:
    return FAMILY | {"temperature": 0.7, "max_new_tokens": 50} | fields


@pytest.mark.slow
async def test_the_flywheel_asks_each_role_as_its_section_says(tmp_path: Path, tiny_model_dir: Path) -> None:
    staff = cast()
    aside = {
        name: {**SET, "temperature": 0.7, "max_new_tokens": 50, "top_k": k}
        for name, k in (("reflector", 3), ("editor", 4))
    }
    ctx = await begun(tmp_path, tiny_model_dir, staff, flywheel(**SET, **aside), problems=(MATH,))
    await evolve(ctx, 1)
    samplings = {
        role: {request.sampling for request in staff.requests(role)} for role in ("actor", "reflector", "editor")
    }
    assert samplings["actor"] == {replace(DRAWN, stop=(*STOPS, "END"), include_stop=True)}
    assert samplings["reflector"] == {replace(DRAWN, top_k=3)}
    (plain, flaw_sampling) = sorted(samplings["editor"], key=lambda sampling: len(sampling.stop))
    assert plain == replace(DRAWN, top_k=4)
    assert flaw_sampling == replace(plain, stop=(*flaw_sampling.stop[:1], "END"))


@pytest.mark.slow
async def test_each_evaluation_is_drawn_as_its_own_section_says(tmp_path: Path, tiny_model_dir: Path) -> None:
    staff = cast()
    section = {"temperature": 0.7, "max_new_tokens": 50, **SET, "revision_test": {"enabled": False}}
    evaluation = section | {"sets": {"more": {"split": "test", "top_k": 5}}}
    ctx = await begun(tmp_path, tiny_model_dir, staff, FAMILY, evaluation=evaluation)
    await evaluate(ctx, 0)
    of_set = Sampling(temperature=0.0, max_new_tokens=50, top_k=5, stop=STOPS, include_stop=True)
    assert {request.sampling for request in staff.requests("actor")} == {
        of_set,
        replace(DRAWN, stop=(*STOPS, "END"), include_stop=True),
    }


async def test_search_and_judge_are_asked_as_their_sections_say() -> None:
    model = Script(["right"], ["stop"])
    await grow(instance(), Line(), model, SearchConfig(dives=1, temperature=0.7, max_new_tokens=50, **SET), seed=1)
    assert {request.sampling for request in model.requests} == {DRAWN}
    judge, config = Script(["Good"]), CritiqueConfig(temperature=0.7, max_new_tokens=50, **SET)
    scans = scans_of([ToyTree(0).pair(["right"], ["look", "left"])], config)
    await judge_paths(scans, judge, config, seed=0, count_tokens=lambda request: 1, context_length=10_000)
    assert {request.sampling for request in judge.requests} == {DRAWN}


def test_an_exploration_acts_as_its_section_says() -> None:
    explore = {**SET, "temperature": 0.7, "max_new_tokens": 50}
    recipe = parse({"name": "r", "method": "eto", "model": {"path": "m"}, "eto": {"explore": explore}})
    assert rollout_config(recipe).sampling == DRAWN
