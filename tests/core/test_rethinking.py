"""Replies of samples that the policy says anew, where they now stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from door import Door
from growing import GrowingLine

from agentr_core.errors import ConfigError, ModelFault, PromptTooLong
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.critique.prompt import JUDGE_INSTRUCTION
from agentr_core.methods.agent_r.rethinking import NAME, rethinking
from agentr_core.methods.agent_r.stages.collect import collect
from agentr_core.methods.agent_r.stages.critique import critique
from agentr_core.methods.agent_r.stages.rethink import check_world
from agentr_core.methods.agent_r.stages.splice import keep_good_paths, splice_pairs
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes import parse
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.start import begin, run_id_of, start
from agentr_core.samples.identity import check_flags
from agentr_core.store import Store
from agentr_core.store.codec import load_samples
from agentr_core.types import Answer, Generation, Message, Request, Sample, SampleKind, Sampling

DOOR = Door()
WORDS = list(map(str, range(99)))
OPENS, ALSO_OPENS = [word for word in WORDS if DOOR.parse(word) == "open"][:2]
WRONG, ALSO_WRONG = [word for word in WORDS if DOOR.parse(word) == "wrong"][:2]
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)


def said(text: str, finish: str = "stop") -> Answer:
    return Answer(
        role="actor",
        model="m",
        prompt_hash="p",
        seed=0,
        text=text,
        finish_reason="length" if finish == "length" else "stop",
        prompt_tokens=1,
        completion_tokens=1,
    )


def reply(text: str, *, train: bool = True, sampled: bool = True) -> Message:
    return Message(role="assistant", text=text, train=train, finish_reason="stop" if sampled else None)


def sample_of(*replies: Message) -> Sample:
    told = [message for each in replies for message in (each, Message(role="user", text="Wrong."))]
    opening = Message(role="user", text="You stand before a door.")
    return Sample(kind=SampleKind.GOOD, messages=(opening, *told), instance=DOOR.instances("train")[0])


def anew(sample: Sample, answers: Sequence[Answer | None]) -> tuple[Sample, list[list[str]]]:
    """The sample, and the replies in each prompt of a question."""
    questions = rethinking(sample, DOOR, GREEDY, name="s")
    prompts: list[list[str]] = []
    try:
        asked = next(questions)
        for answer in answers:
            prompts.append([message.text for message in asked.question.messages if message.role == "assistant"])
            asked = questions.send(answer)
    except StopIteration as end:
        assert len(prompts) == len(answers)
        made: Sample = end.value
        return made, prompts
    raise AssertionError("a further question")


def replies_in(sample: Sample) -> list[str]:
    return [message.text for message in sample.messages if message.role == "assistant"]


def test_a_reply_with_the_same_action_takes_the_place_and_later_prompts_have_it() -> None:
    made, prompts = anew(sample_of(reply(WRONG), reply(OPENS)), [said(ALSO_WRONG), said(ALSO_OPENS)])
    assert replies_in(made) == [ALSO_WRONG, ALSO_OPENS]
    assert prompts == [[], [ALSO_WRONG]]
    assert made.provenance.extra["rethought"] == 2
    assert all(message.train and message.token_ids is None for message in made.messages if message.role == "assistant")


@pytest.mark.parametrize("answer", [None, said(OPENS), said(ALSO_WRONG, "length"), said(WRONG)])
def test_a_reply_stays_without_a_whole_answer_of_the_same_action(answer: Answer | None) -> None:
    sample = sample_of(reply(WRONG))
    made, _ = anew(sample, [answer])
    assert made.messages == sample.messages
    assert made.provenance.extra["rethought"] == 0


def test_kept_replies_and_those_that_no_model_sampled_are_not_asked_for() -> None:
    sample = sample_of(reply(WRONG, train=False), reply("wait", sampled=False), reply(OPENS))
    made, prompts = anew(sample, [said(ALSO_OPENS)])
    assert replies_in(made) == [WRONG, "wait", ALSO_OPENS]
    assert prompts == [[WRONG, "wait"]]


class Speaker(ScriptedModel):
    """Says any word when it samples, and one that opens the door when it is greedy. `asked` counts
    the greedy replies; after `failing` of them it fails.
    """

    def __init__(self, asked: list[int], failing: Callable[[int], Exception | None]) -> None:
        super().__init__(self._speak)
        self._asked = asked
        self._failing = failing

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        greedy = [
            request.sampling.temperature == 0 and JUDGE_INSTRUCTION not in request.messages[-1].text
            for request in requests
        ]
        for number in range(sum(greedy)):
            self._asked[0] += 1
            if error := self._failing(self._asked[0] + number):
                raise error
        drawn = await super().generate(requests)
        return [
            [replace(one, text=OPENS) for one in replies] if alone else replies
            for alone, replies in zip(greedy, drawn, strict=True)
        ]

    @staticmethod
    def _speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
        if JUDGE_INSTRUCTION in messages[-1].text:
            return "Reason: so it is.\nJudgement: Bad"
        return f"word {fingerprint(seed, number)}"


Make = Callable[..., Workplace]


@pytest.fixture
def make(tmp_path: Path, tiny_model_dir: Path) -> Make:
    def made(
        *overrides: str, asked: list[int] | None = None, failing: Callable[[int], Exception | None] = lambda _: None
    ) -> Workplace:
        recipe = parse(
            {
                "name": "door",
                "environment": {"name": "door"},
                "model": {"path": str(tiny_model_dir), "max_batch": 1},
                "search": {"dives": 3, "width": 3, "depth": 5, "max_new_tokens": 8},
                "splice": {"mode": "verified", "rethink": True},
                "instances": {"train_limit": 0},
                "data": {"max_length": 4096},
                "errors": {"budget": 0.5, "retries": 0},
            },
            overrides,
        )
        counted = [0] if asked is None else asked
        return Workplace(
            recipe=recipe,
            run_id=run_id_of(recipe),
            root=tmp_path / "runs",
            store=Store(tmp_path / "runs" / "store.duckdb"),
            make_environment=lambda _: Door(),
            load_model=lambda role, path: Speaker(counted, failing),
            progress=lambda done, total, note: None,
        )

    return made


async def searched(place: Workplace) -> None:
    await start(place)
    await begin(place, 1)
    await collect(place, 1)
    await critique(place, 1)


async def test_answers_are_stored_and_asked_for_once(make: Make) -> None:
    asked = [0]
    place = make(asked=asked)
    await searched(place)
    made = await splice_pairs(place, 1)
    assert made["good"] > 0
    assert made["revision"] > 0
    samples = load_samples(place.store, iteration_id=place.iteration_id(1))
    for sample in samples.values():
        check_flags(sample)
        last = next(message for message in reversed(sample.messages) if message.role == "assistant")
        assert last.text == OPENS
        assert sample.provenance.extra["rethought"] == 1
        wrong = [m.text for m in sample.messages if m.role == "assistant" and m.train and m is not last]
        assert all(text != OPENS for text in wrong)
    stored = place.store.rows("select count(*), min(prompt), min(role) from edit")
    assert stored == [(asked[0], NAME, "actor")]
    assert place.store.rows("select * from v_orphans") == []

    again = [0]
    await splice_pairs(make(asked=again), 1)
    assert again == [0]
    assert load_samples(place.store, iteration_id=place.iteration_id(1)) == samples


async def test_good_paths_alone_are_said_anew_too(make: Make) -> None:
    place = make("data.use=good")
    await searched(place)
    await keep_good_paths(place, 1)
    samples = load_samples(place.store, iteration_id=place.iteration_id(1)).values()
    assert {sample.provenance.extra["rethought"] for sample in samples} == {1}


async def test_a_sample_whose_questions_fail_stays_as_it_was_and_the_error_is_told(make: Make) -> None:
    place = make(failing=lambda number: ModelFault("no word") if number == 3 else None)
    await searched(place)
    made = await splice_pairs(place, 1)
    samples = load_samples(place.store, iteration_id=place.iteration_id(1)).values()
    assert len(samples) == made["good"] + made["revision"]
    assert sum("rethought" not in sample.provenance.extra for sample in samples) == 1
    assert place.store.rows("select count(*) from event where stage = 'splice'") == [(1,)]


async def test_a_prompt_without_room_leaves_its_reply(make: Make) -> None:
    place = make(failing=lambda number: PromptTooLong("no room"))
    await searched(place)
    await splice_pairs(place, 1)
    samples = load_samples(place.store, iteration_id=place.iteration_id(1)).values()
    assert {sample.provenance.extra["rethought"] for sample in samples} == {0}
    assert place.store.rows("select count(*) from edit") == [(0,)]


def test_worlds_whose_replies_cannot_be_said_anew_are_refused(make: Make) -> None:
    class Hearing(Door):
        def hear(self, reply: str) -> None:
            pass

    recipe = make().recipe
    check_world(recipe, Door())
    check_world(make("splice.rethink=false").recipe, GrowingLine())
    with pytest.raises(ConfigError, match=r"^splice.rethink: in line the model goes on with its own turn"):
        check_world(recipe, GrowingLine())
    with pytest.raises(ConfigError, match=r"^splice.rethink: door hears whole replies"):
        check_world(recipe, Hearing())
