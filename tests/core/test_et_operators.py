"""Each operator of the flywheel on the world of reasoning: what editor and reflector are asked, and
what becomes of what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from families import HALVED, RIGHT, TWICE, WRONG, Staff, begun, by_turn, texts
from toolboxes import Bench

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.environments.reasoning.grammar import strict_fault
from agentr_core.environments.reasoning.world import Reasoning
from agentr_core.methods.et_agent.evolve import evolve
from agentr_core.methods.et_agent.operators import HINTS
from agentr_core.methods.et_agent.selection import select_rft
from agentr_core.types import Instance

pytestmark = pytest.mark.slow
RESULT = "\n<result>\n{}\n</result>\n"
CODE = "<python>print(42)</python>"
SUCCESSES = "select success from trajectory where source = 'flywheel' order by 1"


def silent(asked: str, seed: int) -> str:
    raise AssertionError(f"nobody was to be asked {asked[:60]!r}")


async def run_operator(
    tmp_path: Path, model: Path, operator: str, actor: Any, *, editor: Any = silent, reflector: Any = silent
) -> tuple[Any, Staff, Bench]:
    """Return what a round of one operator leaves."""
    staff, bench = Staff({"actor": actor, "editor": editor, "reflector": reflector}), Bench({})
    side = "correct" if operator[0] == "C" else "incorrect"
    flywheel = {"rounds": 1, "correct": [], "incorrect": [], side: [operator]}
    ctx = await begun(tmp_path, model, staff, flywheel, tools=bench)
    await evolve(ctx, 1)
    assert ctx.store.query("select * from v_orphans").empty
    return ctx, staff, bench


def rejections(ctx: Any) -> list[tuple[str, str]]:
    return [(str(a), str(b)) for a, b in ctx.store.rows("select subject, reason from rejection order by all")]


def derivation(ctx: Any) -> tuple[Any, ...]:
    ((operator, position, round_, seed, prompt),) = ctx.store.rows(
        "select operator, position, round, seed is not null, prompt_hash <> '' from derivation"
    )
    return operator, position, round_, seed, prompt


async def test_a_fresh_one_is_drawn_beside_a_right_one(tmp_path: Path, tiny_model_dir: Path) -> None:
    ctx, staff, _ = await run_operator(tmp_path, tiny_model_dir, "C0", by_turn(HALVED))
    assert derivation(ctx) == ("C0", None, 1, True, False)
    first_seed, _, second_seed, _ = [request.seed for request in staff.requests("actor")]
    assert first_seed != second_seed
    assert texts(ctx, "C0") == [HALVED + RESULT.format(21) + RIGHT]


async def test_a_redundant_step_is_written_anew_and_carried_out(tmp_path: Path, tiny_model_dir: Path) -> None:
    def editor(asked: str, seed: int) -> str:
        assert "### Step 2\n" + HALVED in asked
        assert "21" in asked
        assert "actor" not in asked
        return (
            "Step: 1\nAnalysis: One call will do.\nCORRECTED STEP: I halve it at once. "
            "<python>print(6 * 7 // 2)</python><result>42</result> and more"
        )

    ctx, staff, bench = await run_operator(tmp_path, tiny_model_dir, "C1", by_turn(TWICE, HALVED), editor=editor)
    assert derivation(ctx) == ("C1", 0, 1, True, True)
    step = "<think>I halve it at once.</think>\n<python>print(6 * 7 // 2)</python>"
    assert texts(ctx, "C1") == [step + RESULT.format(21) + HALVED + RESULT.format(21) + RIGHT]
    assert ("python", "print(6 * 7 // 2)") in bench.calls
    (request,) = staff.requests("editor")
    assert (request.sampling.temperature, request.sampling.stop) == (1.0, ())
    assert ctx.store.rows("select prompt like 'redundant-step@%', role, subject from edit") == [
        (True, "editor", "0.1C1")
    ]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Step: no", "nothing-redundant"),
        ("I see none.", "unreadable"),
        ("Step: 1\nAnalysis: x", "unreadable"),
        ("Step: 9\nAnalysis: x\nCorrected Step: <think>y</think>", "step-out-of-range"),
        ("Step: 0\nAnalysis: x\nCorrected Step: <think>y</think>", "nothing-redundant"),
        ("Step: 1\nAnalysis: x\nCorrected Step: <think>y</think><python>print(1)", "unclosed-call"),
    ],
)
async def test_an_edit_that_cannot_be_made_is_stored_with_its_reason(
    tmp_path: Path, tiny_model_dir: Path, said: str, reason: str
) -> None:
    ctx, _, _ = await run_operator(tmp_path, tiny_model_dir, "C1", by_turn(HALVED), editor=lambda asked, seed: said)
    assert rejections(ctx) == [("reasoning/train/0 0.1C1", reason)]
    assert ctx.store.rows("select members, rounds, ended_by from family") == [(1, 1, "no-child")]


async def test_a_step_without_call_or_answer_is_gone_on_from(tmp_path: Path, tiny_model_dir: Path) -> None:
    edit = "Step: 1\nAnalysis: Too long.\nCorrected Step: <think>Short.</think>"

    def actor(turn: str, seed: int) -> str:
        return " Then so.</think>\n" + CODE if turn.endswith("Short.") else by_turn(TWICE)(turn, seed)

    ctx, _, _ = await run_operator(tmp_path, tiny_model_dir, "C1", actor, editor=lambda asked, seed: edit)
    (text,) = texts(ctx, "C1")
    assert text == "<think>Short. Then so.</think>\n" + CODE + RESULT.format(42) + RIGHT
    assert strict_fault(text) == ""
    steps = ctx.store.rows(
        "select s.valid, s.reply from step s join derivation on child_id = trajectory_id where s.position = 0"
    )
    assert steps[0] == (None, "<think>Short.")


async def test_thoughts_are_written_anew_and_nothing_else(tmp_path: Path, tiny_model_dir: Path) -> None:
    def editor(asked: str, seed: int) -> str:
        assert "Write nothing" not in asked
        assert "all 3 thoughts" in asked
        return "Thought 1: I Multiply.\nThought 2:\n<think>I halve,\nthen stop.</think>\nThought 3: Done."

    ctx, _, bench = await run_operator(tmp_path, tiny_model_dir, "C2", by_turn(TWICE, HALVED), editor=editor)
    assert texts(ctx, "C2") == [
        "<think>I Multiply.</think>\n" + CODE + RESULT.format(42)
        + "<think>I halve,\nthen stop.</think>\n<python>print(42 // 2)</python>" + RESULT.format(21)
        + "<think>Done.</think>\n<answer>It is \\boxed{21}.</answer>"
    ]  # fmt: skip
    assert len(bench.calls) == 2, "no tool is called again"
    assert ctx.store.rows("select success, reward from trajectory where source = 'flywheel'") == [(True, 1.0)] * 2
    assert derivation(ctx) == ("C2", None, 1, True, True)


@pytest.mark.parametrize(
    "said",
    [
        "Thought 1: a\nThought 2: b",
        "Thought 1: a\nThought 3: b\nThought 2: c",
        "Thought 1: a\nThought 2:\nThought 3: c",
        "Thought 1: a\nThought 2: <answer>\\boxed{7}</answer>\nThought 3: c",
    ],
)
async def test_thoughts_that_are_not_as_asked_for_make_no_child(
    tmp_path: Path, tiny_model_dir: Path, said: str
) -> None:
    ctx, _, _ = await run_operator(
        tmp_path, tiny_model_dir, "C2", by_turn(TWICE, HALVED), editor=lambda asked, seed: said
    )
    assert rejections(ctx) == [("reasoning/train/0 0.1C2", "unreadable")]


async def test_the_thoughts_of_editor_and_reflector_are_no_part_of_a_step(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The editor's thought holds the text that ends its reply, so that it is asked once more."""

    def editor(asked: str, seed: int) -> str:
        return "<think>\nI write Step: 1 and then Analysis: or so.\n</think>\nStep: 2\nAnalysis: It forgot to halve."

    def reflector(asked: str, seed: int) -> str:
        if asked.endswith("Step: 2\nAnalysis:"):
            return "<think>Well.\n\nWell.</think> It forgot to halve.\n\nAnd so on."
        assert asked.endswith("What is wrong with step 2:\nIt forgot to halve.")
        return "<think>I am to use <think>.</think>\n<think>Now halve.</think><python>print(42 // 2)</python>"

    def actor(turn: str, seed: int) -> str:
        return RIGHT if "Now halve." in turn else by_turn(TWICE, TWICE, then=WRONG)(turn, seed)

    ctx, staff, _ = await run_operator(tmp_path, tiny_model_dir, "I1", actor, editor=editor, reflector=reflector)
    step = "<think>Now halve.</think>\n<python>print(42 // 2)</python>"
    assert texts(ctx, "I1") == [TWICE + RESULT.format(42) + step + RESULT.format(21) + RIGHT]
    assert [request.sampling.stop for request in staff.requests("editor")] == [("Analysis:",), ()]


@pytest.mark.parametrize(
    ("opening", "closing", "thought"),
    [("<think>", "</think>", ""), ("[THINK]", "[/THINK]", ""), ("[THINK]", "[/THINK]", "Now halve.")],
)
async def test_the_only_thought_of_a_reflector_that_thinks_is_its_own(
    tmp_path: Path, tiny_model_dir: Path, opening: str, closing: str, thought: str
) -> None:
    """It wrote the step without the tags of a thought, or has other tags for its own."""

    def reflector(asked: str, seed: int) -> str:
        if asked.endswith("Step: 2\nAnalysis:"):
            return f"{opening}\nWell.\n{closing}\n\nIt forgot to halve."
        thought_part = f"<think>{thought}</think>" if thought else ""
        return f"{opening}\nI am to write a step.\n{closing}\n\n{thought_part}<python>print(42 // 2)</python>"

    def actor(turn: str, seed: int) -> str:
        return RIGHT if "print(42 // 2)" in turn else by_turn(TWICE, TWICE, then=WRONG)(turn, seed)

    def editor(asked: str, seed: int) -> str:
        return "Step: 2\nAnalysis:"

    ctx, *_ = await run_operator(tmp_path, tiny_model_dir, "I1", actor, editor=editor, reflector=reflector)
    step = f"<think>{thought}</think>\n<python>print(42 // 2)</python>"
    assert texts(ctx, "I1") == [TWICE + RESULT.format(42) + step + RESULT.format(21) + RIGHT]


@pytest.mark.parametrize("operator", ["I0", "I1", "I4"])
async def test_nothing_is_made_of_a_reply_that_is_cut_within_its_thought(
    tmp_path: Path, tiny_model_dir: Path, operator: str
) -> None:
    endless = "<think>\nI write Step: 1 and so on" + " and so on" * 4096

    def editor(asked: str, seed: int) -> str:
        return endless if operator == "I0" else "Step: 2\nAnalysis:"

    ctx, *_ = await run_operator(
        tmp_path,
        tiny_model_dir,
        "I4" if operator == "I4" else "I1",
        by_turn(TWICE, TWICE, then=WRONG),
        editor=editor,
        reflector=lambda asked, seed: endless,
    )
    assert texts(ctx, "I1") == texts(ctx, "I4") == []
    assert {reason for _, reason in rejections(ctx)} == {"unreadable"}


async def test_a_flawed_step_is_reviewed_and_written_anew_by_the_reflector(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    def editor(asked: str, seed: int) -> str:
        return "step: 2\nAnalysis: It never halves. Step: 1"

    def reflector(asked: str, seed: int) -> str:
        if asked.endswith("Step: 2\nAnalysis:"):
            assert "### Step 3" not in asked
            return " It forgot to halve.\n\nAnd so on."
        assert asked.endswith("What is wrong with step 2:\nIt forgot to halve.")
        return "<think>Now halve.</think><python>print(42 // 2)</python>"

    def actor(turn: str, seed: int) -> str:
        return RIGHT if "Now halve." in turn else by_turn(TWICE, TWICE, then=WRONG)(turn, seed)

    ctx, staff, bench = await run_operator(tmp_path, tiny_model_dir, "I1", actor, editor=editor, reflector=reflector)
    assert texts(ctx, "I1") == [
        TWICE + RESULT.format(42) + "<think>Now halve.</think>\n<python>print(42 // 2)</python>" + RESULT.format(21)
        + RIGHT
    ]  # fmt: skip
    assert derivation(ctx) == ("I1", 1, 1, True, True)
    assert ctx.store.rows("select success from trajectory where source = 'flywheel' order by 1") == [
        (False,),
        (True,),
    ]
    (editor_request,) = staff.requests("editor")
    assert editor_request.sampling.stop == ("Analysis:",)
    assert all(request.sampling.stop == () for request in staff.requests("reflector")), "stops are of one request"
    assert bench.calls[-1] == ("python", "print(42 // 2)")
    assert ctx.store.rows("select subject, prompt.split('@')[1] from edit order by all") == [
        ("0.1I0", "flawed-step"),
        ("0.1I1", "corrected-step"),
        ("0.1I1", "flaw-analysis"),
    ]


async def test_a_hint_follows_the_flawed_step(tmp_path: Path, tiny_model_dir: Path) -> None:
    def actor(turn: str, seed: int) -> str:
        thinks = turn.rpartition("<think>")[2]
        if thinks in HINTS["math"]:
            return " Right, I halve.</think>\n<python>print(42 // 2)</python>"
        return by_turn(TWICE, then=RIGHT if "I halve" in turn else WRONG)(turn, seed)

    ctx, _, _ = await run_operator(tmp_path, tiny_model_dir, "I2", actor, editor=lambda asked, seed: "Step: 1")
    (text,) = texts(ctx, "I2")
    (hint,) = [hint for hint in HINTS["math"] if hint in text]
    assert text == (
        f"{TWICE}{RESULT.format(42)}<think>{hint} Right, I halve.</think>\n<python>print(42 // 2)</python>"
        + RESULT.format(21) + RIGHT
    )  # fmt: skip
    assert strict_fault(text) == ""
    assert derivation(ctx) == ("I2", 1, 1, True, True)


@pytest.mark.parametrize("operator", ["I2", "I3"])
async def test_a_hint_after_an_answer_takes_it_back(tmp_path: Path, tiny_model_dir: Path, operator: str) -> None:
    def actor(turn: str, seed: int) -> str:
        if any(turn.endswith(hint) for hint in HINTS["math"]):
            return " Yes: 21.</think>\n<answer>\\boxed{21}</answer>"
        return by_turn(TWICE, then=WRONG)(turn, seed)

    ctx, _, _ = await run_operator(tmp_path, tiny_model_dir, operator, actor, editor=lambda asked, seed: "Step: 2")
    (text,) = texts(ctx, operator)
    before, marker, rest = text.partition("<think>I guess.")
    assert (before, marker) == (TWICE + RESULT.format(42), "<think>I guess.")
    assert rest.startswith("\nIt is \\boxed{42}.\n")
    assert rest.count("<answer>") == 1
    assert strict_fault(text) == ""
    assert derivation(ctx) == (operator, 1, 1, True, True)


async def test_a_review_follows_the_whole(tmp_path: Path, tiny_model_dir: Path) -> None:
    def actor(turn: str, seed: int) -> str:
        if turn.endswith("I forgot to halve."):
            return "</think>\n<answer>\\boxed{21}</answer>"
        return WRONG

    def reflector(asked: str, seed: int) -> str:
        assert asked.endswith("Let me go over this again.")
        return " I forgot to halve.\n\nMore."

    ctx, _, _ = await run_operator(tmp_path, tiny_model_dir, "I4", actor, reflector=reflector)
    (text,) = texts(ctx, "I4")
    assert "\nLet me go over this again. I forgot to halve.</think>" in text
    assert strict_fault(text) == ""


async def test_a_hint_goes_on_from_a_trajectory_without_an_answer(tmp_path: Path, tiny_model_dir: Path) -> None:
    def actor(turn: str, seed: int) -> str:
        if any(turn.endswith(hint) for hint in HINTS["math"]):
            return "</think>\n<answer>\\boxed{21}</answer>"
        return "I do not know."

    ctx, _, _ = await run_operator(tmp_path, tiny_model_dir, "I3", actor)
    (text,) = texts(ctx, "I3")
    assert text.startswith("<think>I do not know.I do not know.\n")
    assert strict_fault(text) == ""
    assert ctx.store.rows("select success from trajectory where source = 'flywheel' order by 1") == [
        (False,),
        (True,),
    ]


class Crafting(TextCraft):
    """Crafting, of which one instance is trained on and one is held out."""

    def instances(self, split: str) -> Sequence[Instance]:
        return super().instances(split)[:1]


@pytest.mark.parametrize("operator", ["C0", "C1", "I1", "I2", "I3"])
async def test_steps_of_other_worlds_are_varied_too(tmp_path: Path, tiny_model_dir: Path, operator: str) -> None:
    env = Crafting()
    (instance,) = env.instances("train")
    way = list(env.expert(instance) or ())
    look = "Thought: I look.\nAction: inventory"
    wrong = operator[0] == "I"

    def actor(turns: str, seed: int) -> str:
        messages = turns.split("\n\n")
        has_hint = any(hint in messages for hint in HINTS["steps"]) or way[0] in messages
        num_done = sum(reply in messages for reply in way)
        return look if (wrong and not has_hint) or look not in messages else way[num_done]

    def editor(asked: str, seed: int) -> str:
        assert "### Step 1\n" + look in asked
        return f"Step: 1\nAnalysis: It only looks.\nCorrected Step: {way[0]}"

    staff = Staff({"actor": actor, "editor": editor, "reflector": lambda asked, seed: way[0]})
    flywheel: dict[str, Any] = {"rounds": 1, "max_steps": 12, "correct": ["C0"], "incorrect": ["I3"]}
    flywheel["incorrect" if wrong else "correct"] = [operator]
    world: dict[str, Any] = {"environment": {"name": "textcraft"}, "instances": {"train_limit": 1}}
    ctx = await begun(tmp_path, tiny_model_dir, staff, flywheel, make_environment=Crafting, **world)
    await evolve(ctx, 1)
    positions = {"C0": None, "C1": 0, "I1": 0, "I2": 1, "I3": 12}
    children = ctx.store.rows("select operator, success, position from v_families where round = 1")
    assert children == [(operator, True, positions[operator])]
    counts = await select_rft(ctx, 1)
    assert counts["samples"] == (1 if wrong or operator == "C0" else 2)
    assert ctx.store.query("select * from v_orphans").empty


async def test_an_edited_step_runs_in_the_sandbox(tmp_path: Path, tiny_model_dir: Path) -> None:
    def world() -> Reasoning:
        return Reasoning(questions=["numbers"], tools=["python"], cache_dir=str(tmp_path / "cache"))

    golds = [world().problem(instance).golds[0] for instance in world().instances("train")]
    answer = f"<think>So it is.</think>\n<answer>\\boxed{{{golds[0]}}}</answer>"
    edit = "Step: 1\nAnalysis: x\nCorrected Step: <think>Once.</think><python>import os; print(os.getcwd())</python>"
    staff = Staff({"actor": by_turn(TWICE, then=answer), "editor": lambda asked, seed: edit, "reflector": silent})
    flywheel = {"rounds": 1, "correct": ["C1"], "incorrect": []}
    ctx = await begun(
        tmp_path, tiny_model_dir, staff, flywheel, make_environment=world, instances={"only": [0], "test_limit": 1}
    )
    await evolve(ctx, 1)
    calls = "select c.provider, c.status, v.operator from tool_call c join v_families v on v.trajectory_id = c.owner_id"
    rows = ctx.store.rows(f"{calls} where v.operator = 'C1'")
    assert [(status, operator) for _, status, operator in rows] == [("ok", "C1")]
    assert rows[0][0] not in ("", "none"), "the tool says how code is confined"
