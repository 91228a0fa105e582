"""The page of an iteration, as sections and tables made from an `IterationReport`. A part that was
not measured says so in one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from agentr_core.reports import plots, wording
from agentr_core.reports.document import (
    BASE_ITERATION,
    Bar,
    Block,
    Cell,
    Column,
    Counts,
    Delta,
    ErrorRecord,
    Estimate,
    EstimateText,
    Figure,
    FunnelStage,
    Headline,
    IterationReport,
    IterationScore,
    Listing,
    Meter,
    ModelUsage,
    Paragraph,
    PromotedModel,
    Row,
    RowTone,
    Section,
    SetScore,
    Stack,
    StackPart,
    Table,
    TokenCounts,
    UnfinishedEvaluation,
    Whisker,
    unmeasured_section,
)

# Tables that compare the models of a run: records in, plain tables out.


def unfinished_rows(columns: Sequence[Column], evaluations: Sequence[UnfinishedEvaluation]) -> tuple[Row, ...]:
    """Return a row for each evaluation that is not finished, in a table of scores."""

    def row(evaluation: UnfinishedEvaluation) -> Row:
        cells = {
            "Model": wording.iteration_name(evaluation.iteration),
            "Set": wording.label(evaluation.name),
            "Success %": "not finished",
            "Episodes": _progress(evaluation),
        }
        return Row(tuple(None if column.is_drawn else cells.get(column.title, wording.NOTHING) for column in columns))

    return tuple(map(row, evaluations))


def unfinished_sentences(evaluations: Sequence[UnfinishedEvaluation]) -> list[str]:
    """Return a sentence for each model whose evaluation is not finished: how many episodes of each
    set have ended, and what continues it.
    """
    progress_by_iteration: dict[int, list[str]] = {}
    for evaluation in evaluations:
        progress_texts = progress_by_iteration.setdefault(evaluation.iteration, [])
        progress_texts.append(f"{_progress(evaluation)} episodes of {wording.label(evaluation.name)}")
    return [
        f"{wording.iteration_name(number)}: the evaluation is not finished: {', '.join(progress_texts)}; "
        "the command that began the run goes on with it."
        for number, progress_texts in progress_by_iteration.items()
    ]


def _progress(evaluation: UnfinishedEvaluation) -> str:
    suffix = "" if evaluation.num_planned is None else f" of {wording.count(evaluation.num_planned)}"
    return f"{wording.count(evaluation.num_episodes)}{suffix}"


def scores_table(
    all_scores: Sequence[IterationScore], current_iteration: int, pending: Sequence[UnfinishedEvaluation] = ()
) -> Table:
    """Return success, reward, steps to success and episodes of every model; for one whose
    evaluation is `pending`, how many episodes have ended.
    """
    columns = (
        Column("Model", "text"),
        Column("Success %"),
        Column("95% interval"),
        Column("", "whisker"),
        Column(f"Reward {wording.TIMES}100"),
        Column("Steps to success"),
        Column("Episodes"),
    )
    rows = (
        Row(
            (
                wording.model_name(score),
                wording.percent(score.success.value),
                wording.interval(score.success),
                _whisker(score.success),
                wording.percent(score.reward.value),
                wording.decimal(score.steps_to_success, 1),
                wording.count(score.success.n),
            ),
            _tone(score, current_iteration),
        )
        for score in all_scores
    )
    iterations = {score.iteration for score in all_scores}
    first_by_iteration = {item.iteration: item for item in reversed(pending) if item.iteration not in iterations}
    unfinished = sorted(first_by_iteration.values(), key=lambda item: item.iteration)
    return Table(columns, (*rows, *unfinished_rows(columns, unfinished)))


def lost_sentences(all_scores: Sequence[IterationScore]) -> list[str]:
    """Return a sentence for each model with lost episodes: how many, and how they count."""
    treatments = {"out": "left out of the means", "zero": "counted as failures with reward 0"}
    return [
        f"{wording.model_name(score)}: episodes that failed for good, {treatments[score.lost_treatment]}: "
        f"{wording.count(score.num_lost)}."
        for score in all_scores
        if score.num_lost
    ]


def promotion_sentence(promotion: PromotedModel) -> str:
    """Return a sentence about the model with which the run goes on."""
    name, success = wording.iteration_name(promotion.iteration), wording.percent(promotion.success)
    return (
        f"Promoted: {name}, with {success}% success on the development set {promotion.development_set} the best so far."
    )


def depth_table(all_scores: Sequence[IterationScore]) -> Table:
    """Return success for each difficulty class (rows) and model (columns)."""
    depth_classes = sorted({depth.depth for score in all_scores for depth in score.by_depth})
    successes = {(score.iteration, depth.depth): depth.success for score in all_scores for depth in score.by_depth}
    columns = (
        Column("Depth", "text"),
        Column("Episodes"),
        *(Column(wording.model_name(score), "meter") for score in all_scores),
    )
    rows = []
    for depth in depth_classes:
        estimates = [successes.get((score.iteration, depth)) for score in all_scores]
        episodes = sorted({estimate.n for estimate in estimates if estimate})
        episodes_text = wording.DASH.join(map(wording.count, episodes[:1] + episodes[1:][-1:]))
        rows.append(Row((str(depth), episodes_text, *map(_meter, estimates))))
    return Table(columns, tuple(rows))


def sets_table(
    all_scores: Sequence[IterationScore], current_iteration: int, pending: Sequence[UnfinishedEvaluation] = ()
) -> Table:
    """Return success of every model on every held-out set, with the paired difference to the base
    model; for `pending` evaluations, how many episodes have ended.
    """
    columns = (
        Column("Model", "text"),
        Column("Set", "text"),
        Column("Success %"),
        Column("95% interval"),
        Column("", "whisker"),
        Column("Against base"),
        Column("Instances"),
        Column("Episodes"),
    )
    rows = [
        Row(
            (
                wording.model_name(score),
                name,
                wording.percent(set_score.success.value),
                wording.interval(set_score.success),
                _whisker(set_score.success),
                gain_cell(set_score.versus_base),
                wording.count(set_score.instances),
                wording.count(set_score.success.n),
            ),
            _tone(score, current_iteration),
        )
        for name in single_episode_sets(all_scores)
        for score in all_scores
        if (set_score := score.score_of_set(name))
    ]
    names = set_names(all_scores)
    return Table(columns, (*rows, *unfinished_rows(columns, [item for item in pending if item.name in names])))


def worlds_table(all_scores: Sequence[IterationScore], current_iteration: int) -> Table:
    """Return success and reward of every model in each of several worlds with 95% intervals, then
    the means over the worlds, then those over all episodes.
    """
    columns = (
        Column("World", "text"),
        Column("Model", "text"),
        Column("Success % (95% interval)"),
        Column(f"Reward {wording.TIMES}100"),
        Column("Against base"),
        Column("Recovered %"),
        Column(f"Recovered reward {wording.TIMES}100"),
        Column("Episodes"),
    )
    rows = [
        _world_row(score, current_iteration, name, world_score)
        for name in dict.fromkeys(world.name for score in all_scores for world in score.worlds)
        for score in all_scores
        if (world_score := score.score_of_set(name))
    ]
    for score in all_scores:
        if score.worlds:
            # Each world counts the same, however many episodes it has.
            cells = (
                "mean of worlds",
                wording.model_name(score),
                wording.percent(_mean([world.success for world in score.worlds])),
                wording.percent(_mean([world.reward for world in score.worlds])),
                wording.NOTHING,
                wording.percent(_mean([world.revision for world in score.worlds])),
                wording.percent(_mean([world.revision_reward for world in score.worlds])),
                wording.NOTHING,
            )
            rows.append(Row(cells, _tone(score, current_iteration)))
    rows += [_world_row(score, current_iteration, "all episodes", score) for score in all_scores if score.worlds]
    return Table(columns, tuple(rows))


def _world_row(score: IterationScore, current_iteration: int, name: str, result: SetScore | IterationScore) -> Row:
    return Row(
        (
            name,
            wording.model_name(score),
            _estimate_cell(result.success),
            _estimate_cell(result.reward),
            gain_cell(result.versus_base),
            _estimate_cell(result.revision),
            _estimate_cell(result.revision_reward),
            wording.count(result.success.n),
        ),
        _tone(score, current_iteration),
    )


def _mean(estimates: Sequence[Estimate | None]) -> float | None:
    """Return the mean of estimates; None where one of them is missing."""
    values = [estimate.value for estimate in estimates if estimate]
    return fmean(values) if values and len(values) == len(estimates) else None


def _estimate_cell(estimate: Estimate | None) -> Cell:
    """Return a share with its interval in one cell: with two, the table would be too wide."""
    return wording.estimate_text(estimate) if estimate else wording.NOTHING


def set_depth_table(all_scores: Sequence[IterationScore], name: str, current_iteration: int) -> Table:
    """Return success on one set for each difficulty class (rows) and model (columns), and the gain
    of the current model over the base.
    """
    score_pairs = [(score, set_score) for score in all_scores if (set_score := score.score_of_set(name))]
    score_by_cell = {
        (score.iteration, depth_score.depth): depth_score
        for score, set_score in score_pairs
        for depth_score in set_score.by_depth
    }
    columns = [
        Column("Depth", "text"),
        Column("Episodes"),
        *(Column(wording.model_name(score), "meter") for score, _ in score_pairs),
    ]
    if current_iteration != BASE_ITERATION:
        columns.append(Column(f"{wording.iteration_name(current_iteration).capitalize()} against base"))
    rows = []
    for depth in sorted({depth for _, depth in score_by_cell}):
        depth_scores = [score_by_cell.get((score.iteration, depth)) for score, _ in score_pairs]
        num_episodes = max(depth_score.success.n for depth_score in depth_scores if depth_score)
        meters = [_meter(depth_score.success if depth_score else None) for depth_score in depth_scores]
        cells = [str(depth), wording.count(num_episodes), *meters]
        if current_iteration != BASE_ITERATION:
            current_score = score_by_cell.get((current_iteration, depth))
            cells.append(gain_cell(current_score.versus_base if current_score else None))
        rows.append(Row(tuple(cells)))
    return Table(tuple(columns), tuple(rows))


def pass_at_table(all_scores: Sequence[IterationScore]) -> Table:
    """Return pass@k, the chance that at least one of k sampled episodes of an instance succeeds,
    for each k: over all instances and by difficulty.
    """
    results = [
        (score, set_score.name, pass_at_k)
        for score in all_scores
        for set_score in score.sets
        for pass_at_k in set_score.pass_at
    ]
    depths = sorted({depth_score.depth for _, _, pass_at_k in results for depth_score in pass_at_k.by_depth})
    columns = (
        Column("Model", "text"),
        Column("Set", "text"),
        Column("Measure", "text"),
        Column("%"),
        Column("95% interval"),
        *(Column(f"Depth {depth}") for depth in depths),
        Column("Instances"),
    )
    rows = []
    for score, name, pass_at_k in results:
        percent_by_depth = {item.depth: wording.percent(item.success.value) for item in pass_at_k.by_depth}
        cells = (
            wording.model_name(score),
            name,
            f"pass@{pass_at_k.k}",
            wording.percent(pass_at_k.success.value),
            wording.interval(pass_at_k.success),
            *(percent_by_depth.get(depth, wording.NOTHING) for depth in depths),
            wording.count(pass_at_k.success.n),
        )
        rows.append(Row(cells))
    return Table(columns, tuple(rows))


def set_names(all_scores: Sequence[IterationScore]) -> tuple[str, ...]:
    """Return the names of the held-out sets that some model played, in their order."""
    return tuple(dict.fromkeys(set_score.name for score in all_scores for set_score in score.sets))


def single_episode_sets(all_scores: Sequence[IterationScore]) -> tuple[str, ...]:
    """Return the names of the sets without pass@k: those with one episode per instance."""
    sampled_names = {set_score.name for score in all_scores for set_score in score.sets if set_score.pass_at}
    return tuple(name for name in set_names(all_scores) if name not in sampled_names)


def gain_cell(estimate: Estimate | None) -> Cell:
    """Return a difference in points with its interval; a dash for None."""
    if estimate is None:
        return wording.NOTHING
    return EstimateText(wording.points(estimate.value), wording.points_interval(estimate))


def revision_table(all_scores: Sequence[IterationScore], current_iteration: int) -> Table:
    """Return success and reward in the revision test, from failed prefixes, of each model."""
    columns = (
        Column("Model", "text"),
        Column("Recovered %"),
        Column("95% interval"),
        Column("", "whisker"),
        Column(f"Reward {wording.TIMES}100"),
        Column("95% interval"),
        Column("Prefixes"),
    )
    rows = (
        Row(
            (
                wording.model_name(score),
                wording.percent(score.revision.value),
                wording.interval(score.revision),
                _whisker(score.revision),
                wording.percent(score.revision_reward.value if score.revision_reward else None),
                wording.interval(score.revision_reward),
                wording.count(score.revision.n),
            ),
            _tone(score, current_iteration),
        )
        for score in all_scores
        if score.revision
    )
    return Table(columns, tuple(rows))


def loops_table(all_scores: Sequence[IterationScore], current_iteration: int) -> Table:
    """Return, for each model, the mean repetitions of each length in an episode, and the share of
    episodes that loop; see `IterationScore.loops` and `looping`.
    """
    longest = max(len(score.loops) for score in all_scores)
    columns = (
        Column("Model", "text"),
        *(Column(f"L={length}") for length in range(1, longest + 1)),
        Column("Looping episodes %"),
    )
    rows = []
    for score in all_scores:
        if score.loops:
            means: list[float | None] = [*score.loops, *[None] * (longest - len(score.loops))]
            cells = (wording.model_name(score), *map(wording.decimal, means), wording.percent(score.looping))
            rows.append(Row(cells, _tone(score, current_iteration)))
    return Table(columns, tuple(rows))


def _tone(score: IterationScore, current_iteration: int) -> RowTone:
    return "strong" if score.iteration == current_iteration else ""


def _whisker(estimate: Estimate) -> Whisker:
    return Whisker(estimate.low, estimate.value, estimate.high)


def _meter(estimate: Estimate | None) -> Cell:
    if estimate is None:
        return wording.NOTHING
    return Meter(wording.percent(estimate.value), wording.interval(estimate), estimate.value)


# Tables about data construction, judge, cost and errors: records in, plain tables out.


def funnel_table(stages: Sequence[FunnelStage]) -> Table:
    """Return the stages of data construction: a row with the count of each and, below it, rows with
    the number of items that it rejected for each reason.
    """
    largest_count = max(stage.count for stage in stages)
    rows = []
    previous_count: int | None = None
    for stage in stages:
        ratio_text = wording.NOTHING
        if previous_count:
            factor_text = f"{wording.TIMES}{stage.count / previous_count:.1f}"
            percent_text = f"{100 * stage.count / previous_count:.1f}%"
            ratio_text = factor_text if stage.count > previous_count else percent_text
        cells: tuple[Cell, ...] = (wording.label(stage.name), wording.count(stage.count), ratio_text)
        rows.append(Row((*cells, Bar(wording.share(stage.count, largest_count) or 0.0)), "strong"))
        rows += [
            Row((wording.label(reason), f"{wording.MINUS}{wording.count(count)}", "", None), "minor")
            for reason, count in sorted_by_count(stage.rejected_by_reason).items()
        ]
        previous_count = stage.count
    return Table((Column("Stage", "text"), Column("Count"), Column("Of stage before"), Column("", "bar")), tuple(rows))


def time_table(times: Mapping[str, float]) -> Table:
    """Return time and share of each activity, and their total."""
    total = sum(times.values())
    rows = [
        Row((wording.label(name), wording.duration(seconds), _percent(seconds, total)))
        for name, seconds in times.items()
    ]
    rows.append(Row(("total", wording.duration(total), wording.percent(1.0)), "strong"))
    return Table((Column("Activity", "text"), Column("Time"), Column("Share %")), tuple(rows))


def tokens_table(counts: TokenCounts) -> Table:
    """Return the tokens read, written and trained, the last by class: of one pass over the dataset,
    followed by the total of training if that took another number of passes.
    """
    pass_total = sum(counts.trained_by_class.values())
    single_pass = counts.num_trained == pass_total
    pass_title = "trained (with loss)" if single_pass else "with loss, in one pass"
    rows = [
        Row(("prompt", wording.count(counts.prompt), ""), "strong"),
        Row(("completion", wording.count(counts.completion), ""), "strong"),
        Row((pass_title, wording.count(pass_total), _percent(pass_total, pass_total)), "strong"),
    ]
    rows += [
        Row((wording.label(name), wording.count(count), _percent(count, pass_total)), "minor")
        for name, count in counts.trained_by_class.items()
    ]
    if not single_pass:
        rows.append(Row(("trained (with loss)", wording.count(counts.num_trained), ""), "strong"))
    return Table((Column("Tokens", "text"), Column("Count"), Column("Of trained %")), tuple(rows))


def cut_replies_table(counts_by_name: Mapping[str, tuple[int, int]], name_title: str, cut_title: str) -> Table:
    """Return how many replies were cut, by purpose or role, under the given headings."""
    rows = (
        Row((wording.label(name), wording.count(num_replies), wording.count(num_cut), _percent(num_cut, num_replies)))
        for name, (num_replies, num_cut) in counts_by_name.items()
    )
    return Table((Column(name_title, "text"), Column("Count"), Column(cut_title), Column("%")), tuple(rows))


def usage_table(usages: Sequence[ModelUsage]) -> Table:
    """Return what served models read, wrote and cost, by role."""
    columns = (Column("Served model", "text"), Column("", "code"), Column("Requests"), Column("Prompt tokens"))
    rows = (
        Row(
            (
                wording.label(usage.role),
                usage.model,
                wording.count(usage.requests),
                wording.count(usage.prompt),
                wording.count(usage.completion),
                wording.decimal(usage.cost, 4),
            )
        )
        for usage in usages
    )
    return Table((*columns, Column("Completion tokens"), Column("Cost")), tuple(rows))


def stops_table(record: ErrorRecord) -> Table:
    """Return why tree paths and held-out episodes ended."""
    num_paths = sum(stop.num_collected for stop in record.stops)
    num_episodes = sum(stop.num_evaluated for stop in record.stops)
    rows = (
        Row(
            (
                wording.label(stop.reason),
                wording.count(stop.num_collected),
                _percent(stop.num_collected, num_paths),
                wording.count(stop.num_evaluated),
                _percent(stop.num_evaluated, num_episodes),
            )
        )
        for stop in record.stops
    )
    columns = (
        Column("Stop reason", "text"),
        Column("Collected paths"),
        Column("%"),
        Column("Held-out episodes"),
        Column("%"),
    )
    return Table(columns, tuple(rows))


def faults_table(record: ErrorRecord) -> Table:
    """Return exceptions by class and phase, with the number of episodes lost to each."""
    columns = (Column("Exception", "code"), Column("Phase", "text"), Column("Count"), Column("Lost episodes"))
    rows = (
        Row((item.error, wording.label(item.phase), wording.count(item.count), wording.count(item.num_lost)))
        for item in record.faults
    )
    return Table(columns, tuple(rows))


def counts_table(title: str, unit: str, counts_by_name: Counts, num_all: int | None = None) -> Table:
    """Return counts with their shares of `num_all`, by default their sum, as numbers and bars."""
    total = sum(counts_by_name.values()) if num_all is None else num_all
    rows = (
        Row(
            (wording.label(name), wording.count(count), _percent(count, total), Bar(wording.share(count, total) or 0.0))
        )
        for name, count in counts_by_name.items()
    )
    return Table((Column(title, "text"), Column(unit), Column("%"), Column("", "bar")), tuple(rows))


def _percent(part: float, whole: float) -> str:
    return wording.percent(wording.share(part, whole))


def values_table(title: str, values: Mapping[str, str]) -> Table:
    """Return names with their values as code."""
    return Table((Column(title, "text"), Column("", "code")), tuple(map(Row, values.items())))


def sorted_by_count(numbers: Counts) -> dict[str, int]:
    """Return counts, the largest first."""
    return dict(sorted(numbers.items(), key=lambda item: (-item[1], item[0])))


def world_counts_table(counts_by_world: Mapping[str, Counts]) -> Table:
    """Return how many items were made in each world and in all, without kinds that have none."""
    kinds = dict.fromkeys(kind for counts in counts_by_world.values() for kind, count in counts.items() if count)
    rows = [
        *counts_by_world.items(),
        ("all", {kind: sum(counts.get(kind, 0) for counts in counts_by_world.values()) for kind in kinds}),
    ]
    return Table(
        (Column("World", "text"), *(Column(wording.label(kind)) for kind in kinds)),
        tuple(Row((name, *(wording.count(counts.get(kind, 0)) for kind in kinds))) for name, counts in rows),
    )


def sections(report: IterationReport) -> tuple[Section, ...]:
    """Return the sections of a report in order, with those of its method (`data`, `samples`)."""
    note = "What of the training data each world gave; general data belongs to none."
    return (
        _headline(report),
        *report.alarm_sections,
        _scores(report),
        *_held_out(report),
        _revision(report),
        *report.failure_sections,
        _loops(report),
        _funnel(report),
        *(
            [Section("data-worlds", "Training data by world", (world_counts_table(report.item_counts_by_world),), note)]
            if report.item_counts_by_world
            else []
        ),
        *report.data_sections,
        _time(report),
        _tokens(report),
        _errors(report),
        *report.sample_sections,
        _recipe(report),
        _versions(report),
    )


def headline(report: IterationReport) -> Headline | None:
    """Return this iteration's success and its differences, or None when it was not evaluated."""
    score = report.score(report.iteration)
    if score is None:
        return None
    estimate = score.success
    deltas, readings = [], []
    for reference, difference in _reference_differences(report):
        reference_name = wording.iteration_name(reference)
        if difference:
            deltas.append(Delta(wording.points(difference.value), wording.points_interval(difference), reference_name))
            if difference.low <= 0 <= difference.high:
                readings.append(f"No clear difference from {reference_name}: the interval contains zero.")
            else:
                direction = "Above" if difference.low > 0 else "Below"
                readings.append(f"{direction} {reference_name}: the 95% interval of the difference excludes zero.")
        elif reference_score := report.score(reference):
            deltas.append(Delta(wording.points(estimate.value - reference_score.success.value), "", reference_name))
    return Headline(
        wording.percent(estimate.value),
        wording.interval(estimate),
        wording.count(estimate.n),
        tuple(deltas),
        " ".join(readings),
    )


def _headline(report: IterationReport) -> Section:
    summary = headline(report)
    if summary is None:
        title = "Held-out success"
        pending = [item for item in report.unfinished_evaluations if item.iteration == report.iteration]
        if pending:
            return Section("headline", title, tuple(map(Paragraph, unfinished_sentences(pending))))
        return unmeasured_section("headline", title, "this iteration has not been evaluated on held-out instances")
    blocks: list[Block] = [summary]
    if len(report.scores) > 1:
        drawing = plots.success(report.scores, report.iteration)
        blocks.append(Figure(drawing, "Success in percent with 95% intervals; the dashed line is the base model."))
    return Section("headline", "Held-out success", tuple(blocks))


def _scores(report: IterationReport) -> Section:
    title = "Score by iteration"
    if not (report.scores or report.unfinished_evaluations):
        return unmeasured_section("scores", title, "no model of this run has been evaluated")
    note = "Success is the flag that the environment sets itself; reward is the mean final score."
    if report.interval_method:
        note += f" Intervals: {report.interval_method}."
    table = scores_table(report.scores, report.iteration, report.unfinished_evaluations)
    sentences = [
        *([promotion_sentence(report.promoted)] if report.promoted else []),
        *unfinished_sentences(report.unfinished_evaluations),
        *lost_sentences(report.scores),
    ]
    return Section("scores", title, (table, *map(Paragraph, sentences)), note)


def _held_out(report: IterationReport) -> Iterator[Section]:
    """Yield the scores by world and by set; with one of each, success by difficulty alone."""
    scores, names = report.scores, single_episode_sets(report.scores)
    worlds = tuple(dict.fromkeys(world.name for score in scores for world in score.worlds))
    if worlds:
        note = (
            "One model in each of its worlds, with 95% intervals. Differences to the base model are in points of "
            "success, on the same episodes. In the mean of worlds each world counts the same."
        )
        yield Section("worlds", "Score by world", (worlds_table(scores, report.iteration),), note)
        depth_blocks = tuple(_by_depth(report, worlds, "World"))
        if depth_blocks:
            note = "Percent of held-out episodes solved in each difficulty class, with 95% intervals."
            yield Section("depth-worlds", "Success by depth in each world", depth_blocks, note)
    if any(score.sets for score in scores):
        note = "Differences to the base model are in points, with 95% intervals, on the same episodes."
        table = sets_table(scores, report.iteration, report.unfinished_evaluations)
        yield Section("sets", "Held-out sets", (table,), note)
        depth_blocks = tuple(_by_depth(report, names, "Set"))
        if depth_blocks:
            note = "Percent of episodes solved in each difficulty class, with 95% intervals."
            yield Section("depth", "Success by depth", depth_blocks, note)
        if names != set_names(scores):
            note = (
                "pass@k is the chance that at least one of k sampled episodes of an instance succeeds. How far it lies "
                "above pass@1 is what a method that learns from its own samples can gain."
            )
            yield Section("headroom", "Headroom: what sampling reaches", (pass_at_table(scores),), note)
    elif not worlds:
        if any(score.by_depth for score in scores):
            note = "Percent of held-out episodes solved in each difficulty class, with 95% intervals."
            yield Section("depth", "Success by depth", (depth_table(scores),), note)
        else:
            reason = "the environment names no difficulty classes, or no model has been evaluated"
            yield unmeasured_section("depth", "Success by depth", reason)


def _by_depth(report: IterationReport, names: tuple[str, ...], label: str) -> Iterator[Block]:
    for name in names:
        set_scores = [set_score for score in report.scores if (set_score := score.score_of_set(name))]
        if any(score.by_depth for score in set_scores):
            yield Paragraph(f"{label} {name}")
            yield set_depth_table(report.scores, name, report.iteration)


def _revision(report: IterationReport) -> Section:
    title = "Revision test"
    if not any(score.revision for score in report.scores):
        reason = "the recipe has it switched off, the base model failed on no instance, or it is not finished"
        return unmeasured_section("revision", title, reason)
    note = (
        "Failed episodes of the base model are cut at a random step and replayed; the model goes on from there. The "
        "prefixes are chosen once, are the same for every model, and nothing tells it that they fail."
    )
    return Section("revision", title, (revision_table(report.scores, report.iteration),), note)


def _loops(report: IterationReport) -> Section:
    title = "Loops"
    if not any(score.loops for score in report.scores):
        return unmeasured_section("loops", title, "no held-out episodes to count repetitions in")
    note = (
        "Mean number of positions in an episode at which L actions repeat the L actions right before. "
        "An episode loops when a sequence comes at least three times in a row."
    )
    return Section("loops", title, (loops_table(report.scores, report.iteration),), note)


def _funnel(report: IterationReport) -> Section:
    title = report.funnel_title
    if not report.funnel:
        return unmeasured_section("funnel", title, "this iteration built no training data")
    note = "What came out of each stage; indented, what the stage turned away and why."
    return Section("funnel", title, (funnel_table(report.funnel),), note)


def _time(report: IterationReport) -> Section:
    title = "Where time went"
    times = report.seconds_by_activity
    total = sum(times.values())
    if total <= 0:
        return unmeasured_section("time", title, "no timings were recorded")
    stack_parts = tuple(StackPart(wording.label(name), seconds / total) for name, seconds in times.items())
    note = "Waits for the environment count while no reply is generated. Times of several workers are summed."
    return Section("time", title, (Stack(stack_parts), time_table(times)), note)


def _tokens(report: IterationReport) -> Section:
    title = "Tokens"
    if report.tokens is None:
        return unmeasured_section("tokens", title, "the backend of the model counted no tokens")
    blocks: list[Block] = [tokens_table(report.tokens)]
    if report.tokens.cut_by_purpose:
        blocks.append(cut_replies_table(report.tokens.cut_by_purpose, "Replies", "Cut by the limit"))
    else:
        blocks.append(
            Paragraph("Not measured: replies that their token limit cut; none was drawn, or no backend told.")
        )
    if any(count for _, count in report.tokens.unreadable_by_role.values()):
        blocks.append(cut_replies_table(report.tokens.unreadable_by_role, "Replies of", "Cut within a thought"))
    if report.tokens.usages:
        blocks.append(usage_table(report.tokens.usages))
    return Section("tokens", title, tuple(blocks))


def _errors(report: IterationReport) -> Section:
    title = "Errors and stop reasons"
    if (record := report.errors) is None:
        return unmeasured_section("errors", title, "no events were recorded")
    blocks: list[Block] = []
    if record.refusals_by_message:
        heading = "Refused action, by the environment's first words"
        blocks.append(counts_table(heading, "Steps", record.refusals_by_message))
    else:
        blocks.append(Paragraph("No collected action was refused, or the environment does not tell."))
    blocks.append(stops_table(record) if record.stops else Paragraph("Not measured: why episodes stopped."))
    blocks.append(faults_table(record) if record.faults else Paragraph("No exception was met."))
    return Section("errors", title, tuple(blocks))


def _recipe(report: IterationReport) -> Section:
    if not report.recipe_yaml:
        return unmeasured_section("recipe", "Recipe", "the resolved recipe was not stored with the run")
    listing = Listing(f"{report.recipe_name}, with every default filled in", "yaml", report.recipe_yaml)
    return Section("recipe", "Recipe", (listing,))


def _versions(report: IterationReport) -> Section:
    title = "Versions and hashes"
    blocks: list[Block] = []
    if report.hashes:
        blocks.append(values_table("Artefact", report.hashes))
    if report.versions:
        blocks.append(values_table("Software and machine", report.versions))
    if not blocks:
        return unmeasured_section("versions", title, "no versions or hashes were stored with the run")
    return Section("versions", title, tuple(blocks))


def _reference_differences(report: IterationReport) -> Iterator[tuple[int, Estimate | None]]:
    if report.iteration == BASE_ITERATION:
        return
    yield BASE_ITERATION, report.versus_base
    if report.iteration - 1 != BASE_ITERATION:
        yield report.iteration - 1, report.versus_previous
