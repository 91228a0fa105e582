"""A small store that has a row of each kind that the viewer shows."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from finished import ended

from agentr_core.episodes.units import UnitError
from agentr_core.search.tree import leaf_paths
from agentr_core.store.codec.ledger import (
    Group,
    checkpoint_rows,
    evaluation_rows,
    event_rows,
    group_rows,
    iteration_rows,
    rejection_rows,
    run_rows,
)
from agentr_core.store.codec.samples import dataset_rows, derivation_rows, preference_rows, sample_rows, store_dataset
from agentr_core.store.codec.trajectories import (
    critique_rows,
    episode_rows,
    finished_tree_rows,
    instance_row,
    pair_rows,
    trajectory_rows,
    tree_rows,
)
from agentr_core.store.database import Store
from agentr_core.store.tables import Rows, TreeHead, merge, row_of
from agentr_core.types import (
    Critique,
    Derivation,
    Instance,
    Message,
    Node,
    PathPair,
    Preference,
    PreferenceCase,
    Provenance,
    Rejection,
    Sample,
    SampleKind,
    Span,
    Step,
    StepVerdict,
    StopReason,
    ToolCall,
    Trajectory,
    Tree,
    Verdict,
    grown_turn,
)

RUN: Final = "aaaa000000000001"
ITERATION: Final = "aaaa000000000011"
BASE, TRAINED = "aaaa0000000000c0", "aaaa0000000000c1"
TREE: Final = "aaaa0000000000d0"
PAIR: Final = "aaaa0000000000e0"
REVISION, GOOD, CHOSEN, REJECTED = (f"aaaa0000000000f{digit}" for digit in range(4))
PREFERENCE: Final = "aaaa00000000a000"
ROLLOUTS: Final = tuple(f"aaaa00000000b00{digit}" for digit in range(4))
BEFORE, AFTER = "aaaa00000000e000", "aaaa00000000e001"
PAGES: Final = (
    "/",
    f"/run/{RUN}",
    "/trajectories",
    "/trees",
    "/pairs",
    "/samples",
    "/preferences",
    "/groups",
    "/rejections",
    f"/differences?before={BEFORE}&after={AFTER}",
    f"/trajectory/{ROLLOUTS[0]}",
    f"/family/{ROLLOUTS[0]}",
    f"/tree/{TREE}",
    f"/node/{TREE}/3",
    f"/pair/{PAIR}",
    f"/sample/{REVISION}",
    f"/preference/{PREFERENCE}",
    f"/group/{ITERATION}/1/0",
    f"/checkpoint/{TRAINED}",
    "/dataset/aaaa00000000d000",
    f"/evaluation/{AFTER}",
    "/search?q=seen",
    "/means",
)
"""A page of each kind."""


def fill(path: Path, word: str = "") -> Store:
    """Return a store at a path with a row of each kind; every text in it that comes from outside
    ends with `word`.
    """
    store = Store(path)
    store.write(merge([*_run(word), *_trees(word), *_samples(word), *_episodes(word)]))
    rows = dataset_rows("aaaa00000000d000", [REVISION], iteration_id=ITERATION, content_hash="feed", counts={})
    store_dataset(store, rows, {REVISION: (9, 2)})
    odd = UnitError(
        key="toy", kind="ValueError", phase="step", message=f"odd{word}", traceback=f"odd{word}", is_final=True
    )
    store.write(event_rows(odd, run_id=RUN, iteration_id=ITERATION, stage="collect"))
    return store


def begun(trajectory_id: str, text: str) -> Rows:
    """Return the rows of an episode that has a first observation and no step."""
    episode = Trajectory.ended(_instance(""), text, (), StopReason.TIME_LIMIT)
    return trajectory_rows(trajectory_id, episode, source="rollout")


def answered(key: str) -> Rows:
    """Return the row of a call that nothing refers to, and that refers to nothing."""
    return {"answered_call": [row_of("answered_call", ToolCall(tool="python"), call_id=key)]}


def _instance(word: str, index: int = 3) -> Instance:
    return Instance(environment=f"toy{word}", split="train", index=index)


def _step(reply: str, word: str, reward: float = 0.0, *, success: bool = False) -> Step:
    call = ToolCall(tool=f"python{word}", key=f"1 + 1{word}", milliseconds=2.0, output=f"two{word}")
    return Step(
        reply=f"{reply}{word}",
        action=f"{reply.upper()}{word}",
        valid=reply != "lose",
        observation=f"seen {reply}{word}",
        reward=reward,
        terminated=success,
        success=success,
        token_ids=tuple(map(ord, reply)),
        tool_calls=(call,),
    )


def _trajectory(word: str, *, success: bool, index: int = 3) -> Trajectory:
    return Trajectory(
        instance=_instance(word, index),
        first_observation=f"Start.{word}",
        steps=(_step("look", word), _step("end", word, float(success), success=success)),
        reward=float(success),
        success=success,
        stop=StopReason.SUCCESS if success else StopReason.STEP_LIMIT,
    )


def _run(word: str) -> list[Rows]:
    start = datetime(2026, 1, 2, tzinfo=UTC)
    run = run_rows(
        RUN, recipe=f"toy{word}", method=f"agent-r{word}", config={}, versions={}, workspace="w", started_at=start
    )
    rejection = Rejection(stage="filter", subject=REVISION, reason="duplicate", detail=f"the same{word}")
    return [
        {"instance": [instance_row(_instance(word), depth=2)]},
        run,
        ended(iteration_rows(f"{ITERATION}base", run_id=RUN, iteration=0, checkpoint_out=BASE)),
        iteration_rows(ITERATION, run_id=RUN, iteration=1, checkpoint_in=BASE, checkpoint_out=TRAINED),
        checkpoint_rows(BASE, path=f"base{word}", weights_sha256="aa", config={}),
        rejection_rows([rejection], iteration_id=ITERATION),
        checkpoint_rows(
            TRAINED,
            path="one",
            weights_sha256="bb",
            config={},
            parent_id=BASE,
            dataset_id="aaaa00000000d000",
            iteration_id=ITERATION,
        ),
    ]


def _trees(word: str) -> list[Rows]:
    def node(index: int, parent: int, depth: int, step: Step | None, stop: StopReason | None = None) -> Node:
        visits = 0 if index == 4 else 2
        return Node(
            index=index,
            parent=parent,
            depth=depth,
            step=step,
            visits=visits,
            value_sum=visits / 2,
            terminal=stop is not None,
            stop=stop,
        )

    tree = Tree(
        instance=_instance(word),
        first_observation=f"Start.{word}",
        nodes=(
            node(0, -1, 0, None),
            node(1, 0, 1, _step("look", word)),
            node(2, 1, 2, _step("win", word, 1.0, success=True), StopReason.SUCCESS),
            node(3, 1, 2, _step("lose", word), StopReason.FAILURE),
            node(4, 0, 1, _step("wait", word)),
        ),
        dives_done=1,
        seed=99,
    )
    head = TreeHead(
        tree_id=TREE,
        iteration_id=ITERATION,
        checkpoint_id=BASE,
        config={},
        instance=tree.instance,
        first_observation=tree.first_observation,
        seed=99,
    )
    good, bad = leaf_paths(tree, TREE)
    critique = Critique(
        verdicts=(StepVerdict(position=1, verdict=Verdict.BAD, reply=f"Judgement: bad{word}"),), first_error=1
    )
    return [
        tree_rows(head, tree),
        finished_tree_rows(head, tree),
        pair_rows(PAIR, PathPair(good=good, bad=bad, split=1), iteration_id=ITERATION),
        critique_rows(PAIR, critique, iteration_id=ITERATION, nodes=bad.nodes),
    ]


def _samples(word: str) -> list[Rows]:
    start = Message(role="user", text=f"Start.{word}")
    reply = grown_turn([Span(text=f"think{word}", train=True, token_ids=(1, 2)), Span(text=f" result{word}")])
    revision = Sample(
        kind=SampleKind.REVISION,
        messages=(start, reply),
        instance=_instance(word),
        provenance=Provenance(tree_id=TREE, good_leaf=2, bad_leaf=3, split=1, cut=2),
    )

    def side(text: str) -> Sample:
        turn = Message(role="assistant", text=f"{text}{word}", train=True)
        return Sample(kind=SampleKind.GOOD, messages=(start, turn), instance=_instance(word))

    preference = Preference(
        case=PreferenceCase.WIN, chosen=side("win"), rejected=side("lose"), chosen_reward=1.0, rejected_reward=0.0
    )
    return [
        sample_rows(REVISION, revision, iteration_id=ITERATION, pair_id=PAIR),
        sample_rows(GOOD, side("good"), iteration_id=ITERATION),
        preference_rows(PREFERENCE, preference, chosen_id=CHOSEN, rejected_id=REJECTED, iteration_id=ITERATION),
    ]


def _episodes(word: str) -> list[Rows]:
    win, loss = _trajectory(word, success=True), _trajectory(word, success=False)
    episodes = dict(zip(ROLLOUTS, (win, loss, loss, win), strict=True))
    group = Group(number=0, draw=0, policy=f"p{word}", instance=win.instance, episodes=episodes)
    derivation = Derivation(child=ROLLOUTS[0], parent=ROLLOUTS[1], operator=f"I1{word}", position=1)
    evaluations = [
        rows
        for key, iteration, checkpoint, success in (
            (BEFORE, f"{ITERATION}base", BASE, False),
            (AFTER, ITERATION, TRAINED, True),
        )
        for rows in (
            evaluation_rows(
                key,
                iteration_id=iteration,
                checkpoint_id=checkpoint,
                name=f"test{word}",
                split="train",
                config={},
                finished=True,
            ),
            episode_rows(
                f"{key[:-4]}{key[-1]}", _trajectory(word, success=success), evaluation_id=key, iteration_id=iteration
            ),
        )
    ]
    return [
        *(
            trajectory_rows(key, episode, source=f"rollout{word}", iteration_id=ITERATION)
            for key, episode in episodes.items()
        ),
        group_rows(group, [1.0, -1.0, -1.0, 1.0], iteration_id=ITERATION, step=1, has_contrast=True),
        derivation_rows([derivation], iteration_id=ITERATION),
        *evaluations,
    ]
