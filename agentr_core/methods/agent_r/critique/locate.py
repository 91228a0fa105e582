"""Finds the first error of a bad path by asking a judge. Source: Agent-R section 3.2.

Each step is judged on its own, with a log that is fixed beforehand. So all questions about all
paths of a tree can be asked at once, and a step that several paths share is judged once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from agentr_core.answers import is_unreadable, readable
from agentr_core.episodes.drawing import Ask
from agentr_core.errors import ModelFault, PromptTooLong
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.critique.parse import majority, parse_verdict, published_verdict
from agentr_core.methods.agent_r.critique.prompt import judge_messages
from agentr_core.models.together import all_or_none
from agentr_core.recipes.agent_r import CritiqueConfig
from agentr_core.recipes.sampling import sampling_of
from agentr_core.types import Critique, Generation, Judgement, Path, PathPair, Request, StepVerdict, Verdict


class Scan(NamedTuple):
    """A path to be judged, from step `start` on."""

    path: Path
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to the judge about one node. `dropped_steps` counts the oldest steps left out to
    make it fit.
    """

    node: int
    request: Request
    dropped_steps: int


def scans_of(pairs: Iterable[PathPair], config: CritiqueConfig) -> tuple[Scan, ...]:
    """Return one scan of each bad path of the pairs of one tree, starting at the earliest step that
    any of its pairs needs judged.
    """
    scans: dict[int, Scan] = {}
    for pair in pairs:
        start = scan_start(pair.split, config)
        earlier = scans.get(pair.bad.leaf)
        scans[pair.bad.leaf] = Scan(pair.bad, start if earlier is None else min(start, earlier.start))
    return tuple(scans.values())


def scan_start(split: int, config: CritiqueConfig) -> int:
    """Return the position of the first step that may be the error of a pair whose paths share
    `split` steps.
    """
    return split if config.scan_from == "split" else 0


def questions(
    scan: Scan,
    config: CritiqueConfig,
    *,
    seed: int,
    count_tokens: Callable[[Request], int],
    context_length: int,
    known: Container[int] = (),
) -> tuple[Question, ...]:
    """Return the questions to the judge about the steps of a path, in order, without those about
    nodes that are `known`.

    The log contains actions and observations, never thoughts. Its oldest steps are dropped until
    the prompt leaves room for `config.max_new_tokens` in a context of `context_length` tokens, or
    no log is left. The seed of a question depends only on `seed`, the instance of the tree and the
    node.
    """
    path = scan.path

    def fits(request: Request) -> bool:
        return count_tokens(request) + config.max_new_tokens <= context_length

    asked = []
    for position in range(scan.start, len(path.nodes)):
        if path.nodes[position] in known:
            continue
        without = partial(_request, path, position, config=config, seed=seed)
        dropped, request = 0, without(0)
        if not fits(request):
            dropped = bisect_left(range(position), True, key=lambda count: fits(without(count)))
            request = without(dropped)
        asked.append(Question(node=path.nodes[position], request=request, dropped_steps=dropped))
    return tuple(asked)


async def judge_paths(
    scans: Sequence[Scan],
    ask: Ask,
    config: CritiqueConfig,
    *,
    seed: int,
    count_tokens: Callable[[Request], int],
    context_length: int,
    known: Mapping[int, Judgement] | None = None,
    on_judgement: Callable[[Judgement], None] | None = None,
) -> dict[int, Judgement]:
    """Return the judgements of all steps of the scans of one tree, by node; all are requested at
    once.

    Args:
        known: judgements made before, by node; they are part of the result and not requested again.
        on_judgement: is called with each new judgement as soon as it is made.

    Raises:
        ModelFault: the judge gave a wrong number of replies.
    """
    pending: dict[int, tuple[Path, Question]] = {}
    met = set(known or ())
    for scan in scans:
        for question in questions(
            scan,
            config,
            seed=seed,
            count_tokens=count_tokens,
            context_length=context_length,
            known=met,
        ):
            pending[question.node] = scan.path, question
            met.add(question.node)

    async def judge(path: Path, question: Question) -> Judgement:
        judgement = await _judge(path, question, ask, config, seed=seed)
        if on_judgement is not None:
            on_judgement(judgement)
        return judgement

    answers = await all_or_none([judge(*asked) for asked in pending.values()])
    return {**(known or {}), **dict(zip(pending, answers, strict=True))}


def critique_of(pair: PathPair, judgements: Mapping[int, Judgement], config: CritiqueConfig) -> Critique:
    """Return the critique of a pair's bad path, from judgements of its nodes.

    Raises `KeyError` if a node of the scan was not judged.
    """
    scanned = range(scan_start(pair.split, config), len(pair.bad.nodes))
    judged = [judgements[pair.bad.nodes[position]] for position in scanned]
    verdicts = [
        StepVerdict(position=position, verdict=judgement.verdict, reply=judgement.reply)
        for position, judgement in zip(scanned, judged, strict=True)
    ]
    # A step that no reply was given about, since it overfills the judge's context, or none that can
    # be read, is no error.
    read = [
        verdict
        for verdict, judgement in zip(verdicts, judged, strict=True)
        if not all(map(is_unreadable, judgement.generations))
    ]
    return Critique(verdicts=tuple(verdicts), first_error=first_error(read, pair.split, config))


def first_error(verdicts: Iterable[StepVerdict], split: int, config: CritiqueConfig) -> int | None:
    """Return the position of the first bad step at or after the start of the scan, or None.

    The recipe decides whether an unparsable verdict is an error. If the scan starts at the root,
    the position may be before `split`, among the steps that the good path shares.
    """
    errors = {Verdict.BAD} | ({Verdict.UNPARSABLE} if config.unparsable == "bad" else set())
    start = scan_start(split, config)
    return min((v.position for v in verdicts if v.position >= start and v.verdict in errors), default=None)


def _request(path: Path, position: int, dropped: int, *, config: CritiqueConfig, seed: int) -> Request:
    steps = path.trajectory.steps
    log = [(step.action, step.observation) for step in steps[dropped:position]]
    step = steps[position]
    return Request(
        messages=judge_messages(path.trajectory.first_observation, log, step.action, step.observation),
        sampling=sampling_of(config),
        seed=derive_seed(seed, "critique", path.trajectory.instance.key, path.nodes[position]),
        n=config.votes,
        session=f"{path.tree_id}#judge",
        helper=True,
    )


async def _judge(path: Path, question: Question, ask: Ask, config: CritiqueConfig, *, seed: int) -> Judgement:
    """Return the verdict on a node. A log that fits by an estimate but not by the model's count is
    halved.
    """
    position = path.nodes.index(question.node)
    while True:
        try:
            generations = tuple(await ask(question.request))
            break
        except PromptTooLong:
            if question.dropped_steps == position:
                # Nothing more can be dropped: this observation alone overfills the judge's context.
                return _judgement(question, Verdict.UNPARSABLE, (), ())
        dropped = question.dropped_steps + -(-(position - question.dropped_steps) // 2)
        request = _request(path, position, dropped, config=config, seed=seed)
        question = replace(question, request=request, dropped_steps=dropped)
    if len(generations) != question.request.n:
        raise ModelFault(
            f"judging node {question.node} of {question.request.session}: {question.request.n} replies were asked for, "
            f"{len(generations)} came; check the backend"
        )
    read = published_verdict if config.unparsable == "published" else parse_verdict
    texts = map(readable, generations)
    votes = tuple(Verdict.UNPARSABLE if text is None else read(text) for text in texts)
    return _judgement(question, majority(votes), votes, generations)


def _judgement(
    question: Question, verdict: Verdict, votes: tuple[Verdict, ...], generations: tuple[Generation, ...]
) -> Judgement:
    return Judgement(
        node=question.node,
        seed=question.request.seed,
        dropped_steps=question.dropped_steps,
        verdict=verdict,
        votes=votes,
        generations=generations,
    )
