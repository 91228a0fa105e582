"""Thoughts before bare actions: actions stay to the byte, and nothing is asked twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import thinking
from hypothesis import given
from hypothesis import strategies as st
from thinking import RIGHT, WRONG, Porch, answered, bare, musing, thought_of, workplace

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.environments.registry import make
from agentr_core.environments.webshop.world import WebShop
from agentr_core.errors import ConfigError, ModelUnavailable
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.runtime.context import RunContext
from agentr_core.stages.dataset import dataset
from agentr_core.stages.demonstrate import best_expert_episodes, check_expert, is_bare, with_label, with_thought
from agentr_core.stages.report import build_report
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.queries import runs

TextOf = Callable[[RunContext], list[str]]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Action: go to desk 1", "Thought: so\nAction: go to desk 1"),
        ("Action:\ngo  to desk 1 ", "Thought:\nso\n\nAction:\ngo  to desk 1 "),
        ("Thought:\n\nAction: look", "Thought: so\nAction: look"),
        ("Action 1: search[red  shoes]", "Thought: so\nAction 1: search[red  shoes]"),
    ],
)
def test_a_thought_goes_before_the_label_and_nothing_else_changes(reply: str, expected: str) -> None:
    assert is_bare(reply)
    result = with_thought(reply, "so")
    assert result == expected
    assert not is_bare(result)


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1), st.text("abc .,", min_size=1))
def test_no_thought_changes_what_the_world_reads(action: str, thought: str) -> None:
    world = Porch()
    reply = with_label(world, action)
    assert world.parse(with_thought(reply, thought)) == world.parse(reply)


@pytest.mark.parametrize("world", [TextCraft(), WebShop()], ids=lambda world: str(world.name))
def test_the_actions_of_experts_are_read_as_before_when_their_thoughts_are_new(world: TextCraft | WebShop) -> None:
    for instance in world.instances("train")[:20]:
        for reply in world.expert(instance) or ():
            action = world.parse(reply)
            bare_reply = with_label(world, action)
            assert not is_bare(reply)
            assert is_bare(bare_reply)
            assert world.parse(with_thought(bare_reply, "I do what is left.")) == action


@pytest.mark.slow
async def test_every_bare_action_gets_a_thought_and_stays_to_the_byte(tmp_path: Path, tiny_model_dir: Path) -> None:
    ctx = workplace(tmp_path, tiny_model_dir, bare(tmp_path))
    assert [stage.name for stage in ctx.plan(1).stages] == ["demonstrate", "think", "dataset", "train", "evaluate"]
    assert await thought_of(ctx) == {"expert": 6, "rejected": 0, "asked": 6}

    experts = best_expert_episodes(ctx, 1)
    assert len(experts) == 6
    for key, episode in experts.values():
        assert [step.action for step in episode.steps] == [WRONG, RIGHT]
        assert [step.reply for step in episode.steps] == [
            f"Thought: I have seen 0 answers and try another.\nAction: {WRONG}",
            f"Thought: I have seen 1 answers and try another.\nAction: {RIGHT}",
        ]
        assert episode.success
        derivations = ctx.store.rows(
            "select operator, position, length(prompt_hash) from derivation where child_id = ?", key
        )
        assert derivations == [("thoughts", 0, 16)]
    edits = ctx.store.rows("select role, prompt_hash, subject, prompt from edit order by subject")
    assert len(edits) == len(set(edits)) == 12
    assert edits[0][0] == "editor"
    assert edits[0][2] == "door/train/0#0 step 0"
    samples = load_samples(ctx.store, iteration_id=ctx.iteration_id(1)).values()
    texts = [message.text for sample in samples for message in sample.messages if message.train]
    assert len(texts) == 12
    assert all(text.startswith("Thought: I have seen") for text in texts)
    assert (await dataset(ctx, 1))["samples"] == {"expert": 6}
    assert [(stage.name, stage.count) for stage in build_report(ctx, 1).funnel][:2] == [
        ("expert episodes", 6),
        ("samples", 6),
    ]
    assert ctx.store.rows("select * from v_orphans") == []


@pytest.mark.slow
async def test_the_editor_sees_no_later_step_and_no_thought_is_asked_for_where_there_is_one(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    file = bare(tmp_path, f"Thought: I am polite.\nAction: {WRONG}", RIGHT)
    ctx = workplace(tmp_path, tiny_model_dir, file)
    await thought_of(ctx)
    (episode, *_) = (item for _, item in best_expert_episodes(ctx, 1).values())
    assert episode.steps[0].reply == f"Thought: I am polite.\nAction: {WRONG}"
    log = answered(tmp_path / "answered")
    assert len(log) == 6
    assert all("It opens." not in prompt and "Wrong 1." in prompt for prompt in log)


@pytest.mark.slow
async def test_a_later_iteration_and_a_second_go_ask_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    file = bare(tmp_path)
    ctx = workplace(tmp_path, tiny_model_dir, file)
    await thought_of(ctx)
    assert (await thought_of(workplace(tmp_path, tiny_model_dir, file)))["asked"] == 0
    await begin_second(ctx)
    assert (await thought_of(ctx, 2))["asked"] == 0
    first, second = ([episode.steps for _, episode in best_expert_episodes(ctx, at).values()] for at in (1, 2))
    assert first == second
    assert len(answered(tmp_path / "answered")) == 12


async def begin_second(ctx: RunContext) -> None:
    """Let the run have a policy for its second iteration: that of the first, untrained."""
    first, second = ctx.iteration_id(0), ctx.iteration_id(1)
    with ctx.store.transaction() as con:
        con.execute(
            "update iteration set checkpoint_out = (select checkpoint_out from iteration where iteration_id = ?) "
            "where iteration_id = ?",
            [first, second],
        )


@pytest.mark.slow
async def test_what_cannot_be_read_is_asked_again_and_then_turned_away(tmp_path: Path, tiny_model_dir: Path) -> None:
    def moody(prompt: str, seed: int) -> str:
        if "Door 3" in prompt:
            return "Action: nothing but this"
        num_prompts = len(answered(tmp_path / "answered"))
        return "" if num_prompts % 2 else musing(prompt, seed)

    ctx = workplace(tmp_path, tiny_model_dir, bare(tmp_path), "scale.concurrency=1", reply=moody)
    counts = await thought_of(ctx)
    assert (counts["expert"], counts["rejected"]) == (5, 1)
    assert ctx.store.rows("select subject, reason from rejection where stage = 'expert'") == [
        ("door/train/3#0", "no-thought")
    ]
    assert ctx.store.rows("select count(*) from edit where subject like 'door/train/3#0 step 0%'") == [(3,)]
    assert ctx.store.rows("select count(*) > 0 from edit where subject like '% try 2'") == [(True,)]


@pytest.mark.slow
async def test_an_editor_that_says_nothing_is_told_in_one_sentence(tmp_path: Path, tiny_model_dir: Path) -> None:
    ctx = workplace(tmp_path, tiny_model_dir, bare(tmp_path), reply=lambda prompt, seed: " ")
    with pytest.raises(ConfigError, match=r"^no thought could be read from what the editor wrote for any of 6 demonst"):
        await thought_of(ctx)


@pytest.mark.slow
async def test_an_editor_that_is_cut_within_its_thoughts_stops_the_stage(tmp_path: Path, tiny_model_dir: Path) -> None:
    def endless(prompt: str, seed: int) -> str:
        return f"<think> I am asked for{' a thought' * 2000}"

    ctx = workplace(tmp_path, tiny_model_dir, bare(tmp_path), "eto.expert.thoughts.tries=9", reply=endless)
    with pytest.raises(ConfigError, match=r"^20 of 20 replies of the editor \(editor\) were cut.*a reasoning parser"):
        await thought_of(ctx)
    replies, unreadable = runs.unreadable_reply_counts(ctx.store, ctx.iteration_id(1))["editor"]
    assert replies == unreadable >= 20


@pytest.mark.slow
async def test_an_editor_that_thinks_gives_what_follows(tmp_path: Path, tiny_model_dir: Path) -> None:
    ctx = workplace(
        tmp_path, tiny_model_dir, bare(tmp_path), reply=lambda *args: "<think>\nI am asked.\n</think>\n\nI try it."
    )
    assert (await thought_of(ctx))["expert"] == 6
    replies = {step.reply for _, episode in best_expert_episodes(ctx, 1).values() for step in episode.steps}
    assert replies == {f"Thought: I try it.\nAction: {word}" for word in (WRONG, RIGHT)}


@pytest.mark.slow
async def test_a_fault_of_the_editor_is_tried_again_like_any_call(tmp_path: Path, tiny_model_dir: Path) -> None:
    faults = [ModelUnavailable("overloaded")]

    def faulty(prompt: str, seed: int) -> str:
        if faults:
            raise faults.pop()
        return musing(prompt, seed)

    ctx = workplace(tmp_path, tiny_model_dir, bare(tmp_path), "scale.concurrency=1", reply=faulty)
    assert (await thought_of(ctx))["expert"] == 6
    assert ctx.store.rows('select "class", level, stage from event') == [("ModelUnavailable", "warning", "think")]


@pytest.mark.slow
@pytest.mark.parametrize("fatal", [6, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 12))])
async def test_a_kill_asks_nothing_twice(tmp_path: Path, tiny_model_dir: Path, fatal: int) -> None:
    file, log = bare(tmp_path), tmp_path / "answered"
    program = [sys.executable, thinking.__file__, str(tmp_path), str(tiny_model_dir), str(file), str(fatal)]
    process = subprocess.run(program, capture_output=True, text=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert len(answered(log)) == fatal - 1
    assert (await thought_of(workplace(tmp_path, tiny_model_dir, file, "scale.concurrency=1")))["expert"] == 6
    assert len(answered(log)) == len(set(answered(log))) == 12


def test_recipes_say_where_thoughts_have_no_place(tiny_model_dir: Path) -> None:
    data = {"name": "r", "method": "eto", "model": {"path": str(tiny_model_dir)}, "environment": {"name": "reasoning"}}
    recipe = parse(data, ["eto.expert.thoughts.enabled=true"])
    env = make("reasoning", {})
    with pytest.raises(ConfigError, match=r"^eto\.expert\.thoughts: replies in reasoning are not a thought and an ac"):
        check_expert(recipe, env, env.instances("train")[:1], method_of(recipe))
    with pytest.raises(ConfigError, match=r"eto\.expert\.thoughts: has no use unless enabled"):
        parse(data, ["eto.expert.thoughts.tries=5"])
