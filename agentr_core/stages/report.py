"""The report of an iteration, filled from the store alone: it can be rewritten at any time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import yaml

from agentr_core.errors import ConfigError
from agentr_core.evaluation import metrics
from agentr_core.evaluation.failures import failure_steps
from agentr_core.recipes.environments import REVISION, TEST
from agentr_core.recipes.models import ModelRole
from agentr_core.recipes.recipe import Recipe, display_data, identifying_data
from agentr_core.reports import wording
from agentr_core.reports.document import (
    Column,
    DepthScore,
    ErrorRecord,
    Estimate,
    FaultCount,
    FunnelStage,
    IterationReport,
    IterationScore,
    ModelUsage,
    Paragraph,
    PassAt,
    PromotedModel,
    Row,
    Section,
    SetScore,
    StopCount,
    Table,
    TokenCounts,
    Transcripts,
    UnfinishedEvaluation,
)
from agentr_core.reports.iteration import unfinished_sentences
from agentr_core.reports.run_page import ModeScores, PairedScore, RunColumn, RunsReport
from agentr_core.runtime.context import Position, RunContext
from agentr_core.stages.curves import fine_tuning_figures
from agentr_core.stages.evaluate import (
    Measures,
    by_depth,
    counted_episodes,
    ended_episodes,
    evaluation_id,
    gain,
    given_replies,
    load_measures,
    lost_episodes,
    measure_evaluation,
    measures_by_depth,
    pass_at_ks,
    world_measures,
)
from agentr_core.stages.means import SECTIONS_WITHOUT_EFFECT, means_over_seeds
from agentr_core.stages.outside import outside_section
from agentr_core.stages.scorings import scoring_section
from agentr_core.store.codec.ledger import load_alarms
from agentr_core.store.codec.trajectories import Episode
from agentr_core.store.queries import datasets, runs
from agentr_core.store.queries.datasets import (
    dataset_of_iteration,
    finished_evaluations,
    is_finished,
    unfinished_evaluations,
)
from agentr_core.store.queries.listings import iteration_lines, product_counts_by_world
from agentr_core.store.queries.runs import (
    checkpoint_of_iteration,
    iteration_numbers,
    iteration_state,
    promotion_after,
    request_use,
    run_versions,
    trained_iteration_numbers,
)
from agentr_core.store.queries.trees import providers_by_tool
from agentr_core.texts import goal_in

# What served models read and wrote in an iteration, and what that costs at the recipe's prices.

_MILLION = 1_000_000


def bills(ctx: RunContext, iteration: int) -> tuple[ModelUsage, ...]:
    """Return a bill for each role whose served model replied in an iteration.

    A prompt counts once for each HTTP request, however many replies it brought. Only what was kept
    is counted: tries that failed, and replies of episodes that were given up, may be on the
    server's own bill as well. Copies of another run's replies are on that run's bill. Where a
    teacher answered for a role without a model of its own, that is on the teacher's bill.
    """
    recipe = ctx.recipe
    taught = iteration > 0 and ctx.collector(iteration).role == "teacher"
    teacher_plays = taught or (recipe.splice.goes_on and recipe.splice.continuation.by == "teacher")
    lent_roles = [role for role in get_args(ModelRole) if role not in recipe.own_models()] if teacher_plays else []
    asking = [stage.roles for stage in ctx.plan(iteration).stages if "teacher" in stage.roles]
    edit_roles = [role for role in lent_roles if any(role in stage_roles for stage_roles in asking)]
    entries = []
    for role in get_args(ModelRole):
        model = recipe.model_of(role)
        if model.backend != "openai":
            continue
        usage = request_use(
            ctx.store,
            ctx.iteration_id(iteration),
            role=role,
            max_replies_per_request=model.server.n_per_request,
            teacher_collects=taught,
            teacher_plays=teacher_plays,
            lent_roles=lent_roles,
            edit_roles=edit_roles,
        )
        if usage.requests:
            cost = (usage.prompt * model.prices.prompt + usage.completion * model.prices.completion) / _MILLION
            entries.append(
                ModelUsage(
                    role=role,
                    model=model.label,
                    requests=usage.requests,
                    prompt=usage.prompt,
                    completion=usage.completion,
                    cost=cost if model.prices.prompt or model.prices.completion else None,
                )
            )
    return tuple(entries)


# The scores of a report: every model evaluated to the end so far, on the same held-out
# instances.


class Scoreboard:
    """The scores of a run's models, each read once from the store, however many reports show it."""

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._measures: dict[tuple[int, str], Measures] = {}
        self._scores: dict[int, IterationScore | None] = {}
        self._episodes: dict[int, list[Episode]] = {}

    def up_to(self, iteration: int) -> tuple[IterationScore, ...]:
        """Return the score of the base model and of each iteration up to the given one, where it
        was evaluated.
        """
        scores = (self.score(number) for number in range(iteration + 1))
        return tuple(score for score in scores if score is not None)

    def score(self, iteration: int) -> IterationScore | None:
        """Return the score of the model that an iteration made (0: the base model); None where it
        was not evaluated.
        """
        if iteration not in self._scores:
            self._scores[iteration] = self._read(iteration)
        return self._scores[iteration]

    def difference(self, iteration: int, other: int) -> Estimate | None:
        """Return the success of an iteration minus that of the base model (`other` 0) or of the
        previous iteration, paired by episode, with its 95% interval.

        None when one of the two was not evaluated.
        """
        measures = self.measured(iteration, TEST)
        return finite_estimate(measures.get("gain_over_base" if other == 0 else "gain_over_previous"))

    def measured(self, iteration: int, name: str) -> Measures:
        """Return the measures of an iteration's model on a set; empty until its evaluation is
        finished.

        If an earlier version finished the evaluation without storing them, they are computed now.
        """
        key = iteration, name
        if key not in self._measures:
            store, evaluation = self._ctx.store, evaluation_id(self._ctx, iteration, name)
            measures = load_measures(store, evaluation)
            if not measures and is_finished(store, evaluation):
                measures = measure_evaluation(self._ctx, iteration, name)
            self._measures[key] = measures
        return self._measures[key]

    def episodes(self, iteration: int) -> list[Episode]:
        """Return the held-out episodes of an iteration's model; none until its evaluation is
        finished.
        """
        if iteration not in self._episodes:
            # Two iterations are compared at a time; with their texts, all would fill the memory.
            cache = {number: earlier for number, earlier in self._episodes.items() if number == iteration - 1}
            episodes = ended_episodes(self._ctx, evaluation_id(self._ctx, iteration, TEST))
            self._episodes = cache | {iteration: episodes}
        return self._episodes[iteration]

    def unfinished(self, iteration: int) -> tuple[UnfinishedEvaluation, ...]:
        """Return the progress of each evaluation, of the models up to an iteration, that has begun
        and is not finished.
        """
        evaluations = {
            evaluation_id(self._ctx, number, name): (number, name)
            for number in range(iteration + 1)
            for name in self._names
        }
        counts = unfinished_evaluations(self._ctx.store, list(evaluations))
        evaluations_under_way: list[UnfinishedEvaluation] = []
        for key, (number, name) in evaluations.items():
            if key not in counts:
                continue
            # How many episodes the set has, as the first model played them.
            size = None
            if first := self.measured(0, name):
                losses = lost_episodes(self._ctx, evaluation_id(self._ctx, 0, name))
                size = first["success"].n + (len(losses) if self._ctx.recipe.errors.count_as == "out" else 0)
            evaluations_under_way.append(
                UnfinishedEvaluation(iteration=number, name=name, num_episodes=counts[key], num_planned=size)
            )
        return tuple(evaluations_under_way)

    @property
    def _names(self) -> tuple[str, ...]:
        return (TEST, *self._ctx.recipe.evaluation.sets, REVISION)

    def _read(self, iteration: int) -> IterationScore | None:
        measures = self.measured(iteration, TEST)
        if not measures:
            return None
        recipe = self._ctx.recipe
        evaluations = [evaluation_id(self._ctx, iteration, name) for name in self._names]
        revision = self.measured(iteration, REVISION)
        sets: list[SetScore] = []
        if recipe.evaluation.sets:
            # The test sets of several worlds are reported world by world.
            splits = {} if recipe.environments else {TEST: recipe.instances.test}
            splits |= {name: chosen.split for name, chosen in recipe.evaluation.sets.items()}
            for name, split in splits.items():
                if set_measures := self.measured(iteration, name):
                    sets.append(_set_score(name, split, set_measures))
        loops = [measures[name].mean for length in metrics.LOOP_LENGTHS if (name := f"loops@{length}") in measures]
        trained = iteration or trained_iteration_numbers(self._ctx.store, self._ctx.run_id)
        return IterationScore(
            iteration=iteration,
            name="" if trained else Path(recipe.model.label).name,
            success=report_estimate(measures["success"]),
            reward=report_estimate(measures["reward"]),
            versus_base=finite_estimate(measures.get("gain_over_base")),
            steps_to_success=measures["steps_to_success"].mean if "steps_to_success" in measures else None,
            by_depth=tuple(
                DepthScore(depth=depth, success=report_estimate(part["success"]))
                for depth, part in measures_by_depth(measures)
            ),
            revision=report_estimate(revision["success"]) if revision else None,
            revision_reward=report_estimate(revision["reward"]) if revision else None,
            loops=tuple(loops),
            looping=measures["looping"].mean if "looping" in measures else None,
            sets=tuple(sets),
            worlds=tuple(self._worlds(iteration)),
            num_lost=sum(len(lost_episodes(self._ctx, evaluation)) for evaluation in evaluations),
            lost_treatment=recipe.errors.count_as,
        )

    def _worlds(self, iteration: int) -> Iterator[SetScore]:
        """Yield the score of an iteration's model on the test set of each of several worlds."""
        for name, world in self._ctx.recipe.environments.items():
            if measures := world_measures(self.measured(iteration, TEST), name):
                revision = world_measures(self.measured(iteration, REVISION), name)
                yield replace(
                    _set_score(name, world.instances.test, measures),
                    reward=report_estimate(measures["reward"]),
                    revision=report_estimate(revision["success"]) if revision else None,
                    revision_reward=report_estimate(revision["reward"]) if revision else None,
                )


def _set_score(name: str, split: str, measures: Measures) -> SetScore:
    pass_at = []
    for k in pass_at_ks(measures):
        overall = finite_estimate(measures[f"pass@{k}"])
        if overall is not None:
            parts = ((depth, finite_estimate(part.get(f"pass@{k}"))) for depth, part in measures_by_depth(measures))
            by_depth = tuple(DepthScore(depth=depth, success=part) for depth, part in parts if part is not None)
            pass_at.append(PassAt(k=k, success=overall, by_depth=by_depth))
    return SetScore(
        name=name,
        split=split,
        instances=int(measures["instances"].mean),
        success=report_estimate(measures["success_clustered"]),
        versus_base=finite_estimate(measures.get("gain_over_base")),
        by_depth=tuple(
            DepthScore(
                depth=depth,
                success=report_estimate(part["success_clustered"]),
                versus_base=finite_estimate(part.get("gain_over_base")),
            )
            for depth, part in measures_by_depth(measures)
        ),
        pass_at=tuple(pass_at),
    )


def report_estimate(metric: metrics.Estimate) -> Estimate:
    """Return a measured estimate in the type of the reports."""
    return Estimate(value=metric.mean, low=metric.low, high=metric.high, n=metric.n)


def finite_estimate(metric: metrics.Estimate | None) -> Estimate | None:
    """Return an estimate in the type of the reports; None for None, and if it has no finite
    interval.
    """
    return report_estimate(metric) if metric is not None and math.isfinite(metric.low) else None


_VIEWER_LISTS = ("trees", "trajectories", "pairs", "preferences", "groups", "samples", "rejections")
"""Lists of the viewer that are filtered by run and iteration."""
INTERVALS = (
    "success by Wilson's score, reward by bootstrap; differences are paired by instance; all are clustered where "
    "several episodes are of one instance, or of one under different names"
)


def build_report(
    ctx: RunContext, iteration: int, board: Scoreboard | None = None, *, viewer: str = ""
) -> IterationReport:
    """Return the report of an iteration; parts that were not measured are left out.

    Args:
        board: the scores of the run, for a caller that writes several reports.
        viewer: where `agentr view` shows the workspace; empty for a page without links there.
    """
    board = board or Scoreboard(ctx)
    iteration_id = ctx.iteration_id(iteration)
    evaluations = [evaluation_id(ctx, iteration, name) for name in (TEST, REVISION, *ctx.recipe.evaluation.sets)]
    collected = datasets.collected_stop_counts(ctx.store, iteration_id)
    evaluated = datasets.evaluated_stop_counts(ctx.store, evaluations)
    refusals = datasets.refusal_counts(ctx.store, iteration_id, limit=8)
    errors = ErrorRecord(
        refusals_by_message={opening or "(nothing)": count for opening, count in refusals.items()},
        stops=tuple(
            StopCount(reason=reason, num_collected=collected.get(reason, 0), num_evaluated=evaluated.get(reason, 0))
            for reason in sorted(collected.keys() | evaluated.keys())
        ),
        faults=tuple(
            FaultCount(error=fault.error, phase=fault.phase, count=fault.count, num_lost=fault.lost)
            for fault in datasets.error_counts(ctx.store, iteration_id)
        ),
    )
    by_world: dict[str, dict[str, int]] = {}
    if ctx.recipe.environments:
        by_world = product_counts_by_world(ctx.store, ctx.source_id(iteration), iteration_id)
    checkpoint = checkpoint_of_iteration(ctx.store, iteration_id)
    hashes: dict[str, str | None] = {}
    if checkpoint is not None and checkpoint.parent_id is not None:
        hashes = {
            "checkpoint": checkpoint.checkpoint_id,
            "parent": checkpoint.parent_id,
            "dataset": checkpoint.dataset_hash,
            "weights": checkpoint.weights_sha256,
        }
    # Samples lead to the viewer.
    samples = [
        replace(
            section,
            blocks=tuple(
                Transcripts(tuple(replace(example, viewer_url=viewer) for example in block.examples))
                if isinstance(block, Transcripts)
                else block
                for block in section.blocks
            ),
        )
        for section in _method_sections(ctx, iteration, "samples")
    ]
    return replace(
        build_outline(ctx, iteration, board, viewer=viewer),
        # What each of several worlds contributed to the training data.
        item_counts_by_world={name: by_world.get(name, {}) for name in ctx.recipe.environments},
        data_sections=(
            *outside_section(ctx, iteration),
            *_method_sections(ctx, iteration, "data"),
            *training_curves(ctx, iteration),
        ),
        errors=errors,
        sample_sections=tuple(samples),
        hashes={name: text for name, text in hashes.items() if text},
        failure_sections=(*failure_section(iteration, board), *scoring_section(ctx, iteration)),
    )


def training_curves(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the section on an iteration's training on a dataset; none if it had none. The curves
    of group RL are in the sections of its method.
    """
    training = ctx.plan(iteration).training if iteration else None
    steps = datasets.training_curve(ctx.store, ctx.iteration_id(iteration)) if training else []
    figures = () if training is None or training.objective.row_type == "episodes" else tuple(fine_tuning_figures(steps))
    note = (
        f"{steps[-1].step:,} optimizer steps. The scores above are those of the model that came out." if steps else ""
    )
    return (Section("training", "Training by step", figures, note),) if figures else ()


def build_outline(ctx: RunContext, iteration: int, board: Scoreboard, *, viewer: str = "") -> IterationReport:
    """Return those parts of an iteration's report that also the page of the whole run and its
    tables show.
    """
    recipe, iteration_id = ctx.recipe, ctx.iteration_id(iteration)
    funnel = ctx.plan(iteration).funnel if iteration else None
    seconds = runs.seconds_by_part(ctx.store, iteration_id)
    parts = ("generate", "environment", "train", "store", "other")
    # Who answered the calls of each tool in the run: for Python, how far code was confined.
    tools = {f"tool {tool}": names for tool, names in providers_by_tool(ctx.store, ctx.run_id).items()}
    usage, dataset = runs.token_use(ctx.store, iteration_id), dataset_of_iteration(ctx.store, iteration_id)
    rl_tokens = runs.online_trained_tokens(ctx.store, iteration_id)
    # An objective that samples while it trains has no dataset.
    trained_tokens = (
        dataset.counts["trained_tokens"] if dataset else {"sampled episodes": rl_tokens} if rl_tokens else {}
    )
    tokens = TokenCounts(
        prompt=usage.prompt,
        completion=usage.completion,
        trained_by_class=dict(sorted(trained_tokens.items())),
        in_training=runs.offline_trained_tokens(ctx.store, iteration_id) if dataset else 0,
        cut_by_purpose=runs.cut_reply_counts(ctx.store, iteration_id),
        unreadable_by_role=runs.unreadable_reply_counts(ctx.store, iteration_id),
        usages=bills(ctx, iteration),
    )
    lines = iteration_lines(ctx.store, ctx.run_id)
    line = next((line for line in lines if line.iteration == iteration), None)
    # How many rows each list of the viewer has.
    row_counts = {name: getattr(line, name) for name in _VIEWER_LISTS} if line else {}
    return IterationReport(
        recipe_name=recipe.name,
        run_id=ctx.run_id,
        iteration=iteration,
        date=finished_at(ctx, iteration),
        environment=", ".join(recipe.world_names),
        model=recipe.model.label,
        roles=role_labels(recipe),
        scores=board.up_to(iteration),
        unfinished_evaluations=board.unfinished(iteration),
        versus_base=board.difference(iteration, 0),
        versus_previous=board.difference(iteration, iteration - 1) if iteration > 1 else None,
        interval_method=INTERVALS,
        promoted=promoted_model(ctx, iteration),
        alarm_sections=alarm_section(ctx, iteration),
        funnel_title=funnel.title if funnel else "Training data",
        funnel=funnel.stages(ctx, iteration) if funnel else (),
        seconds_by_activity={part: seconds[part] for part in parts if part in seconds},
        tokens=tokens,
        recipe_yaml=yaml.safe_dump(display_data(recipe), sort_keys=False),
        versions=run_versions(ctx.store, ctx.run_id) | tools,
        viewer_url=viewer,
        num_rows_by_list={name: count for name, count in row_counts.items() if count},
    )


_MAX_FAILURES = 5
_GOAL_CHARS = 90


def failure_section(iteration: int, board: Scoreboard) -> tuple[Section, ...]:
    """Return the section on failed held-out episodes: up to five, each with a sentence on what went
    wrong, first those that the previous iteration's model had won; none if no episode failed.
    """
    before = board.episodes(iteration - 1) if iteration else []
    episodes = board.episodes(iteration)
    all_failures = [episode for episode in episodes if not episode.trajectory.success]
    # Of an episode that failed for good, no step is stored.
    failed_episodes = [episode for episode in all_failures if episode.trajectory_id]
    if not failed_episodes:
        return ()
    was_won = {_key(episode): episode.trajectory.success for episode in before}
    num_lost = sum(was_won.get(_key(episode), False) for episode in all_failures)
    num_gained = sum(was_won.get(_key(episode)) is False for episode in episodes if episode.trajectory.success)
    columns = (
        Column("Instance", "text"),
        Column("Problem", "text"),
        Column("What went wrong", "text"),
        Column("Steps"),
        *([Column(wording.iteration_name(iteration - 1).capitalize(), "text")] if before else []),
    )
    rows = []
    for episode in sorted(failed_episodes, key=lambda episode: not was_won.get(_key(episode)))[:_MAX_FAILURES]:
        trajectory = episode.trajectory
        step_failures = failure_steps(trajectory.steps, trajectory.stop)
        cells = (
            episode.instance.key,
            textwrap.shorten(goal_in(trajectory.first_observation), _GOAL_CHARS, placeholder="…"),
            step_failures[0].sentence if step_failures else f"no step; it ended by {wording.label(trajectory.stop)}",
            str(len(trajectory.steps)),
        )
        outcome_before = {None: wording.NOTHING, True: "won", False: "lost"}[was_won.get(_key(episode))]
        rows.append(Row((*cells, *([outcome_before] if before else []))))
    note = f"{len(all_failures)} of {len(episodes)} episodes failed."
    if before:
        name = wording.iteration_name(iteration - 1)
        note += f" {name.capitalize()} had won {num_lost} of them; {num_gained} that it lost are won now."
    return (Section("failures", "Failed episodes", (Table(columns, tuple(rows)),), note),)


def alarm_section(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the section on the alarms of an iteration; none where none was raised."""
    alarms = load_alarms(ctx.store, ctx.iteration_id(iteration))
    lines = (
        Paragraph(f"{alarm.name}, {alarm.stage}{f', step {alarm.step}' if alarm.step else ''}: {alarm.message}.")
        for alarm in alarms
    )
    note = "The recipe's section alarms has the thresholds, and the manual's page on alarms says what each means."
    return (Section("alarms", "Alarms", tuple(lines), note),) if alarms else ()


def with_run_sections(ctx: RunContext, report: IterationReport) -> IterationReport:
    """Return the outline of a run's last iteration with the sections about the whole run: those of
    its method, and the one on episodes that were scored again.
    """
    return replace(report, run_sections=(*_method_sections(ctx, report.iteration, "run"), *scoring_section(ctx)))


def _method_sections(ctx: RunContext, iteration: int, position: Position) -> tuple[Section, ...]:
    parts = [part for part in ctx.method.report if part.position == position]
    return tuple(section for part in parts for section in part.sections(ctx, iteration))


def promoted_model(ctx: RunContext, iteration: int) -> PromotedModel | None:
    """Return the model that an iteration promoted as the best; None before it is known, or if the
    recipe promotes the last one.
    """
    if ctx.recipe.promote == "last":
        return None
    promotion = promotion_after(ctx.store, ctx.run_id, iteration)
    if promotion is None or promotion.success is None:
        return None
    return PromotedModel(
        iteration=promotion.iteration, development_set=promotion.development, success=promotion.success
    )


def role_labels(recipe: Recipe) -> dict[str, str]:
    """Return the models of the roles, other than the actor, that have their own, by role."""
    return {role: model.label for role, model in recipe.own_models().items() if role != "actor"}


def finished_at(ctx: RunContext, iteration: int) -> str:
    """Return the time when an iteration ended, or the present time while it runs, to the minute."""
    state = iteration_state(ctx.store, ctx.iteration_id(iteration))
    end_time = state.finished_at if state else None
    return wording.moment(end_time or datetime.now(UTC))


# One model in several worlds compared with a model for each world. Source: Agent-R (arXiv
# 2501.11425), table 6.

ONE_MODEL, MODEL_PER_WORLD = "one model", "a model a world"


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorldScores:
    """The scores of a model in one world, and the instances that it played."""

    success: Estimate
    reward: Estimate
    instances: frozenset[str]


def world_comparison(ctx: RunContext, single_runs: Sequence[RunContext]) -> tuple[ModeScores, ...]:
    """Return the held-out scores of a run of several worlds, and those of runs of one world each,
    by iteration, starting with the model that the runs began with.

    Raises `ConfigError` if the first run has only one world, if another one is not of one of its
    worlds or shares it with a third, or if they played different instances.
    """
    worlds = ctx.recipe.world_names
    if len(worlds) < 2:
        raise ConfigError(f"run {ctx.run_id} has one world; name a run of several worlds first")
    by_name: dict[str, RunContext] = {}
    for run in single_runs:
        run_worlds = run.recipe.world_names
        if len(run_worlds) > 1 or run_worlds[0] not in worlds:
            raise ConfigError(
                f"run {run.run_id} is of {', '.join(run_worlds)}; name runs of one world of run {ctx.run_id} each"
            )
        if run_worlds[0] in by_name:
            raise ConfigError(
                f"runs {by_name[run_worlds[0]].run_id} and {run.run_id} are both of {run_worlds[0]}; name one of them"
            )
        by_name[run_worlds[0]] = run
    together = _world_scores(ctx)
    apart = {name: _world_scores(run) for name, run in by_name.items()}
    for name, run in by_name.items():
        for joint, single in ((together[number], apart[name][number]) for number in together.keys() & apart[name]):
            if name in joint and name in single and joint[name].instances != single[name].instances:
                raise ConfigError(
                    f"run {run.run_id} played other held-out instances of {name} than run {ctx.run_id}; compare "
                    "runs with the same test split and test_limit"
                )
    last = max([0, *together, *(number for scores in apart.values() for number in scores)])
    result = []
    for iteration in range(last + 1):
        rows = {
            ONE_MODEL: together.get(iteration, {}),
            MODEL_PER_WORLD: {
                name: scores[iteration][name] for name, scores in apart.items() if name in scores.get(iteration, {})
            },
        }
        result += [
            ModeScores(
                iteration=iteration,
                mode=mode,
                success={name: score.success for name, score in world_scores.items()},
                reward={name: score.reward for name, score in world_scores.items()},
            )
            for mode, world_scores in rows.items()
            if world_scores
        ]
    return tuple(result)


def recipe_differences(ctx: RunContext, single_runs: Sequence[RunContext]) -> list[str]:
    """Return one sentence for each run of one world whose recipe differs from that of the run of
    several worlds; it names the sections that differ.
    """
    sentences = []
    for run in single_runs:
        (name,) = run.recipe.world_names
        if differing := differing_sections(ctx.recipe.in_world(name), run.recipe.in_world(name)):
            sentences.append(f"run {run.run_id} also differs in {', '.join(differing)}")
    return sentences


def differing_sections(recipe: Recipe, other: Recipe) -> list[str]:
    """Return the names of the sections in which two recipes differ, sorted; names, descriptions and
    sections that change no result are left out.
    """
    first, second = _result_sections(recipe), _result_sections(other)
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def _result_sections(recipe: Recipe) -> dict[str, object]:
    return {name: value for name, value in identifying_data(recipe).items() if name not in SECTIONS_WITHOUT_EFFECT}


def _world_scores(ctx: RunContext) -> dict[int, dict[str, _WorldScores]]:
    """Return the scores in each world, by iteration."""
    board = Scoreboard(ctx)
    scores: dict[int, dict[str, _WorldScores]] = {}
    for number in iteration_numbers(ctx.store, ctx.run_id):
        test_measures = board.measured(number, TEST)
        instances = [e.instance for e in counted_episodes(ctx, evaluation_id(ctx, number, TEST))]
        for name in ctx.recipe.world_names:
            if measures := world_measures(test_measures, name) if ctx.recipe.environments else test_measures:
                scores.setdefault(number, {})[name] = _WorldScores(
                    success=report_estimate(measures["success_clustered"]),
                    reward=report_estimate(measures["reward"]),
                    instances=frozenset(i.key for i in instances if ctx.recipe.world_name(i.environment) == name),
                )
    return scores


# A report of runs side by side, filled from the store: episodes paired, intervals over the same
# instances.


def build_runs(contexts: Sequence[RunContext], *, viewer: str = "") -> RunsReport:
    """Return the report of runs side by side, in which the others are compared with the first.

    Raises `ConfigError` where a run has no model that was evaluated, or is named twice.
    """
    names = [ctx.run_id for ctx in contexts]
    if len(set(names)) < len(names):
        raise ConfigError(f"a run is named twice: {', '.join(names)}; name different runs")
    first, last = contexts[0], _last_iteration(contexts[0])
    columns = tuple(_run_column(ctx, first, last) for ctx in contexts)
    means = tuple(means_over_seeds(first.store, {ctx.run_id: ctx.recipe for ctx in contexts}))
    # Where each run is a group of its own, its scores stand above.
    if not any(len(mean.runs) > 1 for mean in means):
        means = ()
    return RunsReport(runs=columns, date=wording.moment(datetime.now(UTC)), viewer_url=viewer, means=means)


def _last_iteration(ctx: RunContext) -> int:
    """Return the iteration whose model a run ends with so far: the last one with a finished
    evaluation, or the one that this iteration promotes. Raises `ConfigError` if there is none.
    """
    ended_ids = {evaluation.evaluation_id for evaluation in finished_evaluations(ctx.store, ctx.run_id, after=-1)}
    numbers = [n for n in iteration_numbers(ctx.store, ctx.run_id) if evaluation_id(ctx, n, TEST) in ended_ids]
    if not numbers:
        pending = Scoreboard(ctx).unfinished(max(iteration_numbers(ctx.store, ctx.run_id), default=0))
        if pending:
            raise ConfigError(f"run {ctx.run_id} cannot be compared yet; {unfinished_sentences(pending)[-1]}")
        raise ConfigError(f"run {ctx.run_id} has no model that was evaluated, so there is nothing to compare")
    chosen = promoted_model(ctx, numbers[-1])
    return chosen.iteration if chosen else numbers[-1]


def _run_column(ctx: RunContext, first: RunContext, last_of_first: int) -> RunColumn:
    iteration, board = _last_iteration(ctx), Scoreboard(ctx)
    outlines = [build_outline(ctx, number, board) for number in range(1, iteration + 1)]
    tokens = [outline.tokens for outline in outlines if outline.tokens]
    sets: list[PairedScore] = []
    for name in (TEST, *ctx.recipe.evaluation.sets, REVISION):
        episodes = ended_episodes(ctx, evaluation_id(ctx, iteration, name))
        if not episodes:
            continue
        measures = board.measured(iteration, name)
        first_episodes = [] if ctx is first else ended_episodes(first, evaluation_id(first, last_of_first, name))
        first_outcomes = {_key(episode): episode.trajectory.success for episode in first_episodes if _is_known(episode)}
        common_episodes = [episode for episode in episodes if _is_known(episode) and _key(episode) in first_outcomes]
        outcomes = [(episode.trajectory.success, first_outcomes[_key(episode)]) for episode in common_episodes]
        depths = ((depth, finite_estimate(gain(group, first_episodes))) for depth, group in by_depth(common_episodes))
        sets.append(
            PairedScore(
                name=wording.label(name),
                success=report_estimate(measures.get("success_clustered", measures["success"])),
                difference=finite_estimate(gain(common_episodes, first_episodes)) if common_episodes else None,
                num_shared=len(common_episodes),
                num_won=outcomes.count((True, False)),
                num_lost=outcomes.count((False, True)),
                depth_differences=tuple((depth, difference) for depth, difference in depths if difference is not None),
            )
        )
    return RunColumn(
        run_id=ctx.run_id,
        recipe_name=ctx.recipe.name,
        method=ctx.method.title,
        model=ctx.recipe.model.label,
        seed=ctx.recipe.seed,
        iteration=iteration,
        scores=board.up_to(iteration),
        sets=tuple(sets),
        seconds=sum(seconds for outline in outlines for seconds in outline.seconds_by_activity.values()),
        prompt=sum(counts.prompt for counts in tokens),
        completion=sum(counts.completion for counts in tokens),
        trained=sum(counts.num_trained for counts in tokens),
        differing_sections=() if ctx is first else tuple(differing_sections(first.recipe, ctx.recipe)),
    )


def _is_known(episode: Episode) -> bool:
    """Return whether the steps that an episode was given are known: an episode of a revision test
    that failed for good has none stored.
    """
    return not episode.cut or bool(episode.trajectory_id)


def _key(episode: Episode) -> tuple[str, int, int, tuple[str, ...]]:
    """Return what identifies an episode across runs. Revision tests of two runs continue failures
    of their own first models, which may differ though instance, number and cut are equal.
    """
    return episode.instance.key, episode.repeat, episode.cut, given_replies(episode)


# The counts of the stages of data construction that several methods share.


def expert_episodes(ctx: RunContext, iteration: int) -> FunnelStage:
    """Return the stage of the funnel that counts the expert's episodes of an iteration."""
    source = ctx.source_id(iteration)
    count = datasets.episode_counts(ctx.store, source, "expert").played
    return FunnelStage(name="expert episodes", count=count, rejected_by_reason=count_rejections(ctx, source, "expert"))


def expert_funnel(ctx: RunContext, iteration: int) -> tuple[FunnelStage, ...]:
    """Return the stages of the funnel of a method that clones the expert."""
    return with_row_counts(ctx, iteration, [expert_episodes(ctx, iteration)])


def with_row_counts(ctx: RunContext, iteration: int, stages: Sequence[FunnelStage]) -> tuple[FunnelStage, ...]:
    """Return the given stages, followed by the numbers of samples and of trained rows."""
    iteration_id, source_id = ctx.iteration_id(iteration), ctx.source_id(iteration)
    samples, rows = (
        datasets.count_samples(ctx.store, source_id),
        datasets.count_trained_rows(ctx.store, iteration_id),
    )
    return (
        *stages,
        FunnelStage(name="samples of the pool" if source_id != iteration_id else "samples", count=samples),
        FunnelStage(name="trained rows", count=rows, rejected_by_reason=count_rejections(ctx, iteration_id, "filter")),
    )


def count_rejections(ctx: RunContext, iteration_id: str, stage: str) -> dict[str, int]:
    """Return how many candidates a stage rejected in an iteration, by reason, the most frequent
    first.
    """
    return datasets.rejection_counts(ctx.store, iteration_id).get(stage, {})
