"""Messages with native tool calls: prompts, labels, samples and the store, token by token, on the
template of Qwen3; and worlds that are acted in by calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from asked import asked_for
from combination_lock import CombinationLock
from hypothesis import given
from hypothesis import strategies as st
from toolboxes import Bench
from toy import Line, Policy, instance
from toy_paths import ToyTree, critique

from agentr_core.environments import registry
from agentr_core.environments.contract import check
from agentr_core.environments.gateway.dialects.base import read_answer
from agentr_core.environments.native import ACT_TOOL, NO_CALL, is_misread, native_class
from agentr_core.environments.reasoning.problems import Move, Problem
from agentr_core.environments.reasoning.world import ReasoningWorld, Rules
from agentr_core.episodes.rollout import play_replies, restore_state, roll_out_episode
from agentr_core.episodes.transcript import (
    CALL_START,
    NUM_OPENING_TURNS,
    NativeCall,
    NativeTurns,
    call_reply,
    max_droppable,
    read_calls,
    transcript_of,
    whole_episode,
    without_exchanges,
)
from agentr_core.errors import ConfigError, DataFault
from agentr_core.exchange.training_set import export_lines, pair_lines
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.splice import splice
from agentr_core.methods.et_agent.evaluate import check_asking, is_well_formed
from agentr_core.methods.et_agent.operators import step_form_of
from agentr_core.methods.et_agent.selection import check_counts, filter_for_tuning
from agentr_core.methods.faults import load
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.samples.dataset import check_flags, token_row
from agentr_core.samples.identity import IGNORE_INDEX, sample_id
from agentr_core.samples.rendering import Renderer
from agentr_core.store.codec.samples import load_samples, sample_rows
from agentr_core.store.database import Store
from agentr_core.system import data_path
from agentr_core.types import (
    FinishReason,
    Generation,
    Message,
    PathPair,
    Preference,
    PreferenceCase,
    Provenance,
    Request,
    Sample,
    SampleKind,
    Sampling,
    Step,
    StopReason,
    Trajectory,
)
from flows.preflight import checks
from tasks.wiring import load_recipe

ROOT = Path(__file__).parents[2]
OWN = data_path("chat_templates", "qwen3.jinja").read_text(encoding="utf-8")
PUBLISHED = files("trl").joinpath("chat_templates/qwen3.jinja").read_text(encoding="utf-8")
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
"""Tokens of Qwen3 that are not marked as special."""
RIGHT = call_reply(ACT_TOOL, "right", before="I go.")
KNOWLEDGE = Problem(
    id="k",
    question="On which river does Ostra lie?",
    golds=("Red River",),
    source="made",
    domain="knowledge",
    solution=(Move(thought="I look.", tool="search", query="Ostra"), Move(thought="So.")),
)
NativeLine = native_class(Line)


@pytest.fixture(scope="module")
def qwen(make_tiny_tokenizer: Callable[..., Any]) -> Any:
    """A byte-level tokenizer with the marks of Qwen3 and our template for it."""
    tokenizer = make_tiny_tokenizer(template=OWN)
    tokenizer.add_tokens(MARKS)
    return tokenizer


@pytest.fixture(scope="module")
def renderer(qwen: Any) -> Renderer:
    return Renderer(qwen)


def step(
    reply: str, observation: str, ids: Sequence[int] = (), reason: FinishReason | None = "stop", action: str = ""
) -> Step:
    return Step(
        reply=reply, action=action, observation=observation, reward=0.0, token_ids=tuple(ids), finish_reason=reason
    )


def steps_of(renderer: Renderer, tokenizer: Any) -> list[Step]:
    """A call that was ended by its turn, a reply without a call, a call that was cut, and a last
    one.
    """

    def letters(text: str) -> list[int]:
        """One token a letter: not how the tokenizer would write the text, so tokens of a
        sampler.
        """
        return [token for letter in text for token in tokenizer(letter)["input_ids"]]

    end = [renderer.end_of_turn]
    return [
        step(RIGHT, "You are at 1.</tool_response><|im_end|>", [*letters(RIGHT), *end]),
        step("I rest.", NO_CALL, [*letters("I rest."), *end]),
        step(RIGHT[:30], "The call could not be read.", letters(RIGHT[:30]), "length"),
        step(RIGHT, "never read", [*letters(RIGHT), *end]),
    ]


def test_each_prompt_is_a_prefix_of_the_sample_and_its_reply_follows_as_it_was_sampled(
    renderer: Renderer, qwen: Any
) -> None:
    env, steps = NativeLine(), steps_of(renderer, qwen)
    ids = renderer.render_sample(transcript_of(env).sample(env, "Go.", steps, [True] * 4)).input_ids
    for k, turn in enumerate(steps):
        prompt = renderer.render_prompt(transcript_of(env).prompt(env, "Go.", steps[:k]))
        assert ids[: len(prompt)] == prompt
        assert ids[len(prompt) : len(prompt) + len(turn.token_ids)] == list(turn.token_ids)


def test_labels_cover_the_sampled_tokens_and_nothing_else(renderer: Renderer, qwen: Any) -> None:
    env, steps = NativeLine(), steps_of(renderer, qwen)
    ids, labels = renderer.render_sample(transcript_of(env).sample(env, "Go.", steps, [True, False, True, True]))
    trained = [token for turn in (steps[0], steps[2], steps[3]) for token in turn.token_ids]
    assert [label for label in labels if label != IGNORE_INDEX] == trained
    whole = renderer.render_sample(transcript_of(env).sample(env, "Go.", steps, [True] * 4))
    assert whole.input_ids == ids


def test_a_result_is_of_the_tool_and_its_marks_are_characters(renderer: Renderer, qwen: Any) -> None:
    env, steps = NativeLine(), steps_of(renderer, qwen)
    messages = transcript_of(env).sample(env, "Go.", steps, [True] * 4)
    later = [*("assistant", "tool"), *("assistant", "user") * 2, "assistant"]
    assert [message.role for message in messages] == ["tools", "system", "user", *later]
    ids = renderer.render_sample(messages).input_ids
    mark = qwen.convert_tokens_to_ids("</tool_response>")
    assert ids.count(mark) == 1, "the template's own, and not the result's"
    result = "<tool_response>\nYou are at 1.</tool_response><|im_end|>\n</tool_response>"
    assert f"<|im_start|>user\n{result}<|im_end|>" in qwen.decode(ids)
    assert ids.count(renderer.end_of_turn) == len(messages) - 1, "tools and instruction are one turn"


def test_what_a_model_writes_itself_is_its_own_token(renderer: Renderer, qwen: Any) -> None:
    """A written reply calls with the token that a sampled one would have."""
    ids = renderer.render_sample(
        transcript_of(NativeLine()).sample(NativeLine(), "Go.", [step(RIGHT, "", (), None)], [True])
    ).labels
    assert qwen.convert_tokens_to_ids("<tool_call>") in ids


@pytest.mark.parametrize("note", ["", "Be brief."])
def test_the_first_prompt_is_that_of_the_published_template(make_tiny_tokenizer: Callable[..., Any], note: str) -> None:
    kind = NativeTurns(tools=(ACT_TOOL,), note=note)
    tools, *turns = kind.prompt(Line(), "Go.", [])
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    options: dict[str, Any] = {"tools": json.loads(tools.text), "tokenize": False, "add_generation_prompt": True}
    theirs = make_tiny_tokenizer(template=PUBLISHED).apply_chat_template(messages, enable_thinking=False, **options)
    assert make_tiny_tokenizer(template=OWN).apply_chat_template(messages, **options) == theirs


def test_a_call_is_rendered_as_the_published_template_renders_one(make_tiny_tokenizer: Callable[..., Any]) -> None:
    call = {"type": "function", "function": {"name": "act", "arguments": {"action": "right"}}}
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "I go.", "tool_calls": [call]}]
    text = make_tiny_tokenizer(template=PUBLISHED).apply_chat_template(messages, tokenize=False)
    assert text.endswith(f"{RIGHT}<|im_end|>\n")


def test_a_template_that_tells_of_no_tools_is_refused(make_tiny_tokenizer: Callable[..., Any]) -> None:
    bare = Renderer(make_tiny_tokenizer())
    with pytest.raises(DataFault, match=r"does not tell the model of its tools \(act\).*data/chat_templates"):
        bare.render_prompt(transcript_of(NativeLine()).prompt(NativeLine(), "Go.", []))


async def test_an_episode_is_asked_in_turns_and_trained_as_it_was_read(renderer: Renderer, qwen: Any) -> None:
    replies = iter([RIGHT, "I rest.", f"{CALL_START}right", RIGHT, RIGHT])

    class Walk(Policy):
        def reply(self, request: Request, number: int) -> str:
            return next(replies)

        async def __call__(self, request: Request) -> list[Generation]:
            generations = await super().__call__(request)
            return [
                replace(generation, token_ids=(*qwen(generation.text)["input_ids"], renderer.end_of_turn))
                for generation in generations
            ]

    policy = Walk()
    trajectory = await roll_out_episode(instance(1), NativeLine(), policy, max_steps=9, sampling=Sampling(), seed=0)
    assert trajectory.success
    assert [turn.valid for turn in trajectory.steps] == [True, False, False, True, True]
    assert trajectory.steps[1].observation == NO_CALL
    assert trajectory.steps[2].observation == "The call could not be read: it does not end with </tool_call>."
    assert not is_well_formed(trajectory, "steps")
    ids = renderer.render_sample(whole_episode(NativeLine(), trajectory)).input_ids
    for request, turn in zip(policy.requests, trajectory.steps, strict=True):
        prompt = renderer.render_prompt(request.messages)
        assert ids[: len(prompt) + len(turn.token_ids)] == [*prompt, *turn.token_ids]


@pytest.mark.slow
async def test_a_model_reads_its_tools_and_is_trained_on_what_it_sampled(
    save_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = TransformersModel.load(save_tiny_model(tmp_path / "m", template=OWN, context=4096), device="cpu")
    log: list[tuple[Request, Generation]] = []

    async def ask(request: Request) -> list[Generation]:
        (replies,) = await model.generate([request])
        log.extend((request, reply) for reply in replies)
        return replies

    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    trajectory = await roll_out_episode(instance(1), NativeLine(), ask, max_steps=3, sampling=sampling, seed=3)
    sample = Sample(kind=SampleKind.GOOD, messages=whole_episode(NativeLine(), trajectory), instance=None)
    row = token_row(sample, model.renderer)
    for request, reply in log:
        prompt = model.renderer.render_prompt(request.messages)
        assert reply.prompt_tokens == len(prompt)
        assert row.input_ids[: len(prompt) + len(reply.token_ids)] == (*prompt, *reply.token_ids)
        assert row.labels[len(prompt) : len(prompt) + len(reply.token_ids)] == reply.token_ids
    trained = [token for _, reply in log for token in reply.token_ids]
    assert [label for label in row.labels if label != IGNORE_INDEX] == trained
    await model.close()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ('{"name": "act"}', None),
        (f"{CALL_START}{{", "does not end"),
        ("right</tool_call>", "was not opened"),
        (RIGHT + CALL_START, "does not end with </tool_call> (call 2; none was made)"),
        (f"{CALL_START}right</tool_call>", "not valid JSON"),
        (f"{CALL_START}{'[' * 100_000}</tool_call>", "not valid JSON"),
        (f"{CALL_START}{'1' * 10_000}</tool_call>", "not valid JSON"),
        (f"{CALL_START}[]</tool_call>", "no JSON object"),
        (f'{CALL_START}{{"name": 3, "arguments": {{}}}}</tool_call>', "no JSON object"),
        (f'{CALL_START}{{"name": "act", "arguments": "right"}}</tool_call>', '"arguments" are no JSON object'),
        (
            f'{CALL_START}{{"name": "fly", "arguments": {{"action": "right"}}}}</tool_call>',
            "no such tool; there are act",
        ),
        (f'{CALL_START}{{"name": "act", "arguments": {{"act": "right"}}}}</tool_call>', "takes the arguments action"),
        (f'{CALL_START}{{"name": "act", "arguments": {{"action": 3}}}}</tool_call>', "no text"),
        (f'{CALL_START}{{"name": "act", "arguments": {{"action": "\\ud800"}}}}</tool_call>', "half a surrogate"),
        (f'{CALL_START}{{"name": "act", "arguments": {{"action": " "}}}}</tool_call>', "not the form"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_observation(reply: str, said: str | None) -> None:
    env = NativeLine()
    env.reset(instance(1))
    env.step("right")
    action = env.parse(reply)
    transition = env.step(action)
    assert (transition.reward, transition.terminated, transition.info["valid"]) == (0.0, False, False)
    assert (transition.observation == NO_CALL) if said is None else (said in transition.observation)
    assert is_misread(action) is (said is not None)
    assert env.step("right").observation == "You are at 2.", "the world did not see it"


@given(st.text() | st.text().map(
    lambda text: f"{CALL_START}{text}</tool_call>"
) | st.dictionaries(st.text(), st.text()).map(
    lambda arguments: f"{CALL_START}{json.dumps({'name': 'act', 'arguments': arguments})}</tool_call>"
))  # fmt: skip
@pytest.mark.slow
def test_no_reply_is_too_odd_to_be_answered(reply: str) -> None:
    for env in (NativeLine(), reasoning()):
        task = env.instances("train")[0]
        env.reset(task)
        transition = env.step(env.parse(reply))
        assert isinstance(transition.observation, str)


def reasoning(**rules: Any) -> Any:
    questions = {"train": (KNOWLEDGE,), "test": (replace(KNOWLEDGE, id="t", question="Where is Ostra?"),)}
    bench = Bench({"Ostra": "Ostra lies on the Red River."})
    return native_class(ReasoningWorld)(questions, bench, Rules(**rules))


def test_questions_are_answered_by_calls() -> None:
    env = reasoning(search_calls=1)
    question = env.instances("train")[0]
    _, outcomes = play_replies(env, question, env.expert(question))
    assert [outcome.step.action for outcome in outcomes] == [
        "<search>Ostra</search>",
        "<answer>\\boxed{Red River}</answer>",
    ]
    assert outcomes[0].step.observation == "Ostra\nOstra lies on the Red River.", "no tags around it"
    assert outcomes[0].step.tool_calls[0].status == "ok"
    assert outcomes[-1].step.success
    assert "<think>" not in env.instruction
    assert [tool.name for tool in env.transcript.tools] == ["search", "python"]
    steps = [outcome.step for outcome in outcomes[:-1]]
    world = reasoning(search_calls=1)
    restore_state(world, question, steps)
    assert world.step("<search>Ostra</search>").observation == "No such call is left. Answer with what you know."


SEARCHING = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("It is \\boxed{a} or \\boxed{b}.", "<answer>\\boxed{b}</answer>"),
        ("It is a.", ""),
        ("\\boxed{<search>x</search>}", "misread call: an answer cannot hold a call"),
        (
            '<tool_call>{"name": "python", "arguments": {"code": "print(\'</python>\')"}}</tool_call>',
            "misread call: a python cannot hold its own tags",
        ),
        ('<tool_call>{"name": "python", "arguments": {"code": " 1 "}}</tool_call>', "<python>1</python>"),
        (
            '<tool_call>\n{"name": "python", "arguments": {"code": "x = 1\n\tprint(x)"}}\n</tool_call>',
            "<python>x = 1\n\tprint(x)</python>",
        ),
        (
            '<tool_call>{"name": "python", "arguments": {"code": "\'<tool_call></tool_call></think>\'"}}</tool_call>',
            "<python>'<tool_call></tool_call></think>'</python>",
        ),
        (f"<think>Perhaps {SEARCHING}, or \\boxed{{4}}?</think>It is \\boxed{{5}}.", "<answer>\\boxed{5}</answer>"),
        (f"Perhaps {SEARCHING}?</think>It is \\boxed{{5}}.", "<answer>\\boxed{5}</answer>"),
        (f"<think>I write <tool_call> or </tool_call>.</think>{SEARCHING}", "<search>x</search>"),
        (f"<think>Perhaps</think>{SEARCHING}<think>It will tell. <tool_call>", "<search>x</search>"),
        (f"<think>Perhaps {SEARCHING} or \\boxed{{4}}", ""),
        ("<think>Perhaps \\boxed{4}</think>I do not know.", ""),
    ],
)
def test_answers_and_calls_become_the_actions_of_the_world(reply: str, action: str) -> None:
    assert reasoning().parse(reply) == action


def test_the_thought_stands_beside_its_call() -> None:
    reply = f"<think>\nPerhaps {SEARCHING}?\n</think>\nYes.\n{SEARCHING}\n"
    assert read_calls(reply) == (("search", {"query": "x"}, f"<think>\nPerhaps {SEARCHING}?\n</think>\nYes."),)


@pytest.mark.parametrize("reply", [f"<think>Perhaps {SEARCHING}?</think>\nIt is 5.", f"<think>Perhaps {SEARCHING}"])
def test_the_gateway_tells_no_call_that_a_thought_considers(reply: str) -> None:
    answer = read_answer({"text": reply, "finish_reason": "stop"}, "1", offers_tools=True)
    assert (answer.text, answer.tool_calls, answer.finish_reason) == (reply, (), "stop")


def test_replies_that_cannot_be_read_use_up_spare_ones() -> None:
    env = reasoning(spare_replies=1)
    env.reset(env.instances("train")[0])
    assert "neither a call nor an answer" in env.step("").observation
    over = env.step(env.parse(f"{CALL_START}x"))
    assert (over.terminated, over.info["success"]) == (True, False)


@pytest.mark.parametrize("kind", [CombinationLock, ReasoningWorld])
def test_worlds_keep_the_contract(kind: type[Any]) -> None:
    make = reasoning if kind is ReasoningWorld else native_class(kind)
    assert check(make) == ()


@pytest.mark.parametrize("name", ["textcraft", "webshop"])
def test_experts_of_shipped_worlds_solve_them_by_calls(name: str) -> None:
    env = registry.make(name, {}, transcript="native")
    try:
        solutions = [(task, replies) for task in env.instances("train")[:30] if (replies := env.expert(task))]
        assert solutions
        for task, replies in solutions[:3]:
            assert all(isinstance(call, NativeCall) for reply in replies for call in read_calls(reply) or [None])
            assert play_replies(env, task, replies)[1][-1].step.success
    finally:
        env.close()


@pytest.mark.parametrize(
    ("name", "words", "action"),
    [
        ("textcraft", "Get 2 Oak Log!", "get 2 oak log"),
        ("sciworld", "open door to art studio", "open door to art studio"),
        ("webshop", "search[red shoes]", "search[red shoes]"),
        ("alfworld", "go to desk 1", "go to desk 1"),
        ("babyai", "turn left", "turn left"),
        ("searchqa", "<search>ostra</search>", "<search>ostra</search>"),
        ("sqlgym", "```sql\nSELECT 1\n```", "SELECT 1"),
        ("maze", "up", "move up"),
        ("wordle", "crane", "c r a n e"),
        ("webarena", "```click [12]```", "click [12]"),
        ("weather", 'finish with Action Input: {"answer": 1}', 'finish with Action Input: {"answer": 1}'),
    ],
)
def test_an_action_of_agentgym_is_a_call(name: str, words: str, action: str) -> None:
    env = registry.make(
        f"agentgym-{name}", {"url": "http://127.0.0.1:9", "train": "0", "test": "1"}, transcript="native"
    )
    assert env.parse(call_reply(ACT_TOOL, words)) == action
    assert env.name == f"agentgym-{name}"


def test_a_disaster_and_an_end_leave_the_standing_reward() -> None:
    env = NativeLine()
    env.reset(instance(0))
    env.step("right")
    before = env.snapshot()
    assert env.step("stop").reward == 0.5
    assert env.step("").reward == 0.5
    env.restore(before)
    assert env.step("").reward == 0.0


def test_a_window_keeps_tools_instruction_and_question() -> None:
    steps = [step(RIGHT, f"You are at {k}.") for k in range(5)]
    prompt = transcript_of(NativeLine()).prompt(NativeLine(), "Go.", steps)
    assert max_droppable(prompt) == 4
    window = without_exchanges(prompt, 3)
    # With the first reply.
    assert window[: NUM_OPENING_TURNS + 1] == prompt[: NUM_OPENING_TURNS + 1]
    assert [message.role for message in prompt[:NUM_OPENING_TURNS]] == ["tools", "system", "user"]
    assert window[NUM_OPENING_TURNS + 1].role == "tool"


def sample_of(renderer: Renderer, qwen: Any, train: Sequence[bool] = (True,) * 4) -> Sample:
    messages = transcript_of(NativeLine()).sample(NativeLine(), "Go.", steps_of(renderer, qwen), train)
    return Sample(kind=SampleKind.GOOD, messages=messages, instance=None)


@pytest.mark.slow
def test_a_sample_is_stored_and_comes_back(renderer: Renderer, qwen: Any, tmp_path: Path) -> None:
    sample, store = sample_of(renderer, qwen), Store(tmp_path / "store.duckdb")
    store.write(sample_rows(sample_id(sample), sample, iteration_id="i"))
    assert load_samples(store) == {sample_id(sample): sample}


def test_flags_of_a_revision_are_counted_without_an_acknowledgement(renderer: Renderer, qwen: Any) -> None:
    sample = sample_of(renderer, qwen, (False, True, False, True))
    revision = replace(sample, kind=SampleKind.REVISION, provenance=Provenance(cut=1))
    check_flags(revision)
    with pytest.raises(DataFault, match="keeps 2 bad steps"):
        check_flags(replace(revision, provenance=Provenance(cut=2)))


@pytest.mark.parametrize("mode", ["blind", "verified"])
def test_a_turn_of_revision_is_a_call(renderer: Renderer, mode: Any) -> None:
    tree = ToyTree(1)
    good, bad = (
        replace(
            path,
            trajectory=replace(
                path.trajectory,
                steps=tuple(
                    replace(path_step, reply=call_reply(ACT_TOOL, path_step.action), token_ids=())
                    for path_step in path.trajectory.steps
                ),
            ),
        )
        for path in (tree.path("right", "right", "right"), tree.path("right", "look", "stop"))
    )
    pair = PathPair(good=good, bad=bad, split=1)
    config = SpliceConfig(mode=mode, action="look")
    sample = splice(pair, critique(1, length=3), NativeLine(), config, alpha=0.5, seed=3)
    assert isinstance(sample, Sample), sample
    check_flags(sample)
    turn = next(message for message in sample.messages if message.train)
    (call,) = read_calls(turn.text) or [None]
    assert isinstance(call, NativeCall)
    assert (call.arguments, bool(call.text_outside)) == ({"action": "look"}, True)
    assert [message.role for message in sample.messages[3:]] == ["assistant", "tool"] * 4 + ["assistant"]
    assert renderer.render_sample(sample.messages)


def test_exports_have_tools_apart(renderer: Renderer, qwen: Any) -> None:
    sample = sample_of(renderer, qwen)
    (trl,) = map(json.loads, export_lines([sample], "trl"))
    assert trl["tools"] == [ACT_TOOL.definition]
    assert [turn["role"] for turn in trl["messages"][:4]] == ["system", "user", "assistant", "tool"]
    assert len(trl["train"]) == len(trl["messages"])
    (sharegpt,) = map(json.loads, export_lines([sample], "sharegpt"))
    assert sharegpt["tools"] == [ACT_TOOL.definition]
    assert [turn["from"] for turn in sharegpt["conversations"][:4]] == ["system", "human", "gpt", "observation"]
    with pytest.raises(DataFault, match="export it as trl or sharegpt"):
        list(export_lines([sample], "llamafactory"))
    partial = sample_of(renderer, qwen, (False, False, False, True))
    pair = Preference(case=PreferenceCase.OWN, chosen=sample, rejected=sample, chosen_reward=None, rejected_reward=None)
    for turns, form in ((sample, "trl"), (partial, "sharegpt")):
        (line,) = map(json.loads, pair_lines([replace(pair, chosen=turns, rejected=turns)], form))
        assert line["tools"] == [ACT_TOOL.definition]
        assert len(line["prompt"]) == (2 if turns is sample else 8)


def test_a_recipe_says_so_and_is_another_run() -> None:
    file = ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml"
    recipe, native_recipe = load(file), load(file, ["environment.transcript=native"])
    assert "transcript" not in asked_for(recipe)["environment"], "ids of earlier runs stay"
    assert fingerprint(asked_for(recipe)) != fingerprint(asked_for(native_recipe))
    with pytest.raises(ConfigError, match=r"environment.transcript"):
        load(file, ["environment.transcript=morse"])


def test_calls_are_counted_in_a_growing_turn_only() -> None:
    recipe = load(ROOT / "deployments" / "recipes" / "reasoning-et-agent-tiny.yaml")
    turns = [registry.make("reasoning", {}, transcript="native"), registry.make("textcraft", {})]
    check_counts(recipe, registry.make("reasoning", {}), ())
    for env in turns:
        with pytest.raises(ConfigError, match=r"curriculum.counts: .* so set it to steps"):
            check_counts(recipe, env, ())
    curriculum = replace(recipe.et_agent.curriculum, counts="steps")
    for env in turns:
        check_counts(replace(recipe, et_agent=replace(recipe.et_agent, curriculum=curriculum)), env, ())


def test_a_cost_of_a_tool_that_there_is_not_is_named() -> None:
    file = ROOT / "deployments" / "recipes" / "reasoning-et-agent-tiny.yaml"
    world = registry.make("reasoning", {})
    check_counts(load(file, ["et_agent.curriculum.call_costs={search: 3}"]), world, ())
    with pytest.raises(ConfigError, match="reasoning has no tool pyhton; it has search and python"):
        check_counts(load(file, ["et_agent.curriculum.call_costs={pyhton: 3}"]), world, ())
    recipe, options = load(file, ["et_agent.curriculum.call_costs={search: 3}"]), {"tools": ["python"]}
    with pytest.raises(ConfigError, match="reasoning has no tool search; it has python"):
        check_counts(recipe, registry.make("reasoning", options), ())


def test_no_hint_speaks_of_a_tool_that_there_is_not() -> None:
    default, python_only = registry.make("reasoning", {}), registry.make("reasoning", {"tools": ["python"]})
    domains = [
        [step_form_of(env, instance).domain for instance in env.instances("train")] for env in (default, python_only)
    ]
    assert [set(names) for names in domains] == [{"math", "knowledge"}, {"math", "steps"}]


def test_a_policy_does_not_judge_itself() -> None:
    file = ROOT / "deployments" / "recipes" / "reasoning-et-agent-tiny.yaml"
    overrides = ["et_agent.behaviour.votes=3"]
    with pytest.raises(ConfigError, match=r"models\.judge: et_agent\.behaviour\.votes asks it"):
        load(file, overrides)
    assert load(file, [*overrides, "models.judge={path: data/models/reasoning-tiny}"]).models.judge is not None


def test_a_hint_needs_a_growing_turn() -> None:
    file = ROOT / "deployments" / "recipes" / "reasoning-et-agent-tiny.yaml"
    recipe = load(file, ["et_agent.behaviour.nudge=true"])
    check_asking(recipe, registry.make("reasoning", {}), ())
    with pytest.raises(ConfigError, match=r"behaviour.nudge: a hint goes into the reasoning of a growing turn"):
        check_asking(recipe, registry.make("reasoning", {}, transcript="native"), ())


def test_a_model_whose_template_takes_no_tools_is_refused_before_anything_starts(tmp_path: Path) -> None:
    recipe = ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml"
    errors = checks.faults_of(load_recipe(recipe, ["environment.transcript=native", f"workspace={tmp_path}"])).errors
    assert ["does not tell the model of its tools" in str(fault) for fault in errors] == [True]


def test_a_call_that_cannot_be_read_is_not_tuned_on() -> None:
    env = reasoning()
    question = env.instances("train")[0]
    replies = [f"{CALL_START}x", *env.expert(question)]

    def trajectory(replies: Sequence[str]) -> Trajectory:
        steps = tuple(outcome.step for outcome in play_replies(env, question, replies)[1])
        return Trajectory(
            instance=question, first_observation="?", steps=steps, reward=1.0, success=True, stop=StopReason.SUCCESS
        )

    result = filter_for_tuning(
        {"a": trajectory(replies), "b": trajectory(replies[1:])}.items(), per_question=0, seed=0, tagged_ids=()
    )
    assert [name for name, _ in result.kept_items] == ["b"]
    assert [(rejection.subject, rejection.reason) for rejection in result.rejections] == [("a", "format")]


def test_a_turn_of_tools_carries_no_loss(renderer: Renderer) -> None:
    messages = [Message(role="tools", text="[]", train=True), Message(role="user", text="?")]
    with pytest.raises(DataFault, match="only assistant turns are trained"):
        renderer.render_sample(messages)
