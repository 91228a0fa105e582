"""The views over one small iteration, made by the codec from first to last row."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from finished import ended

from agentr_core.episodes.units import UnitError
from agentr_core.search.tree import leaf_paths
from agentr_core.store.codec.ledger import (
    checkpoint_rows,
    evaluation_rows,
    event_rows,
    iteration_rows,
    metric_rows,
    rejection_rows,
    run_rows,
    timing_rows,
)
from agentr_core.store.codec.samples import dataset_rows, load_dataset, sample_rows, store_dataset
from agentr_core.store.codec.trajectories import (
    critique_rows,
    episode_rows,
    finished_tree_rows,
    instance_row,
    load_episodes,
    pair_rows,
    trajectory_rows,
    tree_rows,
    unfinished_tree_ids,
)
from agentr_core.store.database import Store
from agentr_core.store.queries.datasets import tree_counts
from agentr_core.store.queries.runs import find_checkpoints, token_use
from agentr_core.store.tables import Rows, TreeHead, merge
from agentr_core.texts import goal_in
from agentr_core.types import (
    Answer,
    Critique,
    Instance,
    Message,
    Node,
    PathPair,
    Provenance,
    Rejection,
    Sample,
    SampleKind,
    Step,
    StepVerdict,
    StopReason,
    Trajectory,
    Tree,
    Verdict,
)

INSTANCE = Instance(environment="toy", split="train", index=3)
BASE, TRAINED = "c0", "c1"
CONFIG = {"seed": 5, "pairs": {"beta": 0.2}}


def step(reply: str, reward: float = 0.0, *, success: bool = False) -> Step:
    return Step(
        reply=reply,
        action=reply.upper(),
        matched=None if reply == "look" else reply,
        valid=reply != "lose",
        observation=f"saw {reply}",
        reward=reward,
        terminated=success,
        success=success,
        token_ids=tuple(map(ord, reply)),
    )


TREE = Tree(
    instance=INSTANCE,
    first_observation="Start.",
    nodes=(
        Node(index=0, parent=-1, depth=0, step=None, visits=2, value_sum=1.0),
        Node(index=1, parent=0, depth=1, step=step("look"), visits=2, value_sum=1.0),
        Node(
            index=2,
            parent=1,
            depth=2,
            step=step("win", 1.0, success=True),
            visits=1,
            value_sum=1.0,
            terminal=True,
            stop=StopReason.SUCCESS,
        ),
        Node(index=3, parent=1, depth=2, step=step("lose"), visits=1, terminal=True, stop=StopReason.FAILURE),
    ),
    dives_done=1,
    seed=99,
)
GOOD, BAD = leaf_paths(TREE, "t0")
PAIR = PathPair(good=GOOD, bad=BAD, split=1)
CRITIQUE = Critique(
    verdicts=(StepVerdict(position=1, verdict=Verdict.BAD, reply="Judgement: bad"),),
    first_error=1,
)
REVISION = Sample(
    kind=SampleKind.REVISION,
    messages=(Message(role="user", text="Start."), Message(role="assistant", text="win", train=True, token_ids=(1, 2))),
    instance=INSTANCE,
    provenance=Provenance(tree_id="t0", good_leaf=2, bad_leaf=3, split=1, cut=2, extra={"mode": "verified"}),
)
PLAIN = Sample(
    kind=SampleKind.GOOD,
    messages=(Message(role="assistant", text="look", train=True),),
    instance=INSTANCE,
    provenance=Provenance(tree_id="t0", good_leaf=2),
)
REJECTIONS = (
    Rejection(stage="splice", subject="t0:2:4", reason="verify-ended-early", detail="step 2"),
    Rejection(stage="filter", subject="s9", reason="duplicate"),
    Rejection(stage="filter", subject="s8", reason="duplicate"),
)


def episode(index: int, *, success: bool) -> Trajectory:
    last = step("end", float(success), success=success)
    return Trajectory(
        instance=Instance(environment="toy", split="test", index=index),
        first_observation="Start.",
        steps=(last,) if success else (last, last),
        reward=float(success),
        success=success,
        stop=StopReason.SUCCESS if success else StopReason.STEP_LIMIT,
    )


def evaluation(
    name: str, iteration: str, checkpoint: str, outcomes: list[bool], *, finished: bool = True
) -> list[Rows]:
    key = f"{name}-{iteration}"
    return [
        evaluation_rows(
            key,
            iteration_id=iteration,
            checkpoint_id=checkpoint,
            name=name,
            split="test",
            config={},
            finished=finished,
        ),
        *(
            episode_rows(
                f"{key}-{index}",
                episode(index, success=success),
                evaluation_id=key,
                iteration_id=iteration,
                cut=1 if name == "revision_test" else 0,
                invalid_actions=index,
            )
            for index, success in enumerate(outcomes)
        ),
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("ws") / "agentr.duckdb")
    start = datetime(2026, 1, 2, tzinfo=UTC)
    run = {"recipe": "toy", "method": "agent-r", "config": CONFIG, "versions": {"agentr": "1"}, "workspace": "w"}
    head = TreeHead(
        tree_id="t0",
        iteration_id="i1",
        checkpoint_id=BASE,
        config={"dives": 1},
        instance=INSTANCE,
        first_observation=TREE.first_observation,
        seed=TREE.seed,
    )
    units = [
        {"instance": [instance_row(INSTANCE, depth=2)]},
        run_rows("r", **run, started_at=start),  # type: ignore[arg-type]
        ended(iteration_rows("i0", run_id="r", iteration=0, checkpoint_out=BASE)),
        iteration_rows("i1", run_id="r", iteration=1, checkpoint_in=BASE),
        checkpoint_rows(BASE, path="base", weights_sha256="aa", config={}),
        tree_rows(head, TREE),
        finished_tree_rows(head, TREE),
        pair_rows("p0", PAIR, iteration_id="i1"),
        critique_rows("p0", CRITIQUE, iteration_id="i1", nodes=BAD.nodes),
        sample_rows("s0", REVISION, iteration_id="i1", pair_id="p0"),
        sample_rows("s1", PLAIN, iteration_id="i1"),
        rejection_rows(REJECTIONS, iteration_id="i1"),
        checkpoint_rows(
            TRAINED, path="one", weights_sha256="bb", config={}, parent_id=BASE, dataset_id="d1", iteration_id="i1"
        ),
        *evaluation("test", "i0", BASE, [True, False, False, False]),
        *evaluation("test", "i1", TRAINED, [True, True, True, False]),
        *evaluation("revision_test", "i1", TRAINED, [True, False]),
        metric_rows("iteration", "i1", "loops", 0.5, low=0.1, high=0.9, n=4),
        timing_rows("i1", "collect", {"generate": 9.0, "store": 0.5}, tokens=100),
        ended(iteration_rows("i1", run_id="r", iteration=1, checkpoint_in=BASE, checkpoint_out=TRAINED)),
        run_rows("r", **run, started_at=start, status="finished", finished_at=start),  # type: ignore[arg-type]
    ]
    store.write(merge(units))
    dataset = dataset_rows("d1", ["s1", "s0", "s1"], iteration_id="i1", content_hash="feed", counts={"good": 2})
    store_dataset(store, dataset, {"s0": (9, 2), "s1": (5, 3)})
    odd = UnitError(key=INSTANCE.key, kind="ValueError", phase="step", message="odd", traceback="a: b", is_final=True)
    store.write(event_rows(odd, run_id="r", iteration_id="i1", stage="collect"))
    return store


@pytest.mark.slow
def test_no_reference_dangles(store: Store) -> None:
    assert store.query("from v_orphans").values.tolist() == []


@pytest.mark.slow
def test_orphans_are_found(store: Store, tmp_path: Path) -> None:
    new_store = Store(tmp_path / "agentr.duckdb")
    new_store.write(sample_rows("s0", REVISION, iteration_id="nowhere", pair_id="gone"))
    orphans = set(map(tuple, new_store.query("select child, reference, missing_id from v_orphans").values.tolist()))
    assert orphans == {
        ("sample", "iteration_id", "nowhere"),
        ("sample", "pair_id", "gone"),
        ("sample", "tree_id", "t0"),
    }


def test_iterations(store: Store) -> None:
    rows = store.query(
        "select run_id, iteration, split, success, success_low, success_high, reward, episodes from v_iterations"
    ).values.tolist()
    # Wilson's interval for 1 of 4 and 3 of 4, by hand.
    assert [row[:3] for row in rows] == [["r", 0, "test"], ["r", 1, "test"]]
    assert rows[0][3:] == pytest.approx([0.25, 0.045587, 0.699358, 0.25, 4], abs=1e-5)
    assert rows[1][3:] == pytest.approx([0.75, 0.300642, 0.954413, 0.75, 4], abs=1e-5)
    lengths = store.query("select steps, steps_to_success from v_iterations order by iteration").values.tolist()
    assert lengths == [[1.75, 1.0], [1.25, 1.0]], "failed episodes count among all of them only"
    revision = store.query("select iteration, revision_success, revision_episodes from v_iterations order by 1")
    assert revision["revision_episodes"].tolist() == [0, 2]
    assert revision["revision_success"][1] == 0.5


def test_scores_are_those_of_the_report(tmp_path: Path) -> None:
    new_store = Store(tmp_path / "agentr.duckdb")
    config = {"evaluation": {"disaster_counts": -1.0}}
    run = {"recipe": "toy", "method": "agent-r", "config": config, "versions": {}, "workspace": "w"}
    disaster = replace(episode(2, success=False), reward=0.5, stop=StopReason.DISASTER)
    key = "test-i1"
    new_store.write(
        merge(
            [
                run_rows("r", **run, started_at=datetime(2026, 1, 2, tzinfo=UTC)),  # type: ignore[arg-type]
                iteration_rows("i1", run_id="r", iteration=1, checkpoint_in=BASE, checkpoint_out=TRAINED),
                checkpoint_rows(TRAINED, path="one", weights_sha256="bb", config={}),
                *evaluation("test", "i1", TRAINED, [True, False], finished=False),
                *evaluation("revision_test", "i1", TRAINED, [False], finished=False),
                episode_rows("lost", disaster, evaluation_id=key, iteration_id="i1", invalid_actions=0),
                metric_rows("evaluation", key, "success", 1 / 3, low=0.01, high=0.99, n=3),
            ]
        )
    )
    query = "select success, success_low, success_high, reward, episodes, finished, revision_finished from v_iterations"
    (before,) = new_store.query(query).values.tolist()
    assert before[4:] == [3, False, False]
    assert new_store.rows(
        "select success, success_low, success_high, reward, steps, revision_success from v_iterations"
    ) == [(None,) * 6], "won episodes end first, so the mean of some is none of all"
    with new_store.transaction() as con:
        con.execute("update evaluation set finished = true where evaluation_id = ?", [key])
    (after,) = new_store.query(query).values.tolist()
    assert after == pytest.approx([1 / 3, 0.01, 0.99, 0.0, 3, True, False], abs=1e-9)


def test_funnel(store: Store) -> None:
    (row,) = store.query("from v_funnel where iteration = 1").to_dict("records")
    counts = {
        "trees": 1,
        "finished_trees": 1,
        "leaves": 2,
        "pairs": 1,
        "critiques": 1,
        "errors_found": 1,
        "spliced": 2,
        "verified": 1,
        "samples": 2,
        "dataset_rows": 3,
        "rejected": 3,
    }
    assert {name: row[name] for name in counts} == counts
    assert json.loads(row["rejections"]) == {"filter.duplicate": 2, "splice.verify-ended-early": 1}


def test_the_parts_of_a_splice_that_a_window_divides_are_one_splice(tmp_path: Path) -> None:
    new_store = Store(tmp_path / "agentr.duckdb")
    origin = Provenance(extra={"mode": "verified"})
    sample = Sample(kind=SampleKind.REVISION, messages=(), instance=INSTANCE, provenance=origin)
    run = {"recipe": "toy", "method": "agent-r", "config": {}, "versions": {}, "workspace": "w"}
    new_store.write(
        merge(
            [
                run_rows("r", **run, started_at=datetime(2026, 1, 2, tzinfo=UTC)),  # type: ignore[arg-type]
                iteration_rows("i1", run_id="r", iteration=1),
                *(sample_rows(f"part {n}", sample, iteration_id="i1", pair_id="p") for n in range(3)),
                # Two continuations of one pair are two splices.
                *(
                    sample_rows(f"try {n}", sample, iteration_id="i1", pair_id="q", trajectory_id=f"{n}")
                    for n in (0, 1)
                ),
            ]
        )
    )
    assert new_store.rows("select spliced, verified, samples from v_funnel") == [(3, 3, 5)]


def test_answers_within_steps_are_asked_for_once_though_their_path_is_kept_by_itself(tmp_path: Path) -> None:
    new_store = Store(tmp_path / "agentr.duckdb")
    answer = Answer(
        role="reader",
        model="m",
        prompt_hash="h",
        seed=1,
        text="yes",
        finish_reason="length",
        prompt_tokens=5,
        completion_tokens=2,
    )
    played = episode(0, success=True)
    played = replace(played, steps=(replace(played.steps[0], answers=(answer,)), *played.steps[1:]))
    run = {"recipe": "toy", "method": "agent-r", "config": {}, "versions": {}, "workspace": "w"}
    new_store.write(
        merge(
            [
                run_rows("r", **run, started_at=datetime(2026, 1, 2, tzinfo=UTC)),  # type: ignore[arg-type]
                iteration_rows("i1", run_id="r", iteration=1),
                *(trajectory_rows(source, played, source=source, iteration_id="i1") for source in ("rollout", "tree")),
            ]
        )
    )
    assert astuple(token_use(new_store, "i1")) == (5, 2)
    replies = "select replies, completion_tokens, cut from v_tokens where role = 'reader'"
    assert new_store.rows(replies) == [(1, 2, 1)]


def test_a_model_that_is_still_evaluated_is_compared_with_none(tmp_path: Path) -> None:
    new_store = Store(tmp_path / "agentr.duckdb")
    run = {"recipe": "toy", "method": "agent-r", "config": {}, "versions": {}, "workspace": "w"}
    new_store.write(
        merge(
            [
                run_rows("r", **run, started_at=datetime(2026, 1, 2, tzinfo=UTC)),  # type: ignore[arg-type]
                *(iteration_rows(f"i{n}", run_id="r", iteration=n, checkpoint_out=BASE) for n in (0, 1)),
                *evaluation("test", "i0", BASE, [True, False]),
                *evaluation("test", "i1", BASE, [True], finished=False),
            ]
        )
    )
    assert new_store.rows("from v_comparisons") == []
    with new_store.transaction() as con:
        con.execute("update evaluation set finished = true")
    assert len(new_store.rows("from v_comparisons")) == 2


def test_funnel_and_report_count_paths_that_ended_not_leaves_that_were_never_expanded(store: Store) -> None:
    def paths() -> int:
        counts = tree_counts(store, "i1")
        assert counts is not None
        assert store.rows("select leaves from v_funnel where iteration = 1") == [(counts.paths,)]
        return counts.paths

    assert paths() == 2
    change = "update node set stop = ? where tree_id = 't0' and node_index = 3"
    with store.transaction() as con:
        con.execute(change, [None])
    assert paths() == 1
    with store.transaction() as con:
        con.execute(change, [str(StopReason.FAILURE)])


def test_one_query_walks_from_a_checkpoint_to_node_seed_and_recipe(store: Store) -> None:
    rows = store.query("from v_lineage where checkpoint_id = ? order by dataset_position", [TRAINED]).to_dict("records")
    assert [row["sample_id"] for row in rows] == ["s1", "s0", "s1"]
    revision = rows[1]
    expected = {
        "parent_checkpoint_id": BASE,
        "dataset_hash": "feed",
        "kind": "revision",
        "pair_id": "p0",
        "first_error": 1,
        "verdict_position": 1,
        "verdict": "bad",
        "verdict_reply": "Judgement: bad",
        "tree_id": "t0",
        "node_index": 3,
        "reply": "lose",
        "observation": "saw lose",
        "environment": "toy",
        "split": "train",
        "instance_index": 3,
        "tree_seed": 99,
        "policy_checkpoint_id": BASE,
        "iteration": 1,
        "run_id": "r",
    }
    assert {name: revision[name] for name in expected} == expected
    assert json.loads(revision["config"]) == CONFIG
    assert rows[0]["node_index"] == 2
    assert rows[0]["reply"] == "win"


def test_samples_and_rejections_are_readable(store: Store) -> None:
    (row,) = store.query("from v_samples where sample_id = 's0'").to_dict("records")
    assert json.loads(row["messages"]) == [
        {"role": "user", "text": "Start.", "train": False},
        {"role": "assistant", "text": "win", "train": True},
    ]
    assert (row["run_id"], row["iteration"], row["used"]) == ("r", 1, True)
    assert store.query("select distinct recipe, stage, reason from v_rejections order by all").values.tolist() == [
        ["toy", "filter", "duplicate"],
        ["toy", "splice", "verify-ended-early"],
    ]


def test_nodes_and_steps_show_their_texts(store: Store) -> None:
    nodes = store.query("select node_index, reply, action, matched, valid, observation, value from v_nodes order by 1")
    assert nodes[["action", "matched"]].fillna("").values.tolist()[1:] == [
        ["LOOK", ""],
        ["WIN", "win"],
        ["LOSE", "lose"],
    ]
    assert nodes["valid"].tolist()[1:] == [True, True, False]
    assert nodes["observation"].tolist() == ["Start.", "saw look", "saw win", "saw lose"]
    assert nodes["value"].tolist()[:2] == [0.5, 0.5]
    steps = store.query(
        "select reply, action, matched, valid, observation from v_steps where evaluation_id = 'test-i0'"
    )
    assert steps.values.tolist() == [["end", "END", "end", True, "saw end"]] * 7


def test_trajectories_say_who_played_what_and_how_it_ended(store: Store) -> None:
    rates = store.query(
        "select evaluation, model, avg(success), count(*) filter (success), count(*) filter (not success) "
        "from v_trajectories group by all order by all"
    )
    assert rates.values.tolist() == [
        ["revision_test", "one", 0.5, 1, 1],
        ["test", "base", 0.25, 1, 3],
        ["test", "one", 0.75, 3, 1],
    ]
    columns = "environment, split, instance_id, instance_index, goal, reward"
    assert store.rows(f"select {columns} from v_trajectories where success and model = 'base'") == [
        ("toy", "test", "toy/test/0", 0, "Start.", 1.0)
    ]
    assert store.rows("select distinct stop_reason from v_trajectories where not success") == [("step_limit",)]


def test_an_expert_is_no_model_and_what_waits_is_left_out(tmp_path: Path) -> None:
    new_store = Store(tmp_path / "agentr.duckdb")
    units = [
        iteration_rows("i1", run_id="r", iteration=1, checkpoint_in=BASE),
        checkpoint_rows(BASE, path="base", weights_sha256="aa", config={}),
        *(
            trajectory_rows(source, episode(0, success=True), source=source, iteration_id="i1")
            for source in ("expert", "rollout", "bare", "ungraded")
        ),
    ]
    new_store.write(merge(units))
    assert new_store.rows("select source, model from v_trajectories") == [("expert", None), ("rollout", "base")]


@pytest.mark.parametrize("view", ["v_trajectories", "v_episodes", "v_steps", "v_nodes", "v_families", "v_evaluations"])
def test_success_has_a_mean_in_every_view(store: Store, view: str) -> None:
    assert len(store.rows(f"select avg(success) from {view}")) == 1
    assert store.rows(f"select count(*) from {view} where success and not success") == [(0,)]


def test_no_view_has_a_success_without_a_mean(store: Store) -> None:
    flags = "select table_name from duckdb_columns() where column_name = 'success' and data_type = 'BOOLEAN'"
    assert store.rows(f"{flags} and starts_with(table_name, 'v_')") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "opening",
    [
        "Crafting commands:\ncraft 4 planks using 1 log\n\nGoal: craft planks.",
        "You are in a room.\n\nYour task is to: put a mug in the shelf.\nGo.",
        "WebShop [SEP] Instruction: [SEP] i need  a red\tshirt [SEP] Search",
        "Question:\n\n  What is 2 + 2?\nThink.",
        "Your goal is to reach the door\nnow",
        "\n  \n  A plain   start.\nMore.",
        "Subtask: one",
        "The Task is: two",
        "",
        " \n",
        "goal:   ",
        json.dumps([{"role": "user", "content": "Play."}, {"role": "user", "content": 'Goal: craft "it".\nNow.'}]),
        json.dumps([{"role": "system", "content": "Your task: obey."}, {"role": "user", "content": None}]),
        '[{"role": "user", "content": "Goal: cut',
    ],
)
def test_a_goal_is_that_of_the_pages(tmp_path: Path, opening: str) -> None:
    new_store = Store(tmp_path / "agentr.duckdb")
    new_store.write(
        trajectory_rows("t", replace(episode(0, success=True), first_observation=opening), source="rollout")
    )
    assert new_store.rows("select goal from v_trajectories") == [(goal_in(opening),)]


def test_a_training_has_its_rate_and_its_losses(tmp_path: Path) -> None:
    new_store = Store(tmp_path / "agentr.duckdb")
    run = {"recipe": "toy", "method": "grpo", "config": CONFIG, "versions": {}, "workspace": "w"}
    steps = [
        {
            "checkpoint_id": TRAINED,
            "step": n,
            "loss": 3.0 - n,
            "learning_rate": 0.1 / n,
            "trained_tokens": 5 * n,
            "seconds": n,
        }
        for n in (1, 2)
    ]
    numbers = dict.fromkeys(("reward", "pass_at_1", "pass_at_n", "mixed_share", "episode_tokens", "episode_steps"), 0.5)
    counts = {"drawn_again": 0, "sampled_tokens": 1, "trained_tokens": 7}
    online = [
        {"iteration_id": "i2", "step": n, **numbers, **counts, "loss": loss, "learning_rate": 1e-6 * n}
        for n, loss in ((1, None), (2, 0.4), (3, 0.3))
    ]
    units: list[Rows] = [
        run_rows("r", **run, started_at=datetime(2026, 1, 2, tzinfo=UTC)),  # type: ignore[arg-type]
        checkpoint_rows(TRAINED, path="one", weights_sha256="bb", config={}, iteration_id="i1"),
        ended(iteration_rows("i1", run_id="r", iteration=1, checkpoint_in=BASE, checkpoint_out=TRAINED)),
        iteration_rows("i2", run_id="r", iteration=2, checkpoint_in=TRAINED),
        {"training_step": steps, "rl_step": online},
    ]
    new_store.write(merge(units))
    sql = "select iteration, model, steps, learning_rate, first_loss, last_loss, trained_tokens from v_trainings"
    assert new_store.rows(sql) == [(1, "one", 2, 0.1, 2.0, 1.0, 10), (2, None, 3, 3e-6, 0.4, 0.3, 21)]


def test_records_come_back(store: Store) -> None:
    assert load_dataset(store, "d1") == [("s1", PLAIN), ("s0", REVISION), ("s1", PLAIN)]
    rejected = store.rows("select stage, subject, reason, detail from rejection where iteration_id = 'i1' order by all")
    assert rejected == sorted(map(astuple, REJECTIONS))
    episodes = load_episodes(store, "test-i1")
    assert [e.trajectory for e in episodes] == [episode(i, success=i < 3) for i in range(4)]
    invalid = store.rows("select invalid_actions from episode where evaluation_id = 'test-i1' order by all")
    assert invalid == [(0,), (1,), (2,), (3,)]
    assert unfinished_tree_ids(store, ["t1", "t0"]) == ["t1"]
    status = store.query("select status, finished_at is not null as ended, started_at from run").values.tolist()
    assert status == [["finished", True, datetime(2026, 1, 2)]]
    (event,) = store.query("from event").to_dict("records")
    assert (event["class"], event["message"], event["level"]) == ("ValueError", "odd", "error")
    assert event["traceback"] == "a: b"
    assert store.query("select depth from instance where split = 'train'")["depth"].tolist() == [2]


def test_a_sound_store_has_no_contradictions(store: Store) -> None:
    assert store.query("select * from v_contradictions").empty


def test_checkpoints_are_found_by_a_beginning_that_models_and_other_things_share(store: Store) -> None:
    assert [checkpoint.checkpoint_id for checkpoint in find_checkpoints(store, "c")] == [TRAINED]
    (checkpoint,) = find_checkpoints(store, "")
    assert (checkpoint.path, checkpoint.weights_sha256, checkpoint.run_id, checkpoint.iteration) == (
        "one",
        "bb",
        "r",
        1,
    )
    assert json.loads(checkpoint.config) == CONFIG
    assert find_checkpoints(store, BASE) == []
