"""One assistant turn grown by continuation: prompts, labels, samples and the store, token by token,
on the shipped template and on that of Qwen3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path as File
from typing import Any

import pytest
from growing import GrowingLine
from toy import Line, Policy, instance
from toy_paths import ToyTree, critique, good_sample, sampled_ids
from toy_paths import renderer as shipped

from agentr_core.environments.contract import check
from agentr_core.episodes.rollout import roll_out_episode
from agentr_core.episodes.transcript import (
    Continuation,
    max_droppable,
    min_dropped_to_fit,
    transcript_of,
    whole_episode,
)
from agentr_core.errors import ConfigError, DataFault
from agentr_core.exchange.training_set import export_lines, pair_lines
from agentr_core.methods.agent_r.splice import splice
from agentr_core.methods.eto.preferences import StoredTrajectory, pair_of_own
from agentr_core.methods.faults import load
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.recipes.eto import PreferencesConfig
from agentr_core.samples.dataset import check_flags, count_cut, count_dropped, prompt_of, token_row, turn_classes
from agentr_core.samples.identity import IGNORE_INDEX, conversation_key, sample_id, trained_spans
from agentr_core.samples.rendering import Renderer
from agentr_core.store.codec.samples import load_samples, sample_rows
from agentr_core.store.database import Store
from agentr_core.system import data_path
from agentr_core.types import (
    FinishReason,
    Generation,
    Message,
    Request,
    Sample,
    SampleKind,
    Sampling,
    Span,
    Step,
    grown_turn,
)
from flows.commands.samples import preview_sample
from flows.preflight import checks
from tasks.workspaces import open_store

ROOT = File(__file__).parents[2]
QWEN3 = data_path("chat_templates", "qwen3.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=["shipped", "qwen3"])
def renderer(request: pytest.FixtureRequest, make_tiny_tokenizer: Callable[..., Any]) -> Renderer:
    return shipped() if request.param == "shipped" else Renderer(make_tiny_tokenizer(template=QWEN3))


def letters(renderer: Renderer, text: str) -> tuple[int, ...]:
    """One token a letter: not how the tokenizer would write the text, so tokens of a sampler."""
    ids = tuple(renderer._tokenizer.convert_tokens_to_ids(list(text)))
    assert None not in ids
    return ids


def step(reply: str, observation: str, ids: tuple[int, ...] = (), reason: FinishReason | None = "stop") -> Step:
    return Step(reply=reply, action="", observation=observation, reward=0.0, token_ids=ids, finish_reason=reason)


def steps_of(renderer: Renderer) -> list[Step]:
    """Ended by a stop string, cut, ended by its end of turn, and a last one ended by a stop
    string.
    """
    call, cut, over, last = (letters(renderer, text) for text in ("ab</s>", "cde", "fg", "xy</a>"))
    control = "<|im_end|><|end|>"
    return [
        step("ab</s>", f"<r>{control}one</r>", call),
        step("cde", "", cut, "length"),
        step("fg", "<r>two</r>", (*over, renderer.end_of_turn)),
        step("xy</a>", "never read", last),
    ]


def grown_messages(first_observation: str, steps: Sequence[Step], train: Sequence[bool]) -> tuple[Message, ...]:
    env = GrowingLine()
    return transcript_of(env).sample(env, first_observation, steps, train)


def test_each_prompt_is_a_prefix_of_the_sample_and_ends_inside_the_turn(renderer: Renderer) -> None:
    env, steps = GrowingLine(), steps_of(renderer)
    ids = renderer.render_sample(transcript_of(env).sample(env, "Go.", steps, [True] * 4)).input_ids
    prompts = [renderer.render_prompt(Continuation(stop=("x",)).prompt(env, "Go.", steps[:k])) for k in range(4)]
    for k, prompt in enumerate(prompts):
        assert ids[: len(prompt)] == prompt
        token_ids = list(steps[k].token_ids)
        reply_ids = token_ids[:-1] if token_ids[-1] == renderer.end_of_turn else token_ids
        assert ids[len(prompt) : len(prompt) + len(reply_ids)] == reply_ids, (
            "the reply follows its prompt as it was sampled"
        )
    assert list(map(len, prompts)) == sorted({len(prompt) for prompt in prompts})


def test_labels_cover_the_sampled_tokens_and_nothing_else(renderer: Renderer) -> None:
    env, steps = GrowingLine(), steps_of(renderer)
    ids, labels = renderer.render_sample(transcript_of(env).sample(env, "Go.", steps, [True] * 4))
    call, cut, (*over, _), last = (step.token_ids for step in steps)
    assert [label for label in labels if label != IGNORE_INDEX] == [*call, *cut, *over, *last]
    head = len(renderer.render_prompt(Continuation(stop=("x",)).prompt(env, "Go.", [])))
    result = renderer._encoder.plain_ids(steps[0].observation)
    expected = [IGNORE_INDEX] * head + [*call] + [IGNORE_INDEX] * len(result) + [*cut, *over]
    assert labels[: len(expected)] == expected
    assert ids[head + len(call) : head + len(call) + len(result)] == list(result)
    # The stop string ended the last reply: the end of turn is the template's, and carries no loss.
    closing = ids[len(labels) - labels[::-1].index(last[-1]) :]
    assert closing[0] == renderer.end_of_turn
    assert renderer._encoder.control_texts, "control tokens of a result are characters"
    assert not {*result} & {*renderer._encoder.special_text_by_id}


@pytest.mark.parametrize(
    ("ids", "reason", "trained"),
    [((), None, True), ((), "stop", False), ((), "length", False), ("own", "stop", False), ("ended", "stop", True)],
)
def test_an_end_is_trained_where_it_was_said_or_written(
    renderer: Renderer, ids: Any, reason: FinishReason | None, trained: bool
) -> None:
    letter_ids = letters(renderer, "ab")
    reply_ids = {"own": letter_ids, "ended": (*letter_ids, renderer.end_of_turn)}.get(ids, ())
    messages = grown_messages("Go.", [step("ab", "", reply_ids, reason)], [True])
    _, labels = renderer.render_sample(messages)
    assert (renderer.end_of_turn in labels) is trained


def test_flags_say_which_replies_carry_loss(renderer: Renderer) -> None:
    steps = steps_of(renderer)
    messages = grown_messages("Go.", steps, [False, True, False, True])
    _, labels = renderer.render_sample(messages)
    assert [label for label in labels if label != IGNORE_INDEX] == [*steps[1].token_ids, *steps[3].token_ids]
    same = renderer.render_sample(grown_messages("Go.", steps, [True] * 4)).input_ids
    assert renderer.render_sample(messages).input_ids == same


def test_rows_count_spans_that_nothing_parts(renderer: Renderer) -> None:
    sample = Sample(
        kind=SampleKind.GOOD,
        messages=grown_messages("Go.", steps_of(renderer), [True] * 4),
        instance=None,
    )
    row = token_row(sample, renderer)
    assert row.trained_tokens == {"good_path": 6 + 3 + 2 + 6}
    assert len(trained_spans(sample)) == 4
    assert count_cut(sample, renderer) == 1


def test_a_reply_that_said_nothing_but_its_end_is_trained_only_at_the_end(renderer: Renderer) -> None:
    empty_step = step("", "<r>go on</r>", (renderer.end_of_turn,))
    text_step = step("ab", "", letters(renderer, "ab"))
    for steps, expected in (
        ([empty_step, text_step], text_step.token_ids),
        ([text_step, empty_step], (*text_step.token_ids, renderer.end_of_turn)),
    ):
        messages = grown_messages("Go.", steps, [True, True])
        sample = Sample(kind=SampleKind.GOOD, messages=messages, instance=None)
        row = token_row(sample, renderer)
        assert [label for label in row.labels if label != IGNORE_INDEX] == list(expected)


def test_a_prompt_may_end_in_an_assistant_turn_with_spans_only(renderer: Renderer) -> None:
    user = Message(role="user", text="?")
    turn = grown_turn([Span(text="I think")])
    head = renderer.render_prompt([user])
    assert renderer.render_prompt([user, turn]) == [*head, *renderer._encoder.plain_ids("I think")]
    with pytest.raises(DataFault, match="must end with a system or user turn"):
        renderer.render_prompt([user, Message(role="assistant", text="I think")])
    with pytest.raises(DataFault, match="must end with a system or user turn"):
        renderer.render_prompt([turn])


def test_a_turn_with_spans_is_what_its_spans_are() -> None:
    turn = grown_turn([Span(text="a", train=True), Span(text="b")])
    assert (turn.role, turn.text, turn.train, turn.parts) == ("assistant", "ab", True, turn.spans)
    with pytest.raises(ValueError, match="grown_turn"):
        replace(turn, text="other")
    with pytest.raises(ValueError, match="grown_turn"):
        replace(turn, train=False)
    plain = Message(role="assistant", text="a", train=True, token_ids=(1,), finish_reason="length", tokenizer="t")
    (part,) = plain.parts
    assert part == Span(text="a", train=True, token_ids=(1,), finish_reason="length", tokenizer="t")


def test_a_world_has_the_transcript_it_names() -> None:
    sampling = Sampling(max_new_tokens=9, stop=("x",))
    assert transcript_of(Line()).sampling(sampling) == sampling
    growing = transcript_of(GrowingLine())
    assert growing.sampling(sampling) == Sampling(max_new_tokens=9, stop=("\n", "x"), include_stop=True)
    assert growing.sampling(Sampling(stop=("\n",))).stop == ("\n",)
    assert [m.role for m in growing.prompt(GrowingLine(), "Go.", [])] == ["system", "user"]
    for wrong in ((), ("",), "</a>"):
        with pytest.raises(ConfigError, match="continuation needs texts"):
            Continuation(stop=wrong)  # type: ignore[arg-type]


def test_a_growing_turn_is_never_windowed() -> None:
    steps = [step("look\n", "seen")] * 9
    prompt = Continuation(stop=("\n",)).prompt(GrowingLine(), "Go.", steps)
    assert (max_droppable(prompt), min_dropped_to_fit(prompt, lambda _: False)) == (0, 0)
    assert count_dropped(prompt, lambda _: False) == ()


def growing_tree() -> ToyTree:
    return ToyTree(1, env=GrowingLine())


def splice_sample() -> Sample:
    pair = growing_tree().pair(good=["right", "right", "right"], bad=["right", "look", "stop"])
    result = splice(pair, critique(1, length=3), GrowingLine(), SpliceConfig(mode="blind"), alpha=0.5, seed=3)
    assert isinstance(result, Sample)
    return result


def test_a_splice_is_one_turn_whose_bad_spans_carry_no_loss() -> None:
    sample = splice_sample()
    check_flags(sample)
    assert [m.role for m in sample.messages] == ["system", "user", "assistant"]
    spans = sample.messages[-1].spans
    assert [span.train for span in spans] == [False] * 4 + [True, False, True, False, True]
    assert turn_classes(sample) == ("revision_turn", "good_suffix", "good_suffix")
    assert set(token_row(sample, shipped()).trained_tokens) == {"revision_turn", "good_suffix"}
    turn = grown_turn([replace(span, train=place > 1) if place != 3 else span for place, span in enumerate(spans)])
    with pytest.raises(DataFault, match="keeps 2 bad steps and trains one of them"):
        check_flags(replace(sample, messages=(*sample.messages[:-1], turn)))


def test_sides_of_a_pair_share_the_beginning_of_their_turn() -> None:
    tree = growing_tree()
    good, bad = (tree.path("right", *rest).trajectory for rest in (("right", "right"), ("stop",)))
    ((pair,), _) = pair_of_own(
        [StoredTrajectory("a", good), StoredTrajectory("b", bad)], GrowingLine(), PreferencesConfig()
    )
    assert prompt_of(pair.chosen) == prompt_of(pair.rejected) == pair.chosen.messages[:2]
    messages = transcript_of(GrowingLine()).sample(
        GrowingLine(), good.first_observation, good.steps, [False, True, True]
    )
    side = replace(pair.chosen, messages=messages)
    assert prompt_of(side) == (*messages[:2], grown_turn(messages[2].spans[:2]))
    (line,) = pair_lines([pair], "trl")
    assert [span["train"] for span in json.loads(line)["chosen"][0]["spans"]] == [True, False, True, False, True]


def test_spans_are_stored_and_come_back(tmp_path: File) -> None:
    sample = splice_sample()
    spans = sample.messages[-1].spans
    turn = grown_turn([*spans[:-1], replace(spans[-1], finish_reason="length", tokenizer="t")])
    whole = replace(sample, messages=(*sample.messages[:-1], turn))
    plain = good_sample(ToyTree(1).path("right", "right", "right"), Line())
    store = Store(tmp_path / "store.duckdb")
    for item in (sample, whole, plain):
        store.write(sample_rows(sample_id(item), item, iteration_id="i"))
    samples = load_samples(store)
    assert samples == {sample_id(item): item for item in (sample, whole, plain)}
    assert len(samples) == 3, "a cut span is part of the id"
    assert all(sample_id(item) == key for key, item in samples.items())


def test_a_preview_shows_which_spans_are_trained(tmp_path: File) -> None:
    sample = splice_sample()
    store = open_store(tmp_path)
    store.write(sample_rows(sample_id(sample), sample, iteration_id="i"))
    preview = preview_sample(tmp_path, sample_id(sample))
    assert [trained for _, trained in preview] == [False, False, *(s.train for s in sample.messages[-1].spans)]
    assert preview[2][0].startswith("[assistant]\n")
    assert preview[6][0].startswith("[assistant, trained]\n")


def test_flags_of_spans_tell_conversations_apart() -> None:
    steps = steps_of(shipped())
    samples = [
        Sample(
            kind=SampleKind.GOOD,
            messages=grown_messages("Go.", steps, train),
            instance=None,
        )
        for train in ([True] * 4, [False, True, True, True])
    ]
    assert samples[0].messages[-1].text == samples[1].messages[-1].text
    assert len({conversation_key(sample) for sample in samples}) == 2
    assert len({sample_id(sample) for sample in samples}) == 2


def test_exports_say_which_spans_are_trained() -> None:
    sample = splice_sample()
    (trl,) = map(json.loads, export_lines([sample], "trl"))
    assert trl["train"] == [False, False, True]
    assert [span["train"] for span in trl["messages"][2]["spans"]] == [s.train for s in sample.messages[2].spans]
    assert "".join(span["text"] for span in trl["messages"][2]["spans"]) == trl["messages"][2]["content"]
    (sharegpt,) = map(json.loads, export_lines([sample], "sharegpt"))
    assert sharegpt["conversations"][2]["spans"] == trl["messages"][2]["spans"]
    assert "spans" not in sharegpt["conversations"][0]
    with pytest.raises(DataFault, match="LLaMA-Factory trains whole turns"):
        list(export_lines([sample], "llamafactory"))


async def test_an_episode_asks_for_continuations_that_keep_their_stop() -> None:
    class Walk(Policy):
        def reply(self, request: Request, number: int) -> str:
            return "Action: right\n"

        async def __call__(self, request: Request) -> list[Generation]:
            return [
                replace(generation, token_ids=sampled_ids(generation.text)[:-1])
                for generation in await super().__call__(request)
            ]

    policy = Walk()
    trajectory = await roll_out_episode(instance(1), GrowingLine(), policy, max_steps=5, sampling=Sampling(), seed=0)
    assert trajectory.success
    assert [len(request.messages[-1].spans) for request in policy.requests] == [0, 2, 4]
    assert {request.sampling for request in policy.requests} == {Sampling(stop=("\n",), include_stop=True)}
    ids = shipped().render_sample(whole_episode(GrowingLine(), trajectory)).input_ids
    for request, episode_step in zip(policy.requests, trajectory.steps, strict=True):
        prompt = shipped().render_prompt(request.messages)
        assert ids[: len(prompt) + len(episode_step.token_ids)] == [*prompt, *episode_step.token_ids]


def test_only_turns_need_an_acknowledgement() -> None:
    class Silent(Line):
        acknowledgement = ""

    assert "texts" not in {violation.rule for violation in check(GrowingLine)}
    assert "texts" in {violation.rule for violation in check(Silent)}


@pytest.mark.slow
def test_a_server_that_cannot_continue_a_turn_is_refused_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: File
) -> None:
    monkeypatch.setattr(checks, "make_environment", lambda recipe: GrowingLine())
    overrides = [
        "model={backend: openai, server: {model: m}}",
        "models={}",
        "evaluation.repeats=0",
        f"workspace={tmp_path}",
    ]
    recipe = load(ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml", overrides)
    errors = checks.faults_of(recipe, trains=False, asks=False).errors
    assert any("set model.server.continues" in str(fault) for fault in errors)
    able = load(ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml", [*overrides, "model.server.continues=true"])
    assert not any("continues" in str(fault) for fault in checks.faults_of(able, trains=False, asks=False).errors)
