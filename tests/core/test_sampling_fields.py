"""The settings of sampling that all sections of a recipe share: what they take, what they refuse,
and for which models.
"""

from __future__ import annotations

from typing import Any

import pytest

from agentr_core.errors import ConfigError
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.faults import parse
from agentr_core.recipes.fields import SamplingFields
from agentr_core.recipes.recipe import Recipe, identifying_data, sampling_sections
from agentr_core.types import Sampling

SET: dict[str, Any] = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "stop": ["END"]}
DRAWN = Sampling(
    temperature=0.5, max_new_tokens=7, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1, stop=("END",)
)
METHODS = {
    "search": "agent-r",
    "critique": "agent-r",
    "splice.continuation": "agent-r",
    "eto.explore": "eto",
    "evaluation": "agent-r",
    "evaluation.sets.more": "agent-r",
    "et_agent.flywheel": "et-agent",
    "et_agent.flywheel.reflector": "et-agent",
    "et_agent.flywheel.editor": "et-agent",
}
SERVER: dict[str, Any] = {"model": "m", "base_url": "http://localhost:1/v1", "continues": True}
SERVED: dict[str, Any] = {"backend": "openai", "server": SERVER}


def recipe(section: str, fields: dict[str, Any], **more: Any) -> Recipe:
    method = METHODS.get(section, "grpo")
    data: dict[str, Any] = {"name": "r", "method": method, "model": {"path": "m"}, **more}
    if method == "et-agent":
        data["et_agent"] = {"phases": ["rft"]}
    if section == "splice.continuation":
        data["splice"] = {"mode": "continued"}
    place = data
    for part in section.split("."):
        place = place.setdefault(part, {})
    place.update(fields)
    if section == "evaluation.sets.more":
        place["split"] = "val"
    return parse(data)


@pytest.mark.parametrize("section", METHODS)
def test_every_section_that_samples_takes_all(section: str) -> None:
    _, fields = sampling_sections(recipe(section, SET))[section]
    assert fields.sampling(temperature=0.5, max_new_tokens=7) == DRAWN


@pytest.mark.parametrize("section", METHODS)
def test_what_no_recipe_sets_is_in_no_id(section: str) -> None:
    _, fields = sampling_sections(recipe(section, {}))[section]
    names = {name for name in SET if getattr(fields, name) != getattr(SamplingFields(), name)}
    plain: Any = identifying_data(recipe(section, {}))
    for part in section.split("."):
        plain = plain[part]
    # These had a top-p before the others came.
    old = {"top_p"} if section in ("search", "eto.explore") or section.startswith("et_agent") else set()
    assert SET.keys() & plain.keys() == old | names
    assert fingerprint(Sampling()) == fingerprint(
        {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 500, "stop": [], "logprobs": False}
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("min_p", 1.5), ("repetition_penalty", 0), ("stop", [""])],
)
def test_a_value_out_of_range_is_one_sentence(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^recipe: evaluation\.{field}[.0]*: [^;]* \(got ") as caught:
        recipe("evaluation", {field: value})
    assert str(caught.value).count("evaluation.") == 1


@pytest.mark.parametrize("field", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_group_rl_refuses_what_changes_its_probabilities(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"grpo\.{field}: group RL needs the probabilities"):
        recipe("grpo", {field: SET[field]})
    assert recipe("grpo", {"stop": ["END"]}).grpo.stop == ("END",)


@pytest.mark.parametrize(
    ("section", "role"),
    [("critique", "judge"), ("et_agent.flywheel.editor", "editor"), ("et_agent.flywheel.reflector", "reflector")],
)
def test_a_served_model_is_sent_what_its_server_is_said_to_know(section: str, role: str) -> None:
    recipe(section, {"top_p": 0.9, "stop": ["END"]}, models={role: SERVED})
    with pytest.raises(ConfigError, match=rf"{section}\.top_k: .* name it in models\.{role}\.server\.sampling_fields"):
        recipe(section, {"top_k": 20}, models={role: SERVED})
    server = SERVER | {"sampling_fields": ["top_k"]}
    recipe(section, {"top_k": 20}, models={role: SERVED | {"server": server}})
    with pytest.raises(ConfigError, match="extra_body: top_k is set by other fields"):
        recipe(section, {}, models={role: SERVED | {"server": server | {"extra_body": {"top_k": 3}}}})


@pytest.mark.parametrize("role", ["editor", "reflector"])
def test_a_role_of_the_flywheel_without_a_model_is_taken_by_the_teacher_that_collects(role: str) -> None:
    section = f"et_agent.flywheel.{role}"
    with pytest.raises(ConfigError, match=rf"{section}\.top_k: .* name it in models\.teacher\.server\.sampling_fields"):
        recipe(section, {"top_k": 20}, models={"teacher": SERVED})
    recipe(section, {"top_k": 20}, models={"teacher": SERVED, role: {"path": "m"}})
    mute = SERVED | {"server": SERVER | {"continues": False}}
    with pytest.raises(ConfigError, match=r"I1 and I4 begin .* set models\.teacher\.server\.continues"):
        recipe(section, {}, models={"teacher": mute})


def test_the_actor_of_every_section_is_looked_at() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.min_p: .* name it in model\.server\.sampling_fields"):
        parse({"name": "r", "model": SERVED, "evaluation": {"min_p": 0.1}})
