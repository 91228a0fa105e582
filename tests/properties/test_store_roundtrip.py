"""Whatever is stored comes back equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import GenericAlias, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentr_core.store.codec.samples import load_samples, sample_rows
from agentr_core.store.codec.trajectories import (
    critique_rows,
    expansion_rows,
    judgement_rows,
    load_critiques,
    load_draws,
    load_judgements,
    load_trajectories,
    load_trees,
    trajectory_rows,
    tree_rows,
)
from agentr_core.store.database import Store
from agentr_core.store.records import from_arrow, to_arrow
from agentr_core.store.tables import Draw, TreeHead
from agentr_core.types import (
    Answer,
    Critique,
    Derivation,
    Generation,
    Grade,
    Grading,
    Instance,
    Judgement,
    Message,
    Node,
    Provenance,
    Rejection,
    Sample,
    SampleKind,
    Step,
    StepVerdict,
    StopReason,
    ToolCall,
    Trajectory,
    Tree,
    Verdict,
)

pytestmark = pytest.mark.slow

# Every example stores under an id of its own, so that all share one database.
SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

texts = st.text(max_size=40)
names = st.text(min_size=1, max_size=12)
units = st.floats(0, 1)
seeds = st.integers(0, 2**63 - 1)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
logprobs = st.none() | st.lists(st.floats(-1e6, 0), max_size=4).map(tuple)
instances = st.builds(Instance, environment=names, split=names, index=st.integers(0, 10**12))
steps = st.builds(
    Step,
    reply=texts,
    action=texts,
    matched=st.none() | texts,
    valid=st.none() | st.booleans(),
    observation=texts,
    reward=units,
    terminated=st.booleans(),
    success=st.booleans(),
    disaster=st.booleans(),
    token_ids=tokens,
    logprobs=logprobs,
    finish_reason=st.sampled_from([None, "stop", "length"]),
    tokenizer=st.sampled_from([None, "4f1c"]),
)
trajectories = st.builds(
    Trajectory,
    instance=instances,
    first_observation=texts,
    steps=st.lists(steps, max_size=4).map(tuple),
    reward=units,
    success=st.booleans(),
    stop=st.sampled_from(StopReason),
)
generations = st.builds(
    Generation,
    text=texts,
    token_ids=tokens,
    finish_reason=st.sampled_from(["stop", "length"]),
    prompt_tokens=st.integers(0, 10**6),
    completion_tokens=st.integers(0, 10**6),
    logprobs=logprobs,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
small = st.none() | st.integers(0, 1000)
samples = st.builds(
    Sample,
    kind=st.sampled_from(SampleKind),
    messages=st.lists(
        st.builds(
            Message,
            role=st.sampled_from(["system", "user", "assistant"]),
            text=texts,
            train=st.booleans(),
            token_ids=st.none() | tokens,
            finish_reason=st.sampled_from([None, "stop", "length"]),
            tokenizer=st.sampled_from([None, "4f1c"]),
        ),
        max_size=5,
    ).map(tuple),
    instance=st.none() | instances,
    provenance=st.builds(
        Provenance,
        tree_id=texts,
        good_leaf=small,
        bad_leaf=small,
        split=small,
        cut=small,
        good_reward=st.none() | units,
        bad_reward=st.none() | units,
        extra=st.dictionaries(texts, json_values, max_size=3),
    ),
)


answers = st.builds(
    Answer,
    role=names,
    model=texts,
    prompt_hash=texts,
    seed=seeds,
    text=texts,
    finish_reason=st.sampled_from(["stop", "length"]),
    prompt_tokens=st.integers(0, 10**6),
    completion_tokens=st.integers(0, 10**6),
    thinks=st.booleans(),
)
calls = st.builds(
    ToolCall,
    tool=names,
    provider=texts,
    parameters=st.dictionaries(texts, json_values, max_size=3),
    key=texts,
    status=names,
    milliseconds=st.floats(0, 1e9),
    cached=st.booleans(),
    output=texts,
)
grades = st.builds(Grade, reward=units, success=st.booleans())
RECORDS: dict[type, st.SearchStrategy[Any]] = {
    Trajectory: trajectories,
    Sample: samples,
    Generation: generations,
    Instance: instances,
    Answer: answers,
    ToolCall: calls,
    Grading: st.builds(Grading, grade=grades, before=grades, answer=st.none() | answers),
    Draw: st.builds(Draw, seed=seeds, number=st.integers(0, 99), generation=generations),
    Derivation: st.builds(
        Derivation,
        child=names,
        parent=names,
        operator=names,
        position=small,
        prompt_hash=texts,
        seed=st.none() | seeds,
        round=small,
    ),
    Rejection: st.builds(Rejection, stage=names, subject=texts, reason=names, detail=texts),
    Step: st.builds(replace, steps, tool_calls=st.lists(calls, max_size=2).map(tuple), dropped=st.integers(0, 9)),
}


@pytest.mark.parametrize("kind", RECORDS)
@given(data=st.data())
def test_a_column_gives_its_records_back(kind: type, data: st.DataObject) -> None:
    records = data.draw(st.lists(st.none() | RECORDS[kind], max_size=4))
    assert from_arrow(to_arrow(records, kind), kind) == records
    lists = data.draw(st.lists(st.none() | st.lists(RECORDS[kind], max_size=3).map(tuple), max_size=3))
    of = GenericAlias(tuple, (kind, ...))
    assert from_arrow(to_arrow(lists, of), of) == lists
    part = to_arrow(lists, of).slice(1)
    assert from_arrow(part, of) == lists[1:], "a part of a column begins elsewhere in its values"


def node(index: int, parent: int, depth: int, step: Step | None) -> st.SearchStrategy[Node]:
    return st.builds(
        Node,
        index=st.just(index),
        parent=st.just(parent),
        depth=st.just(depth),
        step=st.just(step),
        visits=st.integers(0, 10**6),
        value_sum=st.floats(0, 10**6),
        terminal=st.booleans(),
        stop=st.none() | st.sampled_from(StopReason),
        dive=st.integers(0, 100),
        duplicates=st.integers(1, 9),
    )


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    nodes = [draw(node(0, -1, 0, None))]
    for index, step in enumerate(draw(st.lists(steps, max_size=8)), start=1):
        parent = nodes[draw(st.integers(0, index - 1))]
        nodes.append(draw(node(index, parent.index, parent.depth + 1, step)))
    return Tree(
        instance=draw(instances),
        first_observation=draw(texts),
        nodes=tuple(nodes),
        dives_done=draw(st.integers(0, 100)),
        seed=draw(seeds),
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("store") / "agentr.duckdb")
    with store.keep_open():
        yield store


@pytest.fixture(scope="module")
def fresh() -> Iterator[str]:
    """Return an iterator of ids that were not used yet."""
    return (f"{number:016x}" for number in range(10**9))


def head(tree_id: str, tree: Tree) -> TreeHead:
    return TreeHead(
        tree_id=tree_id,
        iteration_id="i",
        checkpoint_id="c",
        config={"dives": 8},
        instance=tree.instance,
        first_observation=tree.first_observation,
        seed=tree.seed,
    )


@SETTINGS
@given(tree=trees())
def test_tree(store: Store, fresh: Iterator[str], tree: Tree) -> None:
    tree_id = next(fresh)
    store.write(tree_rows(head(tree_id, tree), tree))
    assert load_trees(store, [tree_id])[tree_id] == tree


@pytest.mark.slow
@SETTINGS
@given(tree=trees(), data=st.data())
def test_growing_tree(store: Store, fresh: Iterator[str], tree: Tree, data: st.DataObject) -> None:
    tree_id = next(fresh)
    cut = data.draw(st.integers(1, len(tree.nodes)))
    nodes = [
        n if n.step is None else replace(n, step=replace(n.step, finish_reason="stop", tokenizer=None))
        for n in tree.nodes[cut:]
    ]
    tree = replace(tree, nodes=(*tree.nodes[:cut], *nodes))
    bare = [replace(n, visits=0, value_sum=0.0, terminal=False, stop=None) for n in tree.nodes[:cut]]
    before = replace(tree, nodes=tuple(bare), dives_done=0)
    store.write(tree_rows(head(tree_id, tree), before))
    assert load_trees(store, [tree_id])[tree_id] == before
    draws = [
        SimpleNamespace(
            node=n.index,
            seed=n.index,
            number=number,
            generation=Generation(
                text=n.step.reply if number == 2 * n.index else "merged",
                token_ids=n.step.token_ids if number == 2 * n.index else (7,),
                finish_reason="stop",
                prompt_tokens=3,
                completion_tokens=1,
                logprobs=n.step.logprobs if number == 2 * n.index else None,
            ),
        )
        for n in tree.nodes[cut:]
        if n.step is not None
        for number in (2 * n.index, 2 * n.index + 1)
    ]
    growth = SimpleNamespace(
        created=tree.nodes[cut:], changed=tree.nodes[:cut], draws=draws, dives_done=tree.dives_done, gradings=()
    )
    store.write(expansion_rows(head(tree_id, tree), growth))
    assert load_trees(store, [tree_id])[tree_id] == tree
    # Storing the whole tree over its expansions changes nothing.
    store.write(tree_rows(head(tree_id, tree), tree))
    assert load_trees(store, [tree_id])[tree_id] == tree
    by_position = load_draws(store, "node", [tree_id]).get(tree_id, {})
    assert [d for position in by_position.values() for d in position] == [
        Draw(seed=d.seed, number=d.number, generation=d.generation) for d in draws
    ]


@SETTINGS
@given(trajectory=trajectories)
def test_trajectory(store: Store, fresh: Iterator[str], trajectory: Trajectory) -> None:
    trajectory_id = next(fresh)
    store.write(trajectory_rows(trajectory_id, trajectory, source="rollout"))
    assert load_trajectories(store, [trajectory_id]) == {trajectory_id: trajectory}


@SETTINGS
@given(sample=samples)
def test_sample(store: Store, fresh: Iterator[str], sample: Sample) -> None:
    sample_id = next(fresh)
    store.write(sample_rows(sample_id, sample, iteration_id="i"))
    assert load_samples(store, [sample_id]) == {sample_id: sample}
    rows = store.query("select num_messages, messages from v_samples where sample_id = ?", [sample_id])
    assert len(rows) == 1


@SETTINGS
@given(
    replies=st.lists(st.tuples(st.sampled_from(Verdict), texts), max_size=4),
    first_error=st.none() | st.integers(0, 50),
    judged=st.lists(st.tuples(st.sampled_from(Verdict), generations), max_size=3),
    seed=seeds,
)
@pytest.mark.slow
def test_critique_and_judgement(
    store: Store,
    fresh: Iterator[str],
    replies: list[tuple[Verdict, str]],
    first_error: int | None,
    judged: list[tuple[Verdict, Generation]],
    seed: int,
) -> None:
    key = next(fresh)
    verdicts = tuple(
        StepVerdict(position=position, verdict=verdict, reply=reply)
        for position, (verdict, reply) in enumerate(replies)
    )
    critique = Critique(verdicts=verdicts, first_error=first_error)
    store.write(critique_rows(key, critique, iteration_id="i", nodes=range(1, 9)))
    assert load_critiques(store, [key]) == {key: critique}
    judgement = Judgement(
        node=4,
        seed=seed if judged else 0,
        dropped_steps=2,
        verdict=Verdict.GOOD,
        votes=tuple(verdict for verdict, _ in judged),
        generations=tuple(generation for _, generation in judged),
    )
    store.write(judgement_rows(key, judgement, iteration_id="i"))
    assert load_judgements(store, [key]) == {key: {4: judgement}}
