"""Score the tokens that the policy sampled, and store the scores (`grpo.distil`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from agentr_core.methods.grpo.readings import Reading, expert_episode_of, other_episodes, readings
from agentr_core.models.checkpoint_dir import check_same_tokens
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.equipment import Worlds
from agentr_core.samples.rendering import Renderer
from agentr_core.store.codec.ledger import Group, load_scorer_logprobs, rejection_rows, scorer_logprob_rows
from agentr_core.system import run_in_thread
from agentr_core.training.group.policy import PolicyRow, policy_row
from agentr_core.training.group.scoring import Scorer
from agentr_core.training.job import OnlineJob
from agentr_core.types import Rejection, Step, Trajectory

ScoresByStep = Mapping[str, Mapping[int, tuple[float, ...]]]
"""A scorer's log-probabilities of the tokens of each reply, by id of the trajectory, then by
position of the step.
"""
_log = logging.getLogger(__name__)


def token_row(reading: Reading, steps: Sequence[Step], renderer: Renderer) -> PolicyRow:
    """Return a reading as a token row. In place of an advantage, each token to be scored has the
    position of its step in the episode; `steps` are all steps of that episode. Raises as
    `policy_row`.
    """
    read_steps = [steps[position] for position in reading.positions]
    positions = list(map(float, reading.positions))
    return policy_row(reading.messages, read_steps, renderer, positions, num_given=reading.num_given)


class Scoring:
    """Computes the scores of a training, with a scorer that is loaded when it is first needed and
    freed by `close`.

    Args:
        job: the training, whose settings ask for a scorer.
        renderer: the renderer of the model that is trained.
    """

    def __init__(self, ctx: RunContext, job: OnlineJob, renderer: Renderer) -> None:
        assert job.objective.grpo.distil is not None
        self._ctx, self._job, self._renderer = ctx, job, renderer
        self._distil = job.objective.grpo.distil
        self._scorer: Scorer | None = None
        self._experts_by_instance: dict[str, list[Trajectory]] = {}

    # All scores of a step are stored in one transaction: after an interruption they are computed
    # again in the same batches, on which the last bits depend.
    async def scores(self, groups: Sequence[Group], step: int, worlds: Worlds) -> ScoresByStep:
        """Return the scores of the groups of a training step: those of the store if it has any,
        else new ones, which are then stored. Left out are replies whose reading does not fit into
        the scorer's context and, with `context: expert`, those of instances without an expert's
        episode.

        Raises `ConfigError` if the scorer has another tokenizer, and `ModelDirectoryError` if it
        cannot be loaded.
        """
        store = self._ctx.store
        if stored_scores := load_scorer_logprobs(
            store, [trajectory_id for group in groups for trajectory_id in group.episodes]
        ):
            return stored_scores
        others_by_instance: dict[str, list[Trajectory]] = {}
        if self._distil.context == "records":
            episodes_by_instance: dict[str, dict[str, Trajectory]] = {}
            for group in groups:
                episodes_by_instance.setdefault(group.instance.key, {}).update(group.episodes)
            others_by_instance = other_episodes(store, self._job.experience, episodes_by_instance, until=step - 1)
        rows = [
            pair
            for group in groups
            for pair in self.token_rows(group, worlds, others_by_instance.get(group.instance.key, ()))
        ]
        scorer = await run_in_thread(self._load_scorer)
        fitting_rows = [
            (trajectory_id, row) for trajectory_id, row in rows if len(row.input_ids) <= scorer.context_length
        ]
        if len(fitting_rows) < len(rows):
            _log.warning(
                "%s of %s conversations are longer than the scorer's context of %s tokens, and are not scored",
                *(len(rows) - len(fitting_rows), len(rows), scorer.context_length),
            )
        scores_by_row = await run_in_thread(scorer.scores, [row for _, row in fitting_rows])
        scores: dict[str, dict[int, tuple[float, ...]]] = {}
        for (trajectory_id, row), token_scores in zip(fitting_rows, scores_by_row, strict=True):
            for position, items in groupby(zip(row.advantages, token_scores, strict=True), key=itemgetter(0)):
                scores.setdefault(trajectory_id, {})[int(position)] = tuple(score for _, score in items)
        store.write(scorer_logprob_rows(scores))
        return scores

    def token_rows(
        self, group: Group, worlds: Worlds, others: Sequence[Trajectory] = ()
    ) -> Iterator[tuple[str, PolicyRow]]:
        """Yield the readings of the episodes of a group as token rows (`token_row`), each with the
        id of its trajectory. An expert that fails its own replay is stored as a rejection.

        Args:
            others: with `context: records`, all episodes of the instance that the scorer may read.
        """
        env, instance, experts_by_instance = worlds.env_of(group.instance), group.instance, self._experts_by_instance
        if self._distil.context == "expert":
            if instance.key not in experts_by_instance:
                replay = expert_episode_of(env, instance)
                if isinstance(replay, Rejection):
                    self._ctx.store.write(rejection_rows([replay], iteration_id=self._job.experience))
                experts_by_instance[instance.key] = [replay] if isinstance(replay, Trajectory) else []
            others = experts_by_instance[instance.key]
        for key, trajectory in group.episodes.items():
            other_trajectories = [other for other in others if other is not trajectory]
            for reading in readings(env, trajectory, self._distil, other_trajectories, num_untrained=group.prefix):
                row = token_row(reading, trajectory.steps, self._renderer)
                if row.positions:
                    yield key, row

    def close(self) -> None:
        """Free the scorer, if it was loaded."""
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None

    def _load_scorer(self) -> Scorer:
        if self._scorer is None:
            recipe = self._ctx.recipe
            scorer_config = recipe.models.scorer
            path, model = (
                (self._ctx.trained_checkpoint(0).path, recipe.model)
                if scorer_config is None
                else (Path(scorer_config.path), scorer_config)
            )
            check_same_tokens(path, self._job.model_dir)
            self._scorer = Scorer(
                path,
                dtype=model.dtype,
                device=model.device,
                batch_tokens=self._job.objective.grpo.micro_batch_tokens,
                context_length=model.context_length,
            )
        return self._scorer
