"""Domain records to rows and back. A function `*_rows` returns one unit for `Store.write` or
`Writer.add`.
"""

from agentr_core.store.codec.copies import (
    copy_judgements,
    copy_rollouts,
    copy_trees,
    knows_inputs,
    runs_alike,
    stage_input_rows,
)
from agentr_core.store.codec.critiques import (
    StoredJudgement,
    critique_rows,
    judgement_rows,
    load_critiques,
    load_judgements,
    pair_rows,
)
from agentr_core.store.codec.generations import (
    Draw,
    load_draws,
)
from agentr_core.store.codec.ledger import (
    checkpoint_rows,
    evaluation_rows,
    event_rows,
    iteration_rows,
    load_rejections,
    metric_rows,
    rejection_rows,
    run_rows,
    started_at,
    timing_rows,
    training_step_rows,
)
from agentr_core.store.codec.preferences import load_preferences, preference_rows
from agentr_core.store.codec.samples import (
    dataset_rows,
    load_dataset,
    load_samples,
    sample_rows,
)
from agentr_core.store.codec.texts import (
    instance_row,
    text_id,
)
from agentr_core.store.codec.trajectories import (
    Episode,
    episode_rows,
    load_episodes,
    load_trajectories,
    trajectory_rows,
)
from agentr_core.store.codec.trees import (
    TreeHead,
    claim_trees,
    finished_rows,
    growth_rows,
    load_tree,
    load_trees,
    stored_trees,
    tree_rows,
    unfinished_trees,
)

__all__ = [
    "Draw",
    "Episode",
    "StoredJudgement",
    "TreeHead",
    "checkpoint_rows",
    "claim_trees",
    "copy_judgements",
    "copy_rollouts",
    "copy_trees",
    "critique_rows",
    "dataset_rows",
    "episode_rows",
    "evaluation_rows",
    "event_rows",
    "finished_rows",
    "growth_rows",
    "instance_row",
    "iteration_rows",
    "judgement_rows",
    "knows_inputs",
    "load_critiques",
    "load_dataset",
    "load_draws",
    "load_episodes",
    "load_judgements",
    "load_preferences",
    "load_rejections",
    "load_samples",
    "load_trajectories",
    "load_tree",
    "load_trees",
    "metric_rows",
    "pair_rows",
    "preference_rows",
    "rejection_rows",
    "run_rows",
    "runs_alike",
    "sample_rows",
    "stage_input_rows",
    "started_at",
    "stored_trees",
    "text_id",
    "timing_rows",
    "training_step_rows",
    "trajectory_rows",
    "tree_rows",
    "unfinished_trees",
]
