"""The page of an iteration, as sections and tables made from an `IterationReport`. A part that was
not measured says so in one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from agentr_core.reports import plots, wording
from agentr_core.reports.document import (
    BASE,
    Bar,
    Bill,
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
    Paragraph,
    Part,
    PromotedModel,
    Row,
    RowTone,
    Section,
    SetScore,
    Stack,
    Table,
    TokenCounts,
    UnfinishedEvaluation,
    Whisker,
    not_measured,
)

# Tables that compare the models of a run: records in, plain tables out.


def unfinished_rows(columns: Sequence[Column], pending: Sequence[UnfinishedEvaluation]) -> tuple[Row, ...]:
    """Return a row for each evaluation that is not finished, in a table of scores."""

    def row(evaluation: UnfinishedEvaluation) -> Row:
        cells = {
            "Model": wording.iteration(evaluation.iteration),
            "Set": wording.label(evaluation.name),
            "Success %": "not finished",
            "Episodes": _progress(evaluation),
        }
        return Row(tuple(None if column.drawn else cells.get(column.title, wording.NOTHING) for column in columns))

    return tuple(map(row, pending))


def unfinished(pending: Sequence[UnfinishedEvaluation]) -> list[str]:
    """Return a sentence for each model whose evaluation is not finished: how many episodes of each
    set have ended, and what continues it.
    """
    by_iteration: dict[int, list[str]] = {}
    for evaluation in pending:
        parts = by_iteration.setdefault(evaluation.iteration, [])
        parts.append(f"{_progress(evaluation)} episodes of {wording.label(evaluation.name)}")
    return [
        f"{wording.iteration(number)}: the evaluation is not finished: {', '.join(parts)}; "
        "the command that began the run goes on with it."
        for number, parts in by_iteration.items()
    ]


def _progress(evaluation: UnfinishedEvaluation) -> str:
    suffix = "" if evaluation.planned is None else f" of {wording.count(evaluation.planned)}"
    return f"{wording.count(evaluation.episodes)}{suffix}"


def scores(all_scores: Sequence[IterationScore], current: int, pending: Sequence[UnfinishedEvaluation] = ()) -> Table:
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
                wording.model(score),
                wording.percent(score.success.value),
                wording.interval(score.success),
                _whisker(score.success),
                wording.percent(score.reward.value),
                wording.decimal(score.steps_to_success, 1),
                wording.count(score.success.n),
            ),
            _tone(score, current),
        )
        for score in all_scores
    )
    iterations = {score.iteration for score in all_scores}
    first = {item.iteration: item for item in reversed(pending) if item.iteration not in iterations}
    return Table(columns, (*rows, *unfinished_rows(columns, sorted(first.values(), key=lambda item: item.iteration))))


def lost(all_scores: Sequence[IterationScore]) -> list[str]:
    """Return a sentence for each model with lost episodes: how many, and how they count."""
    ways = {"out": "left out of the means", "zero": "counted as failures with reward 0"}
    return [
        f"{wording.model(score)}: episodes that failed for good, {ways[score.lost_as]}: {wording.count(score.lost)}."
        for score in all_scores
        if score.lost
    ]


def promoted(promotion: PromotedModel) -> str:
    """Return a sentence about the model with which the run goes on."""
    name, success = wording.iteration(promotion.iteration), wording.percent(promotion.success)
    return f"Promoted: {name}, with {success}% success on the development set {promotion.development} the best so far."


def by_depth(all_scores: Sequence[IterationScore]) -> Table:
    """Return success for each difficulty class (rows) and model (columns)."""
    depths = sorted({depth.depth for score in all_scores for depth in score.by_depth})
    successes = {(score.iteration, depth.depth): depth.success for score in all_scores for depth in score.by_depth}
    columns = (
        Column("Depth", "text"),
        Column("Episodes"),
        *(Column(wording.model(score), "meter") for score in all_scores),
    )
    rows = []
    for depth in depths:
        estimates = [successes.get((score.iteration, depth)) for score in all_scores]
        episodes = sorted({estimate.n for estimate in estimates if estimate})
        rows.append(
            Row(
                (
                    str(depth),
                    wording.TO.join(map(wording.count, episodes[:1] + episodes[1:][-1:])),
                    *map(_meter, estimates),
                )
            )
        )
    return Table(columns, tuple(rows))


def sets(all_scores: Sequence[IterationScore], current: int, pending: Sequence[UnfinishedEvaluation] = ()) -> Table:
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
                wording.model(score),
                name,
                wording.percent(set_score.success.value),
                wording.interval(set_score.success),
                _whisker(set_score.success),
                gain(set_score.versus_base),
                wording.count(set_score.instances),
                wording.count(set_score.success.n),
            ),
            _tone(score, current),
        )
        for name in played_once(all_scores)
        for score in all_scores
        if (set_score := score.of_set(name))
    ]
    names = set_names(all_scores)
    return Table(columns, (*rows, *unfinished_rows(columns, [item for item in pending if item.name in names])))


def world_tables(all_scores: Sequence[IterationScore], current: int) -> Table:
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
        _world_row(score, current, name, world_score)
        for name in dict.fromkeys(world.name for score in all_scores for world in score.worlds)
        for score in all_scores
        if (world_score := score.of_set(name))
    ]
    for score in all_scores:
        if score.worlds:
            # Each world counts the same, however many episodes it has.
            cells = (
                "mean of worlds",
                wording.model(score),
                wording.percent(_mean([world.success for world in score.worlds])),
                wording.percent(_mean([world.reward for world in score.worlds])),
                wording.NOTHING,
                wording.percent(_mean([world.revision for world in score.worlds])),
                wording.percent(_mean([world.revision_reward for world in score.worlds])),
                wording.NOTHING,
            )
            rows.append(Row(cells, _tone(score, current)))
    rows += [_world_row(score, current, "all episodes", score) for score in all_scores if score.worlds]
    return Table(columns, tuple(rows))


def _world_row(score: IterationScore, current: int, name: str, result: SetScore | IterationScore) -> Row:
    return Row(
        (
            name,
            wording.model(score),
            _estimate_cell(result.success),
            _estimate_cell(result.reward),
            gain(result.versus_base),
            _estimate_cell(result.revision),
            _estimate_cell(result.revision_reward),
            wording.count(result.success.n),
        ),
        _tone(score, current),
    )


def _mean(estimates: Sequence[Estimate | None]) -> float | None:
    """Return the mean of estimates; None where one of them is missing."""
    values = [estimate.value for estimate in estimates if estimate]
    return fmean(values) if values and len(values) == len(estimates) else None


def _estimate_cell(estimate: Estimate | None) -> Cell:
    """Return a share with its interval in one cell: with two, the table would be too wide."""
    return wording.estimate_text(estimate) if estimate else wording.NOTHING


def set_by_depth(all_scores: Sequence[IterationScore], name: str, current: int) -> Table:
    """Return success on one set for each difficulty class (rows) and model (columns), and the gain
    of the current model over the base.
    """
    score_pairs = [(score, set_score) for score in all_scores if (set_score := score.of_set(name))]
    cells = {(score.iteration, part.depth): part for score, set_score in score_pairs for part in set_score.by_depth}
    columns = (
        Column("Depth", "text"),
        Column("Episodes"),
        *(Column(wording.model(score), "meter") for score, _ in score_pairs),
        *([Column(f"{wording.iteration(current).capitalize()} against base")] if current != BASE else []),
    )
    rows = []
    for depth in sorted({depth for _, depth in cells}):
        parts = [cells.get((score.iteration, depth)) for score, _ in score_pairs]
        current_part = cells.get((current, depth))
        rows.append(
            Row(
                (
                    str(depth),
                    wording.count(max(part.success.n for part in parts if part)),
                    *(_meter(part.success if part else None) for part in parts),
                    *([gain(current_part.versus_base if current_part else None)] if current != BASE else []),
                )
            )
        )
    return Table(columns, tuple(rows))


def pass_at(all_scores: Sequence[IterationScore]) -> Table:
    """Return pass@k, the chance that at least one of k sampled episodes of an instance succeeds,
    for each k: over all instances and by difficulty.
    """
    score_pairs = [(score, set_score) for score in all_scores for set_score in score.sets if set_score.pass_at]
    depths = sorted({part.depth for _, set_score in score_pairs for at in set_score.pass_at for part in at.by_depth})
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
    for score, set_score in score_pairs:
        for at in set_score.pass_at:
            by_depth = {part.depth: part.success for part in at.by_depth}
            rows.append(
                Row(
                    (
                        wording.model(score),
                        set_score.name,
                        f"pass@{at.k}",
                        wording.percent(at.success.value),
                        wording.interval(at.success),
                        *(wording.percent(by_depth[d].value) if d in by_depth else wording.NOTHING for d in depths),
                        wording.count(at.success.n),
                    )
                )
            )
    return Table(columns, tuple(rows))


def set_names(all_scores: Sequence[IterationScore]) -> tuple[str, ...]:
    """Return the names of the held-out sets that some model played, in their order."""
    return tuple(dict.fromkeys(set_score.name for score in all_scores for set_score in score.sets))


def played_once(all_scores: Sequence[IterationScore]) -> tuple[str, ...]:
    """Return the names of the sets without pass@k: those with one episode per instance."""
    sampled_names = {set_score.name for score in all_scores for set_score in score.sets if set_score.pass_at}
    return tuple(name for name in set_names(all_scores) if name not in sampled_names)


def gain(estimate: Estimate | None) -> Cell:
    """Return a difference in points with its interval; a dash for None."""
    if estimate is None:
        return wording.NOTHING
    return EstimateText(wording.points(estimate.value), wording.points_interval(estimate))


def revision(all_scores: Sequence[IterationScore], current: int) -> Table:
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
                wording.model(score),
                wording.percent(score.revision.value),
                wording.interval(score.revision),
                _whisker(score.revision),
                wording.percent(score.revision_reward.value if score.revision_reward else None),
                wording.interval(score.revision_reward),
                wording.count(score.revision.n),
            ),
            _tone(score, current),
        )
        for score in all_scores
        if score.revision
    )
    return Table(columns, tuple(rows))


def loops(all_scores: Sequence[IterationScore], current: int) -> Table:
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
            cells = (wording.model(score), *map(wording.decimal, means), wording.percent(score.looping))
            rows.append(Row(cells, _tone(score, current)))
    return Table(columns, tuple(rows))


def _tone(score: IterationScore, current: int) -> RowTone:
    return "strong" if score.iteration == current else ""


def _whisker(estimate: Estimate) -> Whisker:
    return Whisker(estimate.low, estimate.value, estimate.high)


def _meter(estimate: Estimate | None) -> Cell:
    if estimate is None:
        return wording.NOTHING
    return Meter(wording.percent(estimate.value), wording.interval(estimate), estimate.value)


# Tables about data construction, judge, cost and errors: records in, plain tables out.


def funnel(stages: Sequence[FunnelStage]) -> Table:
    """Return the stages of data construction: a row with the count of each and, below it, rows with
    the number of items that it rejected for each reason.
    """
    most = max(stage.count for stage in stages)
    rows = []
    before: int | None = None
    for stage in stages:
        ratio = wording.NOTHING
        if before:
            more = stage.count > before
            ratio = f"{wording.TIMES}{stage.count / before:.1f}" if more else f"{100 * stage.count / before:.1f}%"
        cells: tuple[Cell, ...] = (wording.label(stage.name), wording.count(stage.count), ratio)
        rows.append(Row((*cells, Bar(wording.share(stage.count, most) or 0.0)), "strong"))
        rows += [
            Row((wording.label(reason), f"{wording.MINUS}{wording.count(count)}", "", None), "minor")
            for reason, count in by_count(stage.rejected).items()
        ]
        before = stage.count
    return Table((Column("Stage", "text"), Column("Count"), Column("Of stage before"), Column("", "bar")), tuple(rows))


def time(times: Mapping[str, float]) -> Table:
    """Return time and share of each activity, and their total."""
    total = sum(times.values())
    rows = [
        Row((wording.label(name), wording.duration(seconds), wording.percent(wording.share(seconds, total))))
        for name, seconds in times.items()
    ]
    rows.append(Row(("total", wording.duration(total), wording.percent(1.0)), "strong"))
    return Table((Column("Activity", "text"), Column("Time"), Column("Share %")), tuple(rows))


def tokens(counts: TokenCounts) -> Table:
    """Return the tokens read, written and trained, the last by class: of one pass over the dataset,
    followed by the total of training if that took another number of passes.
    """
    pass_total = sum(counts.trained.values())
    single_pass = counts.all_trained == pass_total
    rows = [
        Row(("prompt", wording.count(counts.prompt), ""), "strong"),
        Row(("completion", wording.count(counts.completion), ""), "strong"),
        Row(
            (
                "trained (with loss)" if single_pass else "with loss, in one pass",
                wording.count(pass_total),
                wording.percent(1.0) if pass_total else wording.NOTHING,
            ),
            "strong",
        ),
    ]
    rows += [
        Row((wording.label(name), wording.count(count), wording.percent(wording.share(count, pass_total))), "minor")
        for name, count in counts.trained.items()
    ]
    if not single_pass:
        rows.append(Row(("trained (with loss)", wording.count(counts.all_trained), ""), "strong"))
    return Table((Column("Tokens", "text"), Column("Count"), Column("Of trained %")), tuple(rows))


def cut_replies(numbers: Mapping[str, tuple[int, int]], whole: str, part: str) -> Table:
    """Return how many replies were cut, by purpose or role; `whole` and `part` are headings."""
    rows = (
        Row(
            (
                wording.label(name),
                wording.count(replies),
                wording.count(num_cut),
                wording.percent(wording.share(num_cut, replies)),
            )
        )
        for name, (replies, num_cut) in numbers.items()
    )
    return Table((Column(whole, "text"), Column("Count"), Column(part), Column("%")), tuple(rows))


def bills(items: Sequence[Bill]) -> Table:
    """Return what served models read, wrote and cost, by role."""
    columns = (Column("Served model", "text"), Column("", "code"), Column("Requests"), Column("Prompt tokens"))
    rows = (
        Row(
            (
                wording.label(bill.role),
                bill.model,
                wording.count(bill.requests),
                wording.count(bill.prompt),
                wording.count(bill.completion),
                wording.decimal(bill.cost, 4),
            )
        )
        for bill in items
    )
    return Table((*columns, Column("Completion tokens"), Column("Cost")), tuple(rows))


def stops(record: ErrorRecord) -> Table:
    """Return why tree paths and held-out episodes ended."""
    num_paths = sum(stop.collected for stop in record.stops)
    num_episodes = sum(stop.evaluated for stop in record.stops)
    rows = (
        Row(
            (
                wording.label(stop.reason),
                wording.count(stop.collected),
                wording.percent(wording.share(stop.collected, num_paths)),
                wording.count(stop.evaluated),
                wording.percent(wording.share(stop.evaluated, num_episodes)),
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


def faults(record: ErrorRecord) -> Table:
    """Return exceptions by class and phase, with the number of episodes lost to each."""
    columns = (Column("Exception", "code"), Column("Phase", "text"), Column("Count"), Column("Lost episodes"))
    rows = (
        Row((item.error, wording.label(item.phase), wording.count(item.count), wording.count(item.lost)))
        for item in record.faults
    )
    return Table(columns, tuple(rows))


def counts(title: str, unit: str, numbers: Counts, whole: int | None = None) -> Table:
    """Return counts with their shares of `whole`, by default their sum, as numbers and bars."""
    total = sum(numbers.values()) if whole is None else whole
    rows = (
        Row(
            (
                wording.label(name),
                wording.count(count),
                wording.percent(wording.share(count, total)),
                Bar(wording.share(count, total) or 0.0),
            )
        )
        for name, count in numbers.items()
    )
    return Table((Column(title, "text"), Column(unit), Column("%"), Column("", "bar")), tuple(rows))


def named(title: str, values: Mapping[str, str]) -> Table:
    """Return names with their values as code."""
    return Table((Column(title, "text"), Column("", "code")), tuple(map(Row, values.items())))


def by_count(numbers: Counts) -> dict[str, int]:
    """Return counts, the largest first."""
    return dict(sorted(numbers.items(), key=lambda item: (-item[1], item[0])))


def worlds(data: Mapping[str, Counts]) -> Table:
    """Return how many items were made in each world and in all, without kinds that have none."""
    kinds = dict.fromkeys(kind for products in data.values() for kind, count in products.items() if count)
    rows = [*data.items(), ("all", {kind: sum(products.get(kind, 0) for products in data.values()) for kind in kinds})]
    return Table(
        (Column("World", "text"), *(Column(wording.label(kind)) for kind in kinds)),
        tuple(Row((name, *(wording.count(products.get(kind, 0)) for kind in kinds))) for name, products in rows),
    )


def sections(report: IterationReport) -> tuple[Section, ...]:
    """Return the sections of a report in order, with those of its method (`data`, `samples`)."""
    note = "What of the training data each world gave; general data belongs to none."
    return (
        _headline(report),
        *report.alarms,
        _scores(report),
        *_held_out(report),
        _revision(report),
        *report.failures,
        _loops(report),
        _funnel(report),
        *([Section("data-worlds", "Training data by world", (worlds(report.worlds),), note)] if report.worlds else []),
        *report.data,
        _time(report),
        _tokens(report),
        _errors(report),
        *report.samples,
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
    for reference, difference in _comparisons(report):
        against = wording.iteration(reference)
        if difference:
            deltas.append(Delta(wording.points(difference.value), wording.points_interval(difference), against))
            if difference.low <= 0 <= difference.high:
                readings.append(f"No clear difference from {against}: the interval contains zero.")
            else:
                side = "Above" if difference.low > 0 else "Below"
                readings.append(f"{side} {against}: the 95% interval of the difference excludes zero.")
        elif earlier := report.score(reference):
            deltas.append(Delta(wording.points(estimate.value - earlier.success.value), "", against))
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
        pending = [item for item in report.unfinished if item.iteration == report.iteration]
        if pending:
            return Section("headline", title, tuple(map(Paragraph, unfinished(pending))))
        return not_measured("headline", title, "this iteration has not been evaluated on held-out instances")
    blocks: list[Block] = [summary]
    if len(report.scores) > 1:
        drawing = plots.success(report.scores, report.iteration)
        blocks.append(Figure(drawing, "Success in percent with 95% intervals; the dashed line is the base model."))
    return Section("headline", "Held-out success", tuple(blocks))


def _scores(report: IterationReport) -> Section:
    title = "Score by iteration"
    if not (report.scores or report.unfinished):
        return not_measured("scores", title, "no model of this run has been evaluated")
    note = "Success is the flag that the environment sets itself; reward is the mean final score."
    if report.interval_method:
        note += f" Intervals: {report.interval_method}."
    table = scores(report.scores, report.iteration, report.unfinished)
    sentences = [
        *([promoted(report.promoted)] if report.promoted else []),
        *unfinished(report.unfinished),
        *lost(report.scores),
    ]
    return Section("scores", title, (table, *map(Paragraph, sentences)), note)


def _held_out(report: IterationReport) -> Iterator[Section]:
    """Yield the scores by world and by set; with one of each, success by difficulty alone."""
    scores, names = report.scores, played_once(report.scores)
    worlds = tuple(dict.fromkeys(world.name for score in scores for world in score.worlds))
    if worlds:
        note = (
            "One model in each of its worlds, with 95% intervals. Differences to the base model are in points of "
            "success, on the same episodes. In the mean of worlds each world counts the same."
        )
        yield Section("worlds", "Score by world", (world_tables(scores, report.iteration),), note)
        deep = tuple(_by_depth(report, worlds, "World"))
        if deep:
            note = "Percent of held-out episodes solved in each difficulty class, with 95% intervals."
            yield Section("depth-worlds", "Success by depth in each world", deep, note)
    if any(score.sets for score in scores):
        note = "Differences to the base model are in points, with 95% intervals, on the same episodes."
        table = sets(scores, report.iteration, report.unfinished)
        yield Section("sets", "Held-out sets", (table,), note)
        deep = tuple(_by_depth(report, names, "Set"))
        if deep:
            note = "Percent of episodes solved in each difficulty class, with 95% intervals."
            yield Section("depth", "Success by depth", deep, note)
        if names != set_names(scores):
            note = (
                "pass@k is the chance that at least one of k sampled episodes of an instance succeeds. How far it lies "
                "above pass@1 is what a method that learns from its own samples can gain."
            )
            yield Section("headroom", "Headroom: what sampling reaches", (pass_at(scores),), note)
    elif not worlds:
        if any(score.by_depth for score in scores):
            note = "Percent of held-out episodes solved in each difficulty class, with 95% intervals."
            yield Section("depth", "Success by depth", (by_depth(scores),), note)
        else:
            why = "the environment names no difficulty classes, or no model has been evaluated"
            yield not_measured("depth", "Success by depth", why)


def _by_depth(report: IterationReport, names: tuple[str, ...], title: str) -> Iterator[Block]:
    for name in names:
        set_scores = [of_set for score in report.scores if (of_set := score.of_set(name))]
        if any(score.by_depth for score in set_scores):
            yield Paragraph(f"{title} {name}")
            yield set_by_depth(report.scores, name, report.iteration)


def _revision(report: IterationReport) -> Section:
    title = "Revision test"
    if not any(score.revision for score in report.scores):
        return not_measured(
            "revision",
            title,
            "the recipe has it switched off, the base model failed on no instance, or it is not finished",
        )
    note = (
        "Failed episodes of the base model are cut at a random step and replayed; the model goes on from there. The "
        "prefixes are chosen once, are the same for every model, and nothing tells it that they fail."
    )
    return Section("revision", title, (revision(report.scores, report.iteration),), note)


def _loops(report: IterationReport) -> Section:
    title = "Loops"
    if not any(score.loops for score in report.scores):
        return not_measured("loops", title, "no held-out episodes to count repetitions in")
    note = (
        "Mean number of positions in an episode at which L actions repeat the L actions right before. "
        "An episode loops when a sequence comes at least three times in a row."
    )
    return Section("loops", title, (loops(report.scores, report.iteration),), note)


def _funnel(report: IterationReport) -> Section:
    title = report.funnel_title
    if not report.funnel:
        return not_measured("funnel", title, "this iteration built no training data")
    note = "What came out of each stage; indented, what the stage turned away and why."
    return Section("funnel", title, (funnel(report.funnel),), note)


def _time(report: IterationReport) -> Section:
    title = "Where time went"
    total = sum(report.time.values())
    if total <= 0:
        return not_measured("time", title, "no timings were recorded")
    parts = tuple(Part(wording.label(name), seconds / total) for name, seconds in report.time.items())
    note = "Waits for the environment count while no reply is generated. Times of several workers are summed."
    return Section("time", title, (Stack(parts), time(report.time)), note)


def _tokens(report: IterationReport) -> Section:
    title = "Tokens"
    if report.tokens is None:
        return not_measured("tokens", title, "the backend of the model counted no tokens")
    blocks: list[Block] = [tokens(report.tokens)]
    if report.tokens.cut:
        blocks.append(cut_replies(report.tokens.cut, "Replies", "Cut by the limit"))
    else:
        blocks.append(
            Paragraph("Not measured: replies that their token limit cut; none was drawn, or no backend told.")
        )
    if any(count for _, count in report.tokens.unreadable.values()):
        blocks.append(cut_replies(report.tokens.unreadable, "Replies of", "Cut within a thought"))
    if report.tokens.bills:
        blocks.append(bills(report.tokens.bills))
    return Section("tokens", title, tuple(blocks))


def _errors(report: IterationReport) -> Section:
    title = "Errors and stop reasons"
    if (record := report.errors) is None:
        return not_measured("errors", title, "no events were recorded")
    blocks: list[Block] = []
    if record.refused:
        blocks.append(counts("Refused action, by the environment's first words", "Steps", record.refused))
    else:
        blocks.append(Paragraph("No collected action was refused, or the environment does not tell."))
    blocks.append(stops(record) if record.stops else Paragraph("Not measured: why episodes stopped."))
    blocks.append(faults(record) if record.faults else Paragraph("No exception was met."))
    return Section("errors", title, tuple(blocks))


def _recipe(report: IterationReport) -> Section:
    if not report.recipe_yaml:
        return not_measured("recipe", "Recipe", "the resolved recipe was not stored with the run")
    listing = Listing(f"{report.recipe_name}, with every default filled in", "yaml", report.recipe_yaml)
    return Section("recipe", "Recipe", (listing,))


def _versions(report: IterationReport) -> Section:
    title = "Versions and hashes"
    blocks: list[Block] = []
    if report.hashes:
        blocks.append(named("Artefact", report.hashes))
    if report.versions:
        blocks.append(named("Software and machine", report.versions))
    if not blocks:
        return not_measured("versions", title, "no versions or hashes were stored with the run")
    return Section("versions", title, tuple(blocks))


def _comparisons(report: IterationReport) -> Iterator[tuple[int, Estimate | None]]:
    if report.iteration == BASE:
        return
    yield BASE, report.versus_base
    if report.iteration - 1 != BASE:
        yield report.iteration - 1, report.versus_previous
