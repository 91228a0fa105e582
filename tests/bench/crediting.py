"""The share of a step of group RL that credit by state takes: the graph of each group, its
advantages and the measures of the step, beside the update of the shipped tiny model on the same
number of episodes. Sampling them takes about twice as long as the update, and is left out.
"""

from __future__ import annotations

import random
from pathlib import Path

from measures import Clock, Measure

from agentr_core.methods.grpo.credit import credit_measures, with_credit
from agentr_core.recipes.grpo import GraphConfig, GrpoConfig
from agentr_core.recipes.training import TrainingConfig
from agentr_core.store.codec.ledger import Group, group_rows, iteration_rows
from agentr_core.store.codec.trajectories import trajectory_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import merge
from agentr_core.training.group.learner import Learner
from agentr_core.training.group.policy import PolicyRow
from agentr_core.types import Instance, Step, StopReason, Trajectory

MODEL = Path("data/models/textcraft-tiny")
SIZE, STEPS, TOKENS, SAMPLED = 8, 9, 600, 180
"""Episodes of a group, and what one of `make run` has: its steps, tokens and sampled tokens."""


def measure(folder: Path, *, groups: int, earlier: int, part: int, clock: Clock) -> list[Measure]:
    """Return the share for `groups` groups, whose instances each have `earlier` groups before. Only
    one of `part` episodes is trained on.
    """
    grpo = GrpoConfig(credit="graph", graph=GraphConfig(reach="run"))
    store, draw = Store(folder / "store.duckdb"), random.Random(0)
    store.write(iteration_rows("i", run_id="r", iteration=1))
    for step in range(1, earlier + 1):
        old_groups = [_group(number, step, draw) for number in range(groups)]
        for group in old_groups:
            episodes = [trajectory_rows(k, t, source="rollout", iteration_id="i") for k, t in group.episodes.items()]
            ledger = group_rows(group, [0.0] * SIZE, iteration_id="i", step=step, has_contrast=True)
            store.write(merge([*episodes, ledger]))
    new_groups = [_group(number, earlier + 1, draw) for number in range(groups)]
    start = clock()
    credit_measures(with_credit(new_groups, grpo, store, "i", earlier + 1), grpo)
    credit_s = clock() - start

    training = TrainingConfig(bf16=False, num_threads=1)
    learner = Learner(MODEL, training, grpo, updates=2, max_tokens=SAMPLED, seed=0)
    rows = [_row(draw) for _ in range(max(1, groups * SIZE // part))]
    learner.update(rows[:1])
    start = clock()
    learner.update(rows)
    update_s = (clock() - start) * groups * SIZE / len(rows)
    note = (
        f"{credit_s:.2f} s of {update_s:.0f} s for {groups * SIZE} episodes, {earlier} earlier groups of each instance"
    )
    return [Measure(name="credit_share_of_update", value=100 * credit_s / update_s, unit="%", goal="<= 1", note=note)]


def _group(number: int, step: int, draw: random.Random) -> Group:
    instance = Instance(environment="rooms", split="train", index=number)
    episodes = {f"{step}-{number}-{episode}": _episode(instance, draw) for episode in range(SIZE)}
    return Group(number=number, draw=0, policy="p", instance=instance, episodes=episodes)


def _episode(instance: Instance, draw: random.Random) -> Trajectory:
    """Return a walk along a line of rooms, which is won at its end."""
    steps: list[Step] = []
    room, success = 0, False
    while len(steps) < STEPS and not success:
        move = draw.choice(("on", "on", "back"))
        after = room + 1 if move == "on" else max(0, room - 1)
        success = after == STEPS - 3
        step = Step(
            reply=move,
            action=move,
            observation=f"room {after}",
            reward=float(success),
            terminated=success,
            success=success,
            state_key=str(room),
        )
        steps, room = [*steps, step], after
    stop = StopReason.SUCCESS if success else StopReason.STEP_LIMIT
    return Trajectory.ended(instance, "room 0", steps, stop)


def _row(draw: random.Random) -> PolicyRow:
    ids = tuple(draw.randrange(100, 1000) for _ in range(TOKENS))
    positions = tuple(sorted(draw.sample(range(1, TOKENS), SAMPLED)))
    return PolicyRow(ids, positions, (-1.0,) * SAMPLED, (1.0,) * SAMPLED, SAMPLED)
