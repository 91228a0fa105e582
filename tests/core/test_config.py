"""Recipes: every fault in one message, overrides, defaults filled in, and the recipes that come
along.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from asked import asked_for

from agentr_core.errors import ConfigError
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.faults import load, parse
from agentr_core.methods.table import method_named, plan_of, plans_of
from agentr_core.recipes.alarms import AlarmsConfig
from agentr_core.recipes.parsing import restore_recipe
from agentr_core.recipes.recipe import Recipe, replace, resolved
from agentr_core.runtime.start import input_hashes

RECIPES = sorted((Path(__file__).parents[2] / "deployments" / "recipes").glob("*.yaml"))
TINY = next(path for path in RECIPES if path.stem == "textcraft-tiny")
LEAST: dict[str, object] = {"name": "r", "model": {"path": "m"}}


def faults(data: dict[str, object], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(data, overrides)
    return str(caught.value)


def test_all_faults_are_reported_together() -> None:
    message = faults(
        {
            "name": "r",
            "model": {"path": "m", "pth": "x"},
            "search": {"dives": 0, "temperature": "hot"},
            "pairs": {"alpha": [0.5, 1.5]},
            "nonsense": 1,
        }
    )
    assert "model.pth: unknown field" in message
    assert "search.dives: " in message
    assert "search.temperature: " in message
    assert "(got 'hot')" in message
    assert "pairs.alpha.1: " in message
    assert "nonsense: unknown field" in message
    title, *lines = message.splitlines()
    assert (title, len(lines)) == ("recipe: 5 faults", 5)


def test_a_missing_field_is_told_without_what_stands_around_it() -> None:
    assert faults({"model": {"path": "m"}}) == "recipe: name: a value is missing"


def test_fields_that_do_not_go_together_are_reported_together() -> None:
    message = faults(
        {
            "name": "r",
            "instances": {"train": "all", "test": "all"},
            "pairs": {"alpha": []},
            "training": {"num_train_epochs": []},
            "data": {"general": {"share": 0.5}},
            "evaluation": {"episodes": 3},
        }
    )
    for field in ("model.path", "instances", "pairs.alpha", "training.num_train_epochs", "data.general.file"):
        assert f"{field}: " in message
    assert "evaluation.episodes: " in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, "x", None])
def test_a_number_out_of_its_range_is_a_fault(value: object) -> None:
    assert "search.exploration: " in faults({**LEAST, "search": {"exploration": value}})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainning.bf16=true", "trainning: unknown field (did you mean training?)"),
        ("search.dive=1", "search.dive: unknown field (did you mean dives?)"),
        ("models.judge.max_btach=1", "models.judge.max_btach: unknown field (did you mean max_batch?)"),
        ("evaluation.sets.renamed.splt=test", "evaluation.sets.renamed.splt: unknown field (did you mean split?)"),
        ("training.launch.processes=2", "training.launch.processes: unknown field (did you mean num_processes?)"),
        ("training.lr=1", "training.lr: unknown field"),
    ],
)
def test_an_unknown_field_names_the_known_one_that_was_meant(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(TINY, [override])
    assert str(error.value).endswith(f": {said}")


def test_an_unknown_method_is_reported_with_the_other_faults() -> None:
    message = "method: there is no method 'agentr' (did you mean agent-r?); installed are agent-r"
    wrong_field = faults({**LEAST, "method": "agentr", "sede": 1, "search": {"width": 0}})
    assert message in wrong_field
    assert "sede: unknown field (did you mean seed?)" in wrong_field
    assert "search.width: " in wrong_field
    parts = faults({"name": "r", "method": "agentr", "pairs": {"alpha": []}})
    assert message in parts
    assert "pairs.alpha: give at least one threshold" in parts
    assert "model.path: name the directory" in parts
    assert faults({**LEAST, "method": 7}).count("method: ") == 1


def test_a_recipe_that_is_not_there_names_its_folder_and_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "doors.yaml").write_text("name: doors", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load(Path("mine/door.yaml"))
    assert str(error.value) == (
        f"recipe mine/door.yaml in {tmp_path} does not exist (did you mean doors.yaml?); `agentr recipes` lists "
        "the shipped ones"
    )
    with pytest.raises(ConfigError, match=rf"^recipe {tmp_path}/other.yaml does not exist; `agentr"):
        load(tmp_path / "other.yaml")
    with pytest.raises(ConfigError, match=rf"^recipe mine in {tmp_path} is a folder; name"):
        load(Path("mine"))


def test_a_cluster_is_named_or_started_but_not_both() -> None:
    assert "scale.runner: address and workers" in faults(LEAST, "scale.workers=2")
    assert "scale.workers: the cluster" in faults(
        LEAST, "scale.runner=dask", "scale.workers=2", "scale.address='tcp://a:1'"
    )
    assert parse(LEAST, ["scale.runner=ray", "scale.workers=2"]).scale.workers == 2


@pytest.mark.parametrize("name", ["", "Big", "a b", "-a", "a/b"])
def test_a_name_is_fit_for_a_file(name: str) -> None:
    assert "name: " in faults({**LEAST, "name": name})


def test_overrides_are_yaml_and_the_last_one_counts() -> None:
    recipe = parse(
        LEAST, ["search.dives=3", "search.dives=5", "pairs.alpha=[0.1, 0.2]", "data.general.file=g.jsonl", "seed=7"]
    )
    assert (recipe.search.dives, recipe.pairs.alpha, recipe.data.general.file) == (5, (0.1, 0.2), "g.jsonl")
    assert (recipe.seed, recipe.model.path) == (7, "m")


def test_an_override_finds_what_is_named_by_a_number() -> None:
    data = {**LEAST, "instances": {"depths": {1: 0.5, 2: 0.5}, "from_iteration": {2: {"depths": {2: 1.0}}}}}
    changes = ["instances.from_iteration.2.expert_steps=[2, 9]", "instances.depths.1=0.25", "instances.depths.3=0.25"]
    instances = parse(data, changes).instances
    assert instances.depths == {1: 0.25, 2: 0.5, 3: 0.25}
    assert (instances.at_iteration(2).depths, instances.at_iteration(2).expert_steps) == ({2: 1.0}, (2, 9))


def test_overrides_leave_the_given_mapping_alone() -> None:
    data = {"name": "r", "model": {"path": "m"}}
    parse(data, ["model.path=other"])
    assert data == LEAST


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed", "must look like section.field=value"),
        ("=1", "must look like section.field=value"),
        ("seed=[", "the value is not YAML"),
        ("name.x=1", "name is a value, not a section"),
        ("search.divs=1", "search.divs: unknown field"),
        ("search.=1", "must look like section.field=value"),
    ],
)
def test_a_wrong_override_is_named(override: str, said: str) -> None:
    assert said in faults(LEAST, override)


def test_the_last_of_the_values_by_iteration_goes_on() -> None:
    recipe = parse({**LEAST, "pairs": {"alpha": [0.5, 0.7]}, "training": {"num_train_epochs": [3, 1]}})
    assert [recipe.alpha(i) for i in (1, 2, 3, 9)] == [0.5, 0.7, 0.7, 0.7]
    assert [recipe.num_train_epochs(i) for i in (1, 2, 3)] == [3.0, 1.0, 1.0]


def test_a_recipe_cannot_be_changed_but_copied() -> None:
    recipe = parse(LEAST)
    with pytest.raises(AttributeError):
        recipe.seed = 1  # type: ignore[misc]
    assert (replace(recipe, seed=1).seed, recipe.seed) == (1, 0)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads_and_comes_back_from_its_resolved_form(path: Path) -> None:
    recipe = load(path)
    plain = json.loads(json.dumps(resolved(recipe)))
    assert recipe.name == path.stem, "a recipe is found by its name"
    assert recipe.description
    assert parse(plain) == recipe
    assert resolved(parse(plain)) == resolved(recipe)


def test_resolved_has_every_default() -> None:
    plain = resolved(parse(LEAST))
    assert plain["search"]["dives"] == 8
    assert plain["pairs"]["alpha"] == [0.5, 0.7, 1.0]
    assert set(plain) == set(Recipe.__dataclass_fields__)


def test_a_recipe_that_cannot_be_read_says_which_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.yaml cannot be read as YAML"):
        load(broken)
    broken.write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load(broken)
    for text, kind in (("- name", "is a list"), ("42", "is a single value"), ("", "is empty"), ("# -", "is empty")):
        broken.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"broken\.yaml {kind}; give fields, a line each"):
            load(broken)
    broken.write_text("name: r\nmodel: {path: m}\nextra: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.yaml: extra: unknown field"):
        load(broken)


def test_the_prefix_cache_is_sized_in_the_recipe_and_is_no_part_of_what_is_asked_for() -> None:
    plain = parse(LEAST)
    assert plain.model.prefix_cache_gib == 1.0
    large = parse(LEAST, ["model.prefix_cache_gib=16", "models.judge.path=j", "models.judge.prefix_cache_gib=0"])
    assert large.model.prefix_cache_gib == 16
    default = parse(LEAST, ["models.judge.path=j"])
    assert asked_for(large) == asked_for(default)
    assert "prefix_cache_gib" in resolved(plain)["model"]


@pytest.mark.parametrize("backend", ["vllm", "openai"])
def test_only_the_model_in_this_process_has_a_prefix_cache_of_ours(backend: str) -> None:
    section = {"backend": backend, "prefix_cache_gib": 2.0}
    message = faults({"name": "r", "model": section})
    assert "model.prefix_cache_gib: only backend transformers has this cache; leave it out, or set model.b" in message
    # Told together with what else is wrong.
    assert ("model.path: " if backend == "vllm" else "model.server.model: ") in message
    assert "model.prefix_cache_gib: " in faults({"name": "r", "model": {"path": "m", "prefix_cache_gib": -1}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: r\nseed: 1\nmodel: {path: m}\nseed: 2\n", r"seed is there twice, on lines 2 and 4"),
        ("name: r\nmodel: {path: m, path: n}\n", r"path is there twice, on lines 2 and 2"),
        ("name: r\nenvironment: {options: {yes: 1, true: 2}}\n", r"true is there twice"),
        ("name: r\nmodel: &m\n  path: *m\n", r"the value of line 2 contains itself through an alias"),
        ("&r\nname: r\nmodel: [*r]\n", r"contains itself through an alias"),
        ("name: r\nseed: " + "1" * 5000 + "\n", r"the number on line 2 has 5,000 digits"),
        ("name: r\nseed: 0x" + "f" * 5000 + "\n", r"the number on line 2 has 5,002 digits"),
        ("name: r\nseed: 010\n", r"010 on line 2 is to base 8 in YAML; write it without the first 0"),
        ("name: r\nseed: -0_17\n", r"-0_17 on line 2 is to base 8"),
        ("name: r\nseed: 0" + "7" * 900 + "\n", r"777\.\.\. on line 2 is to base 8"),
        ("name: r\nseed: 0o10\n", r"0o10 on line 2 is a text in YAML 1\.1; write the number to base 10"),
        ("name: r\nseed: 1:30\n", r"1:30 on line 2 is a number to base 60 in YAML; write it out"),
        ("name: r\nmodel:\n  options: {limit_s: [1:30.5]}\n", r"1:30.5 on line 3 is a number to base 60"),
        ("name: r\nseed: 1" + ":30" * 5000 + "\n", r"the number on line 2 has 15,001 digits"),
        ("name: r\nenvironment: {options: {010: 1}}\n", r"010 on line 2 is to base 8"),
        ("name: r\nseed: 2026-02-31\n", r"a value in it cannot be read \(day is out of range"),
        pytest.param("name: " + "[" * 5000, r"it is nested too deeply", marks=pytest.mark.slow),
        (
            "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
            r"more than 100,000 values once its aliases are written out",
        ),
    ],
)
def test_yaml_that_would_lose_something_or_never_end_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as caught:
        load(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_aliases_and_merged_keys_are_no_duplicates(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        "name: r\nmodel: &m {path: m, max_batch: 4}\nmodels:\n  judge: {<<: *m, path: j}\n  editor: {<<: *m}\n",
        encoding="utf-8",
    )
    recipe = load(file)
    judge, editor = recipe.models.judge, recipe.models.editor
    assert judge is not None
    assert (judge.path, judge.max_batch) == ("j", 4)
    assert editor == recipe.model


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=true", "seed: give a number, not true"),
        ("iterations=yes", "iterations: give a number, not true"),
        ("search.temperature=off", "search.temperature: give a number, not false"),
        ("pairs.alpha=[0.5, true]", "pairs.alpha.1: give a number, not true"),
        ("data.replay=1", "data.replay: give true or false, not 1"),
        ("seed=" + "9" * 30, "seed: give a number of at most 9223372036854775807"),
        ("iterations=1" + "0" * 30, "iterations: give a number of at most 9223372036854775807"),
        ("environment.options.rooms=" + "9" * 30, "environment.options.rooms: give a number of at most"),
        ("seed=" + "9" * 5000, "override 'seed': the value is not YAML: the number on line 1 has 5,000 digits"),
        ("search={dives: 1, dives: 2}", "dives is there twice"),
        ("seed=010", "override 'seed': the value is not YAML: 010 on line 1 is to base 8"),
        ("pairs.alpha=[0.5, 010]", "010 on line 1 is to base 8"),
        ("environment.options.rooms=0o10", "0o10 on line 1 is a text in YAML 1.1"),
        ("environment.options.patience_s=1:30", "1:30 on line 1 is a number to base 60"),
    ],
)
def test_no_value_is_taken_for_one_of_another_kind(override: str, said: str) -> None:
    message = faults(LEAST, override)
    assert said in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("text", "seed"), [("0", 0), ("10", 10), ("1_000", 1000), ("0x10", 16), ("0b11", 3), ("'010'", 10), ("08", 8)]
)
def test_a_number_is_what_a_person_wrote(text: str, seed: int) -> None:
    assert parse(LEAST, [f"seed={text}"]).seed == seed


def test_options_of_an_environment_keep_their_kind() -> None:
    recipe = parse(LEAST, ["environment.options={loud: true, rooms: 3, names: [yes, 1]}"])
    assert recipe.environment.options == {"loud": True, "rooms": 3, "names": [True, 1]}


def test_what_differs_between_iterations_is_known_without_going_through_them() -> None:
    recipe = parse(LEAST, ["iterations=1" + "0" * 18])
    assert list(recipe.distinct_iterations()) == [1, 2, 3, 4]
    assert list(parse(LEAST, ["iterations=2"]).distinct_iterations()) == [1, 2]


def test_fields_that_came_later_are_in_no_id_while_they_have_their_default() -> None:
    # As at the version before them, which made workspaces that are still in use.
    ids = {"agent-r": "6fbac9cb4678c44d", "eto": "dea8b3c04f7e6f59", "compare": "574c297287f4399e"}
    assert {method: fingerprint(asked_for(parse({**LEAST, "method": method}))) for method in ids} == ids
    default = fingerprint(asked_for(parse(LEAST)))
    assert fingerprint(asked_for(parse(LEAST, ["evaluation.repeats=0", "evaluation.sets={}"]))) == default
    assert fingerprint(asked_for(parse(LEAST, ["evaluation.repeats=3"]))) != default
    assert fingerprint(asked_for(parse(LEAST, ["evaluation.sets={more: {split: rest}}"]))) != default


def test_evaluation_sets_are_checked() -> None:
    wrong = faults(
        LEAST,
        "evaluation.sets.test={split: rest}",
        "evaluation.sets.many={split: rest, episodes: 8}",
        "evaluation.sets.same={split: train}",
    )
    assert "evaluation.sets.test: every recipe has an evaluation of this name" in wrong
    assert "evaluation.sets.many.episodes: more than one episode at temperature 0" in wrong
    assert "evaluation.sets.same.split: 'train' is the split that is trained on" in wrong


@pytest.mark.parametrize("section", ["evaluation", "grpo", "eto.explore", "environments.tables.evaluation"])
def test_no_reply_is_a_repeated_one_the_first_time(section: str) -> None:
    worlds = {"environments": {"tables": {"name": "textcraft"}}} if section.startswith("environments") else {}
    wrong = faults({**LEAST, **worlds}, f"{section}.repeats=1")
    assert f"{section}.repeats: 1 would end every episode at its first reply; give 2 or more, or 0 for never" in wrong


SERVED = {"backend": "vllm", "path": "m"}


@pytest.mark.parametrize(
    ("actor", "editor", "said"),
    [
        ({}, {}, ""),
        ({"gpus": [0]}, {"gpus": [1]}, ""),
        ({"gpus": [0, 1], "replicas": 2}, {"gpus": [1]}, "models.judge.vllm.gpus: GPU 1 is that of model, too"),
        ({"gpus": [0], "gpu_memory_utilization": 0.4}, {"gpus": [0], "gpu_memory_utilization": 0.5}, ""),
        ({"gpus": [0]}, {"gpus": [1], "replicas": 2}, "models.editor.vllm.gpus: name the 2 GPUs of all replicas"),
        ({"gpus": [0, 0], "replicas": 2}, {}, "model.vllm.gpus: name the 2 GPUs of all replicas, each once"),
    ],
)
def test_models_that_are_served_at_once_take_gpus_of_their_own(
    actor: dict[str, Any], editor: dict[str, Any], said: str
) -> None:
    # Editor and judge are one model, and share its server.
    config = SERVED | {"path": "e", "vllm": editor}
    data = {"name": "r", "model": SERVED | {"vllm": actor}, "models": {"editor": config, "judge": config}}
    if not said:
        assert parse(data).models.editor is not None
        return
    with pytest.raises(ConfigError) as caught:
        parse(data)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "sleeps"),
    [
        ("textcraft-qwen3-4b", False),
        ("reasoning-et-agent", False),
        ("reasoning-et-agent-rl", True),
        ("textcraft-grpo-qwen3-4b", True),
    ],
)
def test_a_sampler_sleeps_only_beside_group_rl(recipe: str, sleeps: bool) -> None:
    file, asleep = TINY.parent / f"{recipe}.yaml", ["model.vllm.sleep=true"]
    if recipe == "reasoning-et-agent":
        asleep.append("et_agent.phases=[rft]")
        asleep.append("grpo={}")
    if sleeps:
        assert load(file, asleep).model.shares_gpus
        with pytest.raises(ConfigError, match=r"grpo\.staleness: with model\.vllm\.sleep, sampler and trainer take"):
            load(file, [*asleep, "grpo.staleness=1"])
        return
    with pytest.raises(ConfigError, match=r"model\.vllm\.sleep: only group RL takes turns with its sampler, and no"):
        load(file, asleep)


def test_an_expert_is_cloned_before_the_first_search() -> None:
    recipe = load(TINY, ["agent_r.phases=[clone, sft]", "iterations=3"])
    stages = [[stage.name for stage in plan_of(recipe, iteration).stages] for iteration in (1, 2, 3)]
    assert stages[0] == ["demonstrate", "dataset", "train", "evaluate"]
    assert stages[1] == stages[2] == ["collect", "critique", "splice", "dataset", "train", "evaluate"]
    assert [plan_of(recipe, iteration).phase for iteration in (1, 2)] == ["clone", ""]
    with pytest.raises(ConfigError, match=r"agent_r.phases: clone alone is data.use=expert"):
        load(TINY, ["agent_r.phases=[clone]"])


def test_group_rl_in_agent_r_wants_an_iteration_for_it() -> None:
    idle = ["grpo.steps=3"]
    with pytest.raises(ConfigError, match=r"grpo: has no use without an iteration rl; name one in agent_r.phases"):
        load(TINY, idle)
    with pytest.raises(ConfigError, match=r"agent_r.phases: name at least one of clone, sft and rl"):
        load(TINY, ["agent_r.phases=[]"])
    recipe = load(TINY, [*idle, "agent_r.phases=[sft, rl]", "grpo.learning_rate=0.0006"])
    first, second = (plan_of(recipe, iteration) for iteration in (1, 2))
    assert [stage.name for stage in second.stages] == ["reinforce", "evaluate"]
    assert first.training is not None
    assert second.training is not None
    assert (first.training.config.learning_rate, second.training.config.learning_rate) == (1e-3, 6e-4)
    assert (first.training.config.max_tokens, second.training.config.max_tokens) == (140_000, 0)
    assert second.training.config.max_grad_norm == first.training.config.max_grad_norm


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model={backend: openai, server: {model: big, base_url: 'http://127.0.0.1:1/v1'}}"],
         r"model.backend: group RL replaces the weights after each step, which a server that others started"),
        (["model.backend=vllm", "training.lora_r=8", "training.publish=adapter"], r"training.publish: a sampler holds"),
        (["training.lora_r=8", "training.use_dora=true"], r"training.use_dora: group RL trains plain LoRA adapters"),
        (["training.lora_r=8", "training.lora_dropout=0.1"], r"training.lora_dropout: group RL trains what sampled"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["textcraft-grpo-tiny", "textcraft-agent-r-rl-tiny"])
def test_what_group_rl_could_not_hand_to_its_samplers_is_told(name: str, changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(TINY.with_name(f"{name}.yaml"), changes)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("textcraft-tiny", ["critique.votes=3"], r"critique.votes: at temperature 0 all votes are the same"),
        ("textcraft-tiny", ["search.method=rollouts", "search.merge=action"], r"search.merge: independent episodes do"),
        ("textcraft-compare-tiny", ["search.method=rollouts", "search.give_up=2"], r"search.give_up: independent epis"),
        ("textcraft-tiny", ["search.expert_start=true", "search.give_up=0"], r"set search.give_up to a number from 1"),
        ("textcraft-tiny", ["search.expert_start=true", "search.give_up=1", "search.dives=1"], r"raise search.dives$"),
        ("textcraft-grpo-tiny", ["grpo.curriculum=uniform", "grpo.expert_share=0.1"], r"grpo.expert_share: a uniform"),
        ("textcraft-grpo-tiny", ["grpo.curriculum=uniform", "grpo.memory=0.1"], r"grpo.memory: a uniform curriculum"),
        ("textcraft-grpo-tiny", ["grpo.revision_share=0.01", "grpo.groups=32"], r"grpo.revision_share: 0.01 of 32"),
        ("textcraft-grpo-tiny", ["grpo.expert_share=0.5", "grpo.memory=0"], r"grpo.memory: at 0 what was won"),
        ("textcraft-grpo-tiny", ["grpo.expert_share=1", "grpo.groups=1"], r"grpo.expert_share: 1 of 1 groups is less"),
        (
            "textcraft-grpo-tiny",
            [
                "grpo.steps=4",
                "grpo.eval_steps=5",
                "evaluation.sets={dev: {split: renamed-test}}",
                "evaluation.development=dev",
            ],
            r"grpo.eval_steps: an iteration has 4 steps, so none is validated",
        ),
        ("textcraft-agent-r-rl-tiny", ["agent_r.phases=[rl]"], r"training.max_tokens: grpo.steps says how long"),
        ("textcraft-agent-r-rl-tiny", ["agent_r.phases=[rl]"], r"data: group RL makes no dataset"),
        (
            "textcraft-grpo-tiny",
            ["training.lr_scheduler_kwargs={min_lr_rate: 0.1}", "grpo.lr_scheduler_type=cosine"],
            r"training.lr_scheduler_kwargs: grpo.lr_scheduler_type replaces the schedule",
        ),
        ("reasoning-et-agent-tiny", ["grpo.expert_share=0.1"], r"grpo.expert_share: the efficiency reward counts"),
        ("reasoning-et-agent-tiny", ["grpo.learning_rate=0.1"], r"grpo.learning_rate: section et_agent.curriculum has"),
        ("reasoning-et-agent-tiny", ["et_agent.phases=[rl]"], r"training.num_train_epochs: grpo.steps says how long"),
    ],
)
def test_what_would_be_ignored_is_told(name: str, changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(TINY.with_name(f"{name}.yaml"), changes)


def test_fine_tuning_alone_may_say_what_its_evaluations_count() -> None:
    recipe = TINY.with_name("reasoning-et-agent.yaml")
    assert load(recipe, ["et_agent.curriculum.counts=steps"]).et_agent.curriculum.counts == "steps"
    for field in ("questions=3", "counts=steps,questions=3"):
        with pytest.raises(ConfigError, match=r"et_agent.curriculum: has no use without an iteration rl"):
            load(recipe, [f"et_agent.curriculum.{setting}" for setting in field.split(",")])


def test_an_adapter_is_no_policy_that_group_rl_goes_on_from() -> None:
    adapters = ["training.lora_r=8", "training.publish=adapter"]
    with pytest.raises(ConfigError, match=r"training.publish: a sampler holds an adapter apart from its model"):
        load(TINY, [*adapters, "iterations=2", "agent_r.phases=[sft, rl]"])
    assert load(TINY.with_name("textcraft-grpo-tiny.yaml"), [*adapters, "iterations=1"]).training.publish == "adapter"


@pytest.mark.parametrize("recipe", ["textcraft-eto-tiny", "textcraft-tiny"])
def test_a_training_cannot_go_back_with_split_weights(recipe: str) -> None:
    split = ["alarms.reaction=back", "training.launch={deepspeed: zero3}"]
    with pytest.raises(ConfigError, match=r"alarms.reaction: weights that ZeRO-3 or FSDP splits cannot be taken back"):
        load(TINY.with_name(f"{recipe}.yaml"), split)


def test_what_became_an_alarm_is_told() -> None:
    collapse = ["eto.dpo.on_collapse=back", "eto.dpo.max_chosen_drop=5"]
    with pytest.raises(ConfigError, match=r"eto.dpo.on_collapse: is alarms.reaction now") as error:
        load(TINY.with_name("textcraft-eto-tiny.yaml"), collapse)
    assert "eto.dpo.max_chosen_drop: is alarms.chosen_drop now; write `alarms: {chosen_drop: 20" in str(error.value)
    data = resolved(load(TINY.with_name("textcraft-eto-tiny.yaml")))
    data["eto"]["dpo"] |= {"max_chosen_drop": None, "on_collapse": "stop"}
    assert restore_recipe(data, source="recipe of run r").alarms == AlarmsConfig()
    assert "on_collapse" in data["eto"]["dpo"], "it is only read"


def test_a_search_that_never_branches_is_told() -> None:
    with pytest.raises(ConfigError, match=r"search.temperature: at 0 all replies at a node are the same; raise it"):
        load(TINY, ["search.temperature=0"])
    assert load(TINY, ["search.temperature=0", "search.width=1"]).search.width == 1


def test_group_rl_alone_takes_arguments_of_its_schedule() -> None:
    changes = ["training.lr_scheduler_type=cosine_with_min_lr", "training.lr_scheduler_kwargs={min_lr_rate: 0.1}"]
    training = plan_of(load(TINY.with_name("textcraft-grpo-tiny.yaml"), changes), 1).training
    assert training is not None
    assert training.config.lr_scheduler_kwargs == {"min_lr_rate": 0.1}


def test_group_rl_follows_the_arguments_of_the_schedule_that_it_has() -> None:
    changes = [
        "training.lr_scheduler_type=warmup_stable_decay",
        "training.lr_scheduler_kwargs={num_decay_steps: 5}",
        "agent_r.phases=[sft, rl]",
    ]
    same = {"num_decay_steps": 5}
    for schedule, arguments in (("null", same), ("warmup_stable_decay", same), ("linear", {})):
        training = plan_of(load(TINY, [*changes, f"grpo.lr_scheduler_type={schedule}"]), 2).training
        assert training is not None
        assert training.config.lr_scheduler_kwargs == arguments


def test_preference_training_does_not_take_the_arguments_of_another_schedule() -> None:
    eto = TINY.with_name("textcraft-eto-tiny.yaml")
    changes = ["training.lr_scheduler_type=cosine_with_min_lr", "training.lr_scheduler_kwargs={min_lr_rate: 0.1}"]
    for schedule, arguments in (("cosine", {}), ("cosine_with_min_lr", {"min_lr_rate": 0.1})):
        recipe = load(eto, [*changes, "eto.phases=[sft, dpo]", f"eto.dpo.lr_scheduler_type={schedule}"])
        training = plan_of(recipe, 2).training
        assert training is not None
        assert training.config.lr_scheduler_kwargs == arguments


def test_the_curriculum_follows_the_arguments_of_the_schedule_that_it_has() -> None:
    recipe = TINY.with_name("reasoning-et-agent-tiny.yaml")
    changes = [
        "training.lr_scheduler_type=warmup_stable_decay",
        "training.lr_scheduler_kwargs={num_decay_steps: 5}",
        "et_agent.phases=[rft, rl]",
    ]
    for schedule, arguments in (("warmup_stable_decay", {"num_decay_steps": 5}), ("constant", {})):
        training = plan_of(load(recipe, [*changes, f"et_agent.curriculum.lr_scheduler_type={schedule}"]), 2).training
        assert training is not None
        assert training.config.lr_scheduler_kwargs == arguments
    with pytest.raises(ConfigError, match=r"training.lr_scheduler_kwargs: et_agent.curriculum.lr_scheduler_type repl"):
        load(recipe, [*changes[:2], "et_agent.phases=[rl]"])


def test_only_continued_splices_ask_a_model() -> None:
    stages = {}
    for mode in ("verified", "continued"):
        plan = plan_of(load(TINY, [f"splice.mode={mode}", "splice.prune=false"]), 1)
        stages[mode] = plan.stage("splice")
    assert (stages["verified"].needs, stages["verified"].roles) == (("env",), ())
    assert (stages["continued"].needs, stages["continued"].spreads) == (("gpu", "env"), True)
    assert stages["continued"].roles == ("actor", "teacher")


def test_rollouts_with_other_stop_strings_are_not_taken_over() -> None:
    def rollouts(*changes: str) -> str:
        recipe = load(TINY.with_name("reasoning-et-agent-tiny.yaml"), [*changes, "models={}"])
        return input_hashes(recipe, asked_for(recipe), weights={}, files={}, prompts={}, started_at=datetime.now(UTC))[
            "rollout"
        ]

    assert rollouts() == rollouts("grpo.stop=[]") != rollouts("grpo.stop=[Therefore]")


@pytest.mark.parametrize("name", ["textcraft-grpo-tiny", "textcraft-agent-r-rl-tiny", "reasoning-et-agent-tiny"])
def test_group_rl_samples_from_vllm_and_trains_adapters(name: str) -> None:
    changes = ["iterations=2", "model.backend=vllm", "model.workers=1", "training.lora_r=8"]
    plans = plans_of(load(TINY.with_name(f"{name}.yaml"), changes))
    assert plans[-1].training is not None
    assert plans[-1].training.config.lora_r == 8


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("textcraft-tiny", ["From trees to training rows"]),
        ("textcraft-eto-tiny", ["From the expert's episodes to training rows", "From episodes to preference pairs"]),
        ("textcraft-grpo-tiny", ["From groups to trained episodes"]),
        ("reasoning-et-agent-tiny", ["From trajectories to training rows", "From questions to trained episodes"]),
        ("textcraft-compare-tiny", ["From trees to training rows"]),
    ],
)
def test_a_method_names_the_way_of_its_data_by_iteration(name: str, titles: list[str]) -> None:
    recipe = load(TINY.with_name(f"{name}.yaml"))
    funnels = [plan.funnel.title for plan in plans_of(recipe) if plan.funnel]
    assert list(dict.fromkeys(funnels)) == titles
    assert plan_of(recipe, 0).funnel is None


def test_a_method_says_whose_inputs_are_stored() -> None:
    taken_over = {name: set(method_named(name).shared_stages) for name in ("agent-r", "eto", "grpo", "et-agent")}
    assert taken_over.pop("et-agent") == {"collect", "critique", "explore", "evaluate", "evolve", "rollout"}
    assert all(stages == {"collect", "critique", "explore", "evaluate"} for stages in taken_over.values())


def test_a_stored_recipe_opens_although_a_later_version_finds_a_fault_in_it() -> None:
    data = resolved(load(TINY)) | {"promote": "best"}
    with pytest.raises(ConfigError, match="promote"):
        parse(data)
    assert restore_recipe(data, source="recipe of run r").promote == "best"
    assert restore_recipe(data | {"base": {"tokens": 5}}, source="recipe of run r").promote == "best"
    with pytest.raises(ConfigError, match=r"recipe of run r: .*pace: unknown field"):
        restore_recipe(data | {"pace": 1}, source="recipe of run r")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.workers=-1", "model.workers: give 1 or more or auto (got -1)"),
        ("instances.only=5", 'instances.only: give a text ("" if empty, digits alone in quotes) or a list'),
        ("search=3", "search: give a section of fields (got 3)"),
        ("pairs.alpha=0.5", "pairs.alpha: give a list (got 0.5)"),
        ("workspace=", 'workspace: give a text ("" if empty, digits alone in quotes) (got nothing)'),
        ("search.dives=", "search.dives: give a whole number (got nothing)"),
        ("search.dives=1.5", "search.dives: give a whole number (got 1.5)"),
        ("search.width=0", "search.width: give 1 or more (got 0)"),
        ("pairs.alpha=[2]", "pairs.alpha.0: give 1 or less (got 2)"),
        ("instances.expert_steps=[1]", "instances.expert_steps.1: a value is missing"),
        ("compare.arms=3", "compare.arms: give a section of fields (got 3)"),
        ("name=a/b", "name: give small letters, digits, '.' and '-', the first a letter or a digit (got 'a/b')"),
        ("training.bf16=maybe", "training.bf16: give true, false or auto (got 'maybe')"),
        (
            "evaluation.sets={A: {split: x}}",
            "evaluation.sets.A, as a name: give small letters, digits and '-', the first",
        ),
        ("search.method=best", "search.method: give mcts or rollouts (got 'best')"),
        ("instances.only='[5)'", "instances.only: give a list of numbers, or a range as a text"),
    ],
)
def test_a_wrong_kind_of_value_is_told_in_the_words_of_recipes(change: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(TINY, [change])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('environment.prompt.system="a \\ud800"', r"environment.prompt.system: a \ud800 has half of a surrogate pair"),
        ('model.from_run="\\udc00"', r"model.from_run: \udc00 has half of a surrogate pair"),
        ('model.path="\\ud83d\\ude00"', "write the character itself"),
        ('training.report_to=["\\ud800"]', "training.report_to.0: "),
        ('environment.options={a: {"\\ud800": 1}}', r"environment.options.a: \ud800 has half"),
        ('environment.prompt.instruction_file="\\0"', "has a zero character; leave it out"),
        ("environment.options={a: .nan}", "environment.options.a: give a finite number, not nan"),
        ("environment.options={a: 2001-01-01}", "environment.options.a: a date is no value of a recipe"),
        ("instances.only=!!binary aGk=", "instances.only: a bytes is no value of a recipe"),
        ("training.num_train_epochs=[]", "training.num_train_epochs: give at least one number"),
        ("pairs.alpha=[]", "pairs.alpha: give at least one threshold"),
    ],
)
def test_what_no_run_could_store_or_train_is_told_in_one_sentence(change: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"name": "x", "model": {"path": "m"}}, [change])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isascii()


def test_a_message_lists_at_most_twenty_faults_and_counts_them() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"name": "x", "model": {"path": "m"}, **{f"field{number}": 1 for number in range(30)}})
    head, *faults, rest = str(caught.value).splitlines()
    assert (head, len(faults), rest) == ("recipe: 30 faults", 20, "  and 10 more")
