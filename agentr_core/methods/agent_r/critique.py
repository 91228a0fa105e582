"""Critique: pair good and bad paths of each tree; a judge finds the first error of each bad one."""

from __future__ import annotations

import asyncio
import pathlib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from agentr_core.environment import Environment
from agentr_core.episodes.rollout import SampleReplies
from agentr_core.episodes.units import run_all
from agentr_core.errors import ModelFault, PromptTooLong
from agentr_core.evaluation.metrics import Judge, success_rate
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.collect import finished_trees
from agentr_core.methods.agent_r.pairs import pair_id, pairs_of_tree
from agentr_core.methods.table import plans_of
from agentr_core.models.batching import gather_or_cancel
from agentr_core.recipes.agent_r import CritiqueConfig
from agentr_core.recipes.fields import sampling_of
from agentr_core.recipes.models import ModelRole
from agentr_core.replies import after_thoughts, answer_text, is_cut_within_thought
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.equipment import concurrency_for, count_units, with_backpressure
from agentr_core.search.tree import path_to, steps_to
from agentr_core.stages.regrade import rescored_paths
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.trajectories import (
    Episode,
    copy_judgements,
    critique_rows,
    judgement_rows,
    load_judgements,
    load_oracle,
    load_pairs,
    load_trees,
    oracle_rows,
    pair_rows,
    runs_with_same_input,
)
from agentr_core.store.queries.trees import PairVerdict, pair_verdicts
from agentr_core.store.tables import Rows, merge
from agentr_core.types import (
    Critique,
    Generation,
    Judgement,
    Message,
    PathPair,
    Rejection,
    Request,
    StepVerdict,
    Trajectory,
    Tree,
    TreePath,
    Verdict,
)

# Read the verdict in a judge's reply. Source: Agent-R section 3.2.

_LABEL = re.compile(r"(?<![^\W_])judge?ment[\s*_\"']*:", re.IGNORECASE)
_VERDICT = re.compile(r"[\W_]*(good|bad|uncertain)(?![^\W_])((?:(?![.;!]\s)[^\n])*)", re.IGNORECASE)
_ANY_VERDICT = re.compile(r"(?<![^\W_])(?:good|bad|uncertain)(?![^\W_])", re.IGNORECASE)


def parse_verdict(reply: str) -> Verdict:
    """Return the verdict after a reply's last "Judgement:" or "Judgment:", or `UNPARSABLE`. The
    label is looked for after the reply's thoughts.

    One of the words good, bad and uncertain must follow directly, in any case and with any
    punctuation around it, and the rest of that sentence must not contain another of them: a judge
    that copies "Good/Bad/Uncertain" has not judged.
    """
    reply = after_thoughts(reply) or ""
    labels = list(_LABEL.finditer(reply))
    match = _VERDICT.match(reply, labels[-1].end()) if labels else None
    if match is None:
        return Verdict.UNPARSABLE
    verdict = Verdict(match[1].lower())
    if any(word.lower() != verdict for word in _ANY_VERDICT.findall(match[2])):
        return Verdict.UNPARSABLE
    return verdict


def parse_published_verdict(reply: str) -> Verdict:
    """Return the verdict as the authors' code parses it: good or uncertain if the text after the
    last "Judgement:" contains that word, in any case, else bad. Without the label, the whole reply
    is searched.
    """
    judgement = reply.rpartition("Judgement:")[2].lower()
    return next((verdict for verdict in (Verdict.GOOD, Verdict.UNCERTAIN) if verdict in judgement), Verdict.BAD)


def reason_of(reply: str) -> str:
    """Return a judge's reason: the text between its thoughts and its last label "Judgement:", or
    all text after the thoughts if there is no label. It may be empty.
    """
    text = after_thoughts(reply) or ""
    labels = list(_LABEL.finditer(text))
    return (text[: labels[-1].start()] if labels else text).strip()


def majority_verdict(votes: Iterable[Verdict]) -> Verdict:
    """Return the verdict with the most votes; a tie gives uncertain.

    Unparsable votes do not count. If there are no others, or no votes at all, the result is
    unparsable.
    """
    counts = Counter(vote for vote in votes if vote is not Verdict.UNPARSABLE).most_common()
    if not counts:
        return Verdict.UNPARSABLE
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return Verdict.UNCERTAIN
    return counts[0][0]


# The judge's prompt, worded to fit any environment. Source: Agent-R section 3.2 (own wording).

JUDGE_INSTRUCTION = """\
You check the work of an agent. Below are its task, what it has done so far, and its next action with what came of it.
Judge the next action only. Give your reason in a line, then your word in a line of its own:
Judgement: Good, if the action clearly helps towards the goal
Judgement: Bad, if it clearly harms, fails, or does not belong to the task
Judgement: Uncertain, if neither is clear"""


def judge_messages(
    first_observation: str, log: Sequence[tuple[str, str]], action: str, observation: str
) -> tuple[Message, ...]:
    """Return the prompt that asks the judge for one verdict: a single user message, which tells it
    to end with a line `Judgement: ...`.

    Args:
        first_observation: the first observation of the episode.
        log: (action, observation) of the steps before the judged one, oldest first.
        action: the judged action, as the environment's parser read it.
        observation: the observation that followed it.
    """
    history = (
        "".join(f"Action: {past_action}\nObservation: {past_observation}\n" for past_action, past_observation in log)
        or "Nothing yet.\n"
    )
    text = (
        f"{JUDGE_INSTRUCTION}\n\nTask:\n{first_observation}\n\nSo far:\n{history}\n"
        f"Next:\nAction: {action}\nObservation: {observation}"
    )
    return (Message(role="user", text=text),)


# Find the first error of a bad path by asking a judge. Source: Agent-R section 3.2.
#
# Each step is judged on its own, and no question depends on the answer to another. So all questions
# about all paths of a tree are asked at once, and a step that several paths share is judged once.


class Scan(NamedTuple):
    """A path to be judged, from the step at position `start` on."""

    path: TreePath
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to the judge about one node. `dropped_steps` is the number of oldest steps left
    out of its log so that the prompt fits the judge's context.
    """

    node: int
    request: Request
    dropped_steps: int


def scans_of(pairs: Iterable[PathPair], config: CritiqueConfig) -> tuple[Scan, ...]:
    """Return one scan for each bad path in the pairs of one tree. It starts at the earliest step
    that any pair of that path needs judged.
    """
    scans: dict[int, Scan] = {}
    for pair in pairs:
        start = scan_start(pair.split, config)
        earlier = scans.get(pair.bad.leaf)
        scans[pair.bad.leaf] = Scan(pair.bad, start if earlier is None else min(start, earlier.start))
    return tuple(scans.values())


def scan_start(split: int, config: CritiqueConfig) -> int:
    """Return the position of the first step to judge in a pair whose paths share `split` steps."""
    return split if config.scan_from == "split" else 0


def judge_questions(
    scan: Scan,
    config: CritiqueConfig,
    *,
    seed: int,
    count_tokens: Callable[[Request], int],
    context_length: int,
    skipped_nodes: Container[int] = (),
) -> tuple[Question, ...]:
    """Return a question to the judge for each step of a scan, in order, except for nodes in
    `skipped_nodes`.

    The log in a question has actions and observations, never thoughts. Its oldest steps are dropped
    until the prompt leaves room for `config.max_new_tokens` in a context of `context_length`
    tokens, or no log is left. The seed of a question depends only on `seed`, the instance of the
    tree and the node.
    """
    path = scan.path

    def fits(request: Request) -> bool:
        return count_tokens(request) + config.max_new_tokens <= context_length

    questions = []
    for position in range(scan.start, len(path.nodes)):
        if path.nodes[position] in skipped_nodes:
            continue
        request_without = partial(_judge_request, path, position, config=config, seed=seed)
        dropped_steps, request = 0, request_without(0)
        if not fits(request):
            dropped_steps = bisect_left(range(position), True, key=lambda count: fits(request_without(count)))
            request = request_without(dropped_steps)
        questions.append(Question(node=path.nodes[position], request=request, dropped_steps=dropped_steps))
    return tuple(questions)


async def judge_paths(
    scans: Sequence[Scan],
    ask: SampleReplies,
    config: CritiqueConfig,
    *,
    seed: int,
    count_tokens: Callable[[Request], int],
    context_length: int,
    judgements: Mapping[int, Judgement] | None = None,
    on_judgement: Callable[[Judgement], None] | None = None,
) -> dict[int, Judgement]:
    """Judge all steps in the scans of one tree concurrently; return the judgements by node.

    Args:
        judgements: earlier judgements by node; they are not asked for again, and are returned with
            the new ones.
        on_judgement: called with each new judgement as soon as it is made.

    Raises:
        ModelFault: the judge did not return `config.votes` replies to a question.

    Errors of `ask` other than `PromptTooLong` are passed on.
    """
    pending_by_node: dict[int, tuple[TreePath, Question]] = {}
    known_nodes = set(judgements or ())
    for scan in scans:
        for question in judge_questions(
            scan,
            config,
            seed=seed,
            count_tokens=count_tokens,
            context_length=context_length,
            skipped_nodes=known_nodes,
        ):
            pending_by_node[question.node] = scan.path, question
            known_nodes.add(question.node)

    async def judge(path: TreePath, question: Question) -> Judgement:
        judgement = await _judge(path, question, ask, config, seed=seed)
        if on_judgement is not None:
            on_judgement(judgement)
        return judgement

    new_judgements = await gather_or_cancel([judge(path, question) for path, question in pending_by_node.values()])
    return {**(judgements or {}), **dict(zip(pending_by_node, new_judgements, strict=True))}


def critique_of(pair: PathPair, judgements: Mapping[int, Judgement], config: CritiqueConfig) -> Critique:
    """Return the critique of a pair's bad path, from judgements of its nodes.

    Raises `KeyError` if a node of the scan was not judged.
    """
    positions = range(scan_start(pair.split, config), len(pair.bad.nodes))
    scan_judgements = [judgements[pair.bad.nodes[position]] for position in positions]
    verdicts = [
        StepVerdict(position=position, verdict=judgement.verdict, reply=judgement.reply)
        for position, judgement in zip(positions, scan_judgements, strict=True)
    ]
    # A step does not count as an error if none of the replies about it is readable, or if there are
    # no replies because the step alone overfills the judge's context.
    readable_verdicts = [
        verdict
        for verdict, judgement in zip(verdicts, scan_judgements, strict=True)
        if not all(map(is_cut_within_thought, judgement.generations))
    ]
    return Critique(verdicts=tuple(verdicts), first_error=first_error(readable_verdicts, pair.split, config))


async def first_error_in(
    key: str, trajectory: Trajectory, ask: SampleReplies, config: CritiqueConfig, *, seed: int
) -> int | None:
    """Return the position of the first bad step of an episode, or None if no step is bad. Summaries
    are not judged.

    For episodes that are not in a tree. Prompts are not counted beforehand: the older half of the
    log is dropped each time the judge rejects a prompt as too long. Raises as `judge_paths`.

    Args:
        key: a name for the episode; it is in the request's session and in error messages.
    """
    action_positions = [position for position, step in enumerate(trajectory.steps) if step.summary_of is None]
    episode = replace(trajectory, steps=tuple(trajectory.steps[position] for position in action_positions))
    path = TreePath(tree_id=key, nodes=tuple(range(1, len(action_positions) + 1)), trajectory=episode)
    judgements = await judge_paths(
        [Scan(path, 0)], ask, config, seed=seed, count_tokens=lambda _: 0, context_length=config.max_new_tokens
    )
    error_index = critique_of(PathPair(good=path, bad=path, split=0), judgements, config).first_error
    return None if error_index is None else action_positions[error_index]


def first_error(verdicts: Iterable[StepVerdict], split: int, config: CritiqueConfig) -> int | None:
    """Return the position of the first bad step at or after the start of the scan, or None.

    With `config.unparsable: bad`, an unparsable verdict counts as bad. With `config.scan_from:
    root`, the position may be before `split`, in the steps that both paths share.
    """
    error_verdicts = {Verdict.BAD} | ({Verdict.UNPARSABLE} if config.unparsable == "bad" else set())
    start = scan_start(split, config)
    return min((v.position for v in verdicts if v.position >= start and v.verdict in error_verdicts), default=None)


def _judge_request(path: TreePath, position: int, dropped_steps: int, *, config: CritiqueConfig, seed: int) -> Request:
    steps = path.trajectory.steps
    log = [(step.action, step.observation) for step in steps[dropped_steps:position]]
    step = steps[position]
    return Request(
        messages=judge_messages(path.trajectory.first_observation, log, step.action, step.observation),
        sampling=sampling_of(config),
        seed=derive_seed(seed, "critique", path.trajectory.instance.key, path.nodes[position]),
        n=config.votes,
        session=f"{path.tree_id}#judge",
        helper=True,
    )


async def _judge(
    path: TreePath, question: Question, ask: SampleReplies, config: CritiqueConfig, *, seed: int
) -> Judgement:
    """Ask the judge about one node and return its judgement.

    Each time the model rejects the prompt as too long, the older half of the log is dropped. If the
    step does not fit even without a log, the judgement is unparsable and has no votes. Raises
    `ModelFault` on a wrong number of replies.
    """
    position = path.nodes.index(question.node)
    generations: tuple[Generation, ...] | None = None
    while generations is None:
        try:
            generations = tuple(await ask(question.request))
        except PromptTooLong:
            if question.dropped_steps == position:
                # No log is left to drop: this step alone overfills the judge's context.
                break
            dropped_steps = question.dropped_steps + -(-(position - question.dropped_steps) // 2)
            request = _judge_request(path, position, dropped_steps, config=config, seed=seed)
            question = replace(question, request=request, dropped_steps=dropped_steps)
    if generations is not None and len(generations) != question.request.n:
        raise ModelFault(
            f"judging node {question.node} of {question.request.session}: {question.request.n} replies were asked for, "
            f"{len(generations)} came; check the backend"
        )
    parse = parse_published_verdict if config.unparsable == "published" else parse_verdict
    texts = map(answer_text, generations or ())
    votes = tuple(Verdict.UNPARSABLE if text is None else parse(text) for text in texts)
    return Judgement(
        node=question.node,
        seed=question.request.seed,
        dropped_steps=question.dropped_steps,
        verdict=majority_verdict(votes),
        votes=votes,
        generations=generations or (),
    )


STAGE = "critique"


def pairs_of_iteration(ctx: RunContext, iteration: int, trees: Mapping[str, Tree]) -> list[PathPair]:
    """Return an iteration's stored pairs of the given trees, tree by tree, and within a tree in the
    order in which they were made.
    """
    rows_by_tree = load_pairs(ctx.store, ctx.iteration_id(iteration))
    pairs = []
    for tree_id, paths in rescored_paths(ctx, trees).items():
        paths_by_leaf = {path.leaf: path for path in paths}
        pairs += [
            PathPair(good=paths_by_leaf[row.good_leaf], bad=paths_by_leaf[row.bad_leaf], split=row.shared_steps)
            for row in rows_by_tree.get(tree_id, ())
        ]
    return pairs


def _make_pairs(
    ctx: RunContext, iteration: int, trees: Mapping[str, Tree]
) -> tuple[list[PathPair], list[Rows], list[Rejection]]:
    """Return the pairs of all trees of an iteration, the rows of the pairs, and the rejections."""
    pairs: list[PathPair] = []
    rows: list[Rows] = []
    rejections: list[Rejection] = []
    iteration_id = ctx.iteration_id(iteration)
    for key, paths in rescored_paths(ctx, trees).items():
        tree_pairs, tree_rejections = pairs_of_tree(
            key,
            paths,
            ctx.recipe.pairs,
            alpha=ctx.recipe.alpha(iteration),
            seed=derive_seed(ctx.recipe.seed, "pairs", iteration),
        )
        pairs += tree_pairs
        rows += [
            pair_rows(pair_id(pair), pair, iteration_id=iteration_id, position=position)
            for position, pair in enumerate(tree_pairs)
        ]
        rejections += tree_rejections
    return pairs, rows, rejections


async def critique(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Pair the paths of an iteration's finished trees, and judge the bad paths without a critique;
    return the number of `pairs` and of new critiques (`judged`).

    Judgements of the same judge on the same trees in another run are copied. In splice mode
    `direct`, pairs are stored but nothing is judged.

    Raises:
        ConfigError: most replies of the judge are unreadable, or `data.scoring` is unusable.
        ErrorBudgetSpent: more trees could not be judged than the recipe allows.
    """
    trees = finished_trees(ctx, iteration)
    pairs, rows, rejections = await asyncio.to_thread(_make_pairs, ctx, iteration, trees)
    ctx.store.write(merge([*rows, rejection_rows(rejections, iteration_id=ctx.iteration_id(iteration))]))
    missing_ids = set(ctx.store.missing("critique", [pair_id(pair) for pair in pairs]))
    pairs_by_tree: dict[str, list[PathPair]] = {}
    for pair in pairs:
        if pair_id(pair) in missing_ids:
            pairs_by_tree.setdefault(pair.bad.tree_id, []).append(pair)
    if pairs_by_tree and ctx.recipe.splice.mode != "direct":
        await _judge_all(ctx, iteration, pairs_by_tree, num_trees=len({pair.bad.tree_id for pair in pairs}))
    remaining_ids = ctx.store.missing("critique", list(missing_ids))
    # Alarms compare the judge with the oracle before samples are made from its verdicts.
    await asyncio.to_thread(ask_oracle, ctx, pair_verdicts(ctx.store, ctx.iteration_id(iteration)))
    return {"pairs": len(pairs), "judged": len(missing_ids) - len(remaining_ids)}


def ask_oracle(ctx: RunContext, verdicts: Iterable[PairVerdict]) -> dict[tuple[str, int], Verdict]:
    """Return the oracles' verdicts on the steps of judged paths, by (tree id, node index).

    Verdicts that are not stored are computed by the environments now, which may block, and are
    stored. Steps of an environment without an oracle have none.
    """
    leaves = sorted({(row.tree_id, row.bad_leaf) for row in verdicts})
    truth = load_oracle(ctx.store, sorted({tree_id for tree_id, _ in leaves}))
    missing_leaves = [(tree_id, leaf) for tree_id, leaf in leaves if (tree_id, leaf) not in truth]
    if not missing_leaves:
        return truth
    new_verdicts: dict[str, dict[int, Verdict]] = {}
    with ctx.worlds() as worlds:
        if not any(env.has(Environment.oracle) for _, env in worlds):
            return truth
        trees = load_trees(ctx.store, sorted({tree_id for tree_id, _ in missing_leaves}))
        for tree_id, leaf in missing_leaves:
            tree = trees[tree_id]
            env = worlds.env_of(tree.instance)
            if env.has(Environment.oracle):
                oracle_verdicts = env.oracle(tree.instance, [step.action for step in steps_to(tree.nodes, leaf)])
                new_verdicts.setdefault(tree_id, {}).update(
                    zip(path_to(tree.nodes, leaf), oracle_verdicts, strict=True)
                )
    ctx.store.write(merge(oracle_rows(tree_id, verdicts_by_node) for tree_id, verdicts_by_node in new_verdicts.items()))
    return truth | {
        (tree_id, node): verdict
        for tree_id, verdicts_by_node in new_verdicts.items()
        for node, verdict in verdicts_by_node.items()
    }


async def _judge_all(
    ctx: RunContext, iteration: int, pairs_by_tree: dict[str, list[PathPair]], *, num_trees: int
) -> None:
    """Judge the bad paths of the pairs in `pairs_by_tree`, given by tree id, and store each
    judgement and the critique of each pair.

    `num_trees` is the number of trees with pairs, including those that are judged already; the
    error budget is a share of it.
    """
    config, iteration_id = ctx.recipe.critique, ctx.iteration_id(iteration)
    # Copy judgements only if the same model made them: a judge of its own, or the actor that grew
    # the trees. Trees of one teacher may be shared by runs whose policies, as judges, differ.
    has_same_judge = ctx.recipe.models.judge is not None or ctx.collector(iteration).role == "actor"
    for other_run_id in runs_with_same_input(ctx.store, ctx.run_id, STAGE) if has_same_judge else []:
        copy_judgements(ctx.store, list(pairs_by_tree), other_run_id, iteration_id=iteration_id)
    stored_judgements = await asyncio.to_thread(load_judgements, ctx.store, list(pairs_by_tree))
    async with ctx.role_sampler("judge", ctx.policy(iteration).path, STAGE, iteration) as (
        batcher,
        writer,
        reply_counts,
    ):

        async def judge_tree(item: tuple[str, list[PathPair]]) -> None:
            tree_id, pairs = item

            def store_judgement(judgement: Judgement) -> None:
                writer.add(judgement_rows(tree_id, judgement, iteration_id=iteration_id))
                for reply in judgement.generations:
                    reply_counts.count(reply)

            judgements = await judge_paths(
                scans_of(pairs, config),
                with_backpressure(batcher, writer),
                config,
                seed=derive_seed(ctx.recipe.seed, "critique", iteration),
                count_tokens=batcher.model.count_tokens,
                context_length=batcher.model.context_length,
                judgements=stored_judgements.get(tree_id, {}),
                on_judgement=store_judgement,
            )
            for pair in pairs:
                pair_critique = critique_of(pair, judgements, config)
                writer.add(critique_rows(pair_id(pair), pair_critique, iteration_id=iteration_id, nodes=pair.bad.nodes))

        async with count_units(ctx.progress, batcher, "trees judged", total=len(pairs_by_tree)) as count_done:
            await run_all(
                list(pairs_by_tree.items()),
                judge_tree,
                key=lambda item: item[0],
                errors=ctx.recipe.errors,
                on_error=ctx.on_error(writer, STAGE, iteration),
                concurrency=concurrency_for(batcher, config.votes),
                on_result=count_done,
                num_units=num_trees,
            )


# Try out judges on lost episodes, to see how good their verdicts are before a run relies on them.

TRIAL = "headroom"
VerdictsByEpisode = dict[str, Sequence[Verdict]]
"""The verdicts on each episode's steps, in the order of the steps, by trajectory id."""


async def measure_judges(
    ctx: RunContext, lost_episodes: Sequence[Episode], models: Sequence[pathlib.Path]
) -> tuple[Judge, ...]:
    """Let each candidate judge all steps of the lost episodes, and return a record of each: first
    the recipe's judge, then each of `models` in its place. Return () if the recipe judges nothing
    or there are no lost episodes.

    The judges are asked with the settings of section `critique`. With several votes, each has two
    records: for its first vote alone, and for the majority. Verdicts are compared with those of the
    environment's oracle, if there is one.

    Raises:
        ErrorBudgetSpent: more episodes could not be judged than the recipe allows.
    """
    stages = {stage.name for plan in plans_of(ctx.recipe) for stage in plan.stages}
    if "critique" not in stages or ctx.recipe.splice.mode == "direct" or not lost_episodes:
        return ()
    truth: VerdictsByEpisode = {}
    with ctx.worlds() as worlds:
        for episode in lost_episodes:
            env = worlds.env_of(episode.instance)
            if env.has(Environment.oracle):
                actions = [step.action for step in episode.trajectory.steps]
                truth[episode.trajectory_id] = tuple(env.oracle(episode.instance, actions))
    judge = ctx.recipe.models.judge
    candidates: list[tuple[str, ModelRole, pathlib.Path]] = [
        (judge.label if judge else "the model itself", "judge", ctx.policy(1).path),
        *((str(path), "actor", path) for path in models),
    ]
    judges: list[Judge] = []
    for name, role, path in candidates:
        judgements = await _judge_episodes(ctx, lost_episodes, role, path, name)
        votes = ctx.recipe.critique.votes
        if votes > 1:
            first_votes = {
                key: [step.votes[0] if step.votes else Verdict.UNPARSABLE for step in steps]
                for key, steps in judgements.items()
            }
            judges.append(judge_of(name, first_votes, truth, votes=1))
        verdicts = {key: [step.verdict for step in steps] for key, steps in judgements.items()}
        judges.append(judge_of(name, verdicts, truth, votes=votes))
    return tuple(judges)


async def _judge_episodes(
    ctx: RunContext, lost_episodes: Sequence[Episode], role: ModelRole, policy: pathlib.Path, name: str
) -> dict[str, list[Judgement]]:
    """Return one model's judgements of each episode's steps, in the order of the steps, by
    trajectory id.
    """
    config = ctx.recipe.critique
    async with ctx.role_sampler(role, policy, TRIAL, 0) as (sampler, writer, _):

        async def judge_episode(episode: Episode) -> list[Judgement]:
            nodes = tuple(range(1, len(episode.trajectory.steps) + 1))
            path = TreePath(tree_id=episode.trajectory_id, nodes=nodes, trajectory=episode.trajectory)
            judgements = await judge_paths(
                [Scan(path, 0)],
                with_backpressure(sampler, writer),
                config,
                seed=derive_seed(ctx.recipe.seed, TRIAL, "judge", episode.repeat),
                count_tokens=sampler.model.count_tokens,
                context_length=sampler.model.context_length,
            )
            return [judgements[node] for node in nodes]

        async with count_units(
            ctx.progress, sampler, f"lost episodes judged by {name}", total=len(lost_episodes)
        ) as count_done:
            return await run_all(
                lost_episodes,
                judge_episode,
                key=lambda episode: episode.trajectory_id,
                errors=ctx.recipe.errors,
                on_error=ctx.on_error(writer, TRIAL, 0),
                concurrency=concurrency_for(sampler, config.votes),
                on_result=count_done,
            )


def judge_of(
    name: str, verdicts: Mapping[str, Sequence[Verdict]], truth: Mapping[str, Sequence[Verdict]], *, votes: int
) -> Judge:
    """Return the record of a judge: the share of its verdicts that could be parsed and, on the
    episodes in `truth`, how often it agrees with the oracle.

    Args:
        verdicts: the judge's verdicts on each episode's steps, in order, by trajectory id.
        truth: the oracle's verdicts in the same form; episodes may be missing.
        votes: how many votes each verdict is the majority of.
    """
    parse_results = [
        verdict is not Verdict.UNPARSABLE for episode_verdicts in verdicts.values() for verdict in episode_verdicts
    ]
    verdict_pairs = [pair for key in verdicts if key in truth for pair in zip(verdicts[key], truth[key], strict=True)]
    return Judge(
        name=name,
        votes=votes,
        episodes=len(verdicts),
        steps=len(parse_results),
        read=success_rate(parse_results),
        right=success_rate([verdict is true_verdict for verdict, true_verdict in verdict_pairs]),
        bad=success_rate([true_verdict is Verdict.BAD for _, true_verdict in verdict_pairs]),
        bad_is_right=success_rate(
            [true_verdict is Verdict.BAD for verdict, true_verdict in verdict_pairs if verdict is Verdict.BAD]
        ),
        bad_is_seen=success_rate(
            [verdict is Verdict.BAD for verdict, true_verdict in verdict_pairs if true_verdict is Verdict.BAD]
        ),
        first_error=success_rate(
            [_first_bad(verdicts[key]) == _first_bad(truth[key]) for key in verdicts if key in truth]
        ),
    )


def _first_bad(verdicts: Sequence[Verdict]) -> int | None:
    return next((position for position, verdict in enumerate(verdicts) if verdict is Verdict.BAD), None)
