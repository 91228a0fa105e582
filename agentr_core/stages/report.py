"""The report of an iteration, filled from the store alone: it can be written anew at any time."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import yaml

from agentr_core.methods.agent_r.oracle import agreement
from agentr_core.methods.agent_r.report_examples import examples
from agentr_core.methods.eto.report_preferences import preference_record
from agentr_core.recipes import Recipe, shown
from agentr_core.recipes.evaluation import REVISION, TEST
from agentr_core.reports.records import (
    CutCount,
    ErrorRecord,
    FaultCount,
    IterationReport,
    JudgeRecord,
    LengthCount,
    NamedText,
    SpliceSurvival,
    StopCount,
    Tally,
    TimeSpent,
    TokenCounts,
)
from agentr_core.runtime.place import Workplace
from agentr_core.stages.evaluate import evaluation_id
from agentr_core.stages.report_costs import ASKED, bills
from agentr_core.stages.report_funnels import rejections
from agentr_core.stages.report_scores import difference, scores

INTERVALS = (
    "success by Wilson's score, reward by bootstrap; differences are paired by instance, and clustered where several "
    "instances are one under different names"
)


def build_report(place: Workplace, iteration: int) -> IterationReport:
    """Return the report of an iteration; parts that were not measured are left out."""
    recipe = place.recipe
    return IterationReport(
        recipe_name=recipe.name,
        run_id=place.run_id,
        iteration=iteration,
        date=finished_at(place, iteration),
        environment=recipe.environment.name,
        model=recipe.model.label,
        roles=roles(recipe),
        scores=scores(place, iteration),
        versus_base=difference(place, iteration, 0),
        versus_previous=difference(place, iteration, iteration - 1) if iteration > 1 else None,
        interval_method=INTERVALS,
        funnel=place.method.funnel(place, iteration),
        survival=_survival(place, iteration),
        judge=_judge(place, iteration),
        preferences=preference_record(place, iteration),
        time=_time(place, iteration),
        tokens=_tokens(place, iteration),
        errors=_errors(place, iteration),
        examples=examples(place, iteration, count=5),
        revises=place.method.revises(recipe),
        recipe_yaml=yaml.safe_dump(shown(recipe), sort_keys=False),
        versions=_versions(place),
        hashes=_hashes(place, iteration),
    )


def roles(recipe: Recipe) -> tuple[NamedText, ...]:
    """Return the models that take a role from the acting one, by role."""
    return tuple(NamedText(name=r, text=model.label) for r, model in recipe.own_models().items() if r != "actor")


def finished_at(place: Workplace, iteration: int) -> str:
    """Return when an iteration ended, or the present time while it goes on, to the minute."""
    row = place.one("select finished_at from iteration where iteration_id = ?", place.iteration_id(iteration))
    return (row[0] if row and row[0] else datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")


def _survival(place: Workplace, iteration: int) -> SpliceSurvival | None:
    if place.recipe.splice.mode not in ("verified", "continued"):
        return None
    turned_away = rejections(place, place.source_id(iteration)).get("splice", [])
    died = [item for item in turned_away if item[0].startswith(("verify-", "no-try-"))]
    row = place.one(
        "select count(distinct pair_id) from sample where iteration_id = ? and kind = 'revision'",
        place.source_id(iteration),
    )
    survived = row[0] if row else 0
    return SpliceSurvival(
        tried=survived + sum(count for _, count in died),
        survived=survived,
        died=tuple(Tally(name=reason, count=count) for reason, count in died),
    )


def _judge(place: Workplace, iteration: int) -> JudgeRecord | None:
    # Pairs that share a bad path share its verdicts: each judged node counts once.
    verdicts = place.all(
        "select verdict, count(distinct (p.tree_id, v.node_index)) from verdict v join pair p using (pair_id) "
        "where p.iteration_id = ? group by verdict order by verdict",
        place.source_id(iteration),
    )
    if not verdicts:
        return None
    paths = place.all(
        "select c.first_error from critique c join pair p using (pair_id) where p.iteration_id = ?",
        place.source_id(iteration),
    )
    # An error within the shared steps leaves nothing of the bad path's own before it.
    lengths = place.all(
        "select greatest(0, c.first_error - p.shared_steps + 1) as length, count(*) "
        "from critique c join pair p using (pair_id) "
        "where p.iteration_id = $1 and c.first_error is not null and p.pair_id in "
        "(select pair_id from sample where iteration_id = $1 and kind = 'revision') group by length order by length",
        place.source_id(iteration),
    )
    return JudgeRecord(
        verdicts=tuple(Tally(name=name, count=count) for name, count in verdicts),
        paths=len(paths),
        model=place.recipe.models.judge.label if place.recipe.models.judge else "",
        no_error=sum(first is None for (first,) in paths),
        revision_lengths=tuple(LengthCount(steps=steps, count=count) for steps, count in lengths),
        oracle=agreement(place, iteration),
    )


def _time(place: Workplace, iteration: int) -> tuple[TimeSpent, ...]:
    rows = dict(
        place.all(
            "select part, sum(seconds) from timing where iteration_id = ? group by part", place.iteration_id(iteration)
        )
    )
    order = ("generate", "environment", "train", "store", "other")
    return tuple(TimeSpent(activity=part, seconds=rows[part]) for part in order if part in rows)


def _tokens(place: Workplace, iteration: int) -> TokenCounts | None:
    row = place.one(
        f"select coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0) from generation where {ASKED}",
        place.iteration_id(iteration),
    )
    counts = place.one(
        "select counts from dataset where iteration_id = ? order by created_at desc", place.iteration_id(iteration)
    )
    trained = json.loads(counts[0])["trained_tokens"] if counts else {}
    if row is None:
        return None
    return TokenCounts(
        prompt=int(row[0]),
        completion=int(row[1]),
        trained=tuple(Tally(name=name, count=count) for name, count in sorted(trained.items())),
        cut=_cut(place, iteration),
        bills=bills(place, iteration),
    )


def _cut(place: Workplace, iteration: int) -> tuple[CutCount, ...]:
    """Replies that their token limit cut; those of which it is not known are left out."""
    rows = place.all(
        "with told as ("
        "select case g.kind when 'judgement' then 'judged' else 'collected' end as purpose, g.finish_reason "
        "from generation g join tree t on t.tree_id = g.owner_id "
        "where t.iteration_id = $1 and g.kind in ('node', 'judgement') "
        "union all select case t.source when 'episode' then 'evaluated' else 'collected' end, g.finish_reason "
        "from generation g join trajectory t on t.trajectory_id = g.owner_id "
        "where t.iteration_id = $1 and g.kind = 'step' and t.source in ('episode', 'rollout')) "
        "select purpose, count(*), count(*) filter (finish_reason = 'length') from told "
        "where finish_reason is not null group by purpose order by purpose",
        place.iteration_id(iteration),
    )
    return tuple(CutCount(purpose=purpose, replies=replies, cut=cut) for purpose, replies, cut in rows)


def _errors(place: Workplace, iteration: int) -> ErrorRecord:
    iteration_id = place.iteration_id(iteration)
    collected = dict(
        place.all(
            "select stop, count(*) from ("
            "select n.stop from node n join tree t using (tree_id) where t.iteration_id = $1 and n.stop is not null "
            "union all select stop from trajectory where iteration_id = $1 and source = 'rollout') group by stop",
            iteration_id,
        )
    )
    evaluated = dict(
        place.all(
            "select t.stop, count(*) from episode e join trajectory t using (trajectory_id) "
            "where e.evaluation_id in (select unnest(?)) group by t.stop",
            [evaluation_id(place, iteration, name) for name in (TEST, REVISION, *place.recipe.evaluation.sets)],
        )
    )
    faults = place.all(
        "select \"class\", phase, count(*), count(*) filter (level = 'error') from event where iteration_id = ? "
        "group by all order by all",
        iteration_id,
    )
    return ErrorRecord(
        refused=_refused(place, iteration_id),
        stops=tuple(
            StopCount(reason=reason, collected=collected.get(reason, 0), evaluated=evaluated.get(reason, 0))
            for reason in sorted(collected.keys() | evaluated.keys())
        ),
        faults=tuple(FaultCount(error=name, phase=phase, count=n, lost=lost) for name, phase, n, lost in faults),
    )


def _refused(place: Workplace, iteration_id: str) -> tuple[Tally, ...]:
    """Refused actions of collected steps by the first three words of what the environment said."""
    rows = place.all(
        "with refused as ("
        "select n.observation_id from node n join tree t using (tree_id) where t.iteration_id = $1 and not n.valid "
        "union all select s.observation_id from step s join trajectory t using (trajectory_id) "
        "where t.iteration_id = $1 and t.source = 'rollout' and not s.valid) "
        "select array_to_string(string_split_regex(trim(o.text), '\\s+')[1:3], ' ') as opening, count(*) "
        "from refused r join text o on o.text_id = r.observation_id "
        "group by opening order by count(*) desc, opening limit 8",
        iteration_id,
    )
    return tuple(Tally(name=opening, count=count) for opening, count in rows)


def _versions(place: Workplace) -> tuple[NamedText, ...]:
    row = place.one("select versions from run where run_id = ?", place.run_id)
    return tuple(NamedText(name=name, text=text) for name, text in json.loads(row[0]).items()) if row else ()


def _hashes(place: Workplace, iteration: int) -> tuple[NamedText, ...]:
    row = place.one(
        "select c.checkpoint_id, c.parent_id, d.hash, c.weights_sha256 from iteration i "
        "join checkpoint c on c.checkpoint_id = i.checkpoint_out join dataset d using (dataset_id) "
        "where i.iteration_id = ?",
        place.iteration_id(iteration),
    )
    names = ("checkpoint", "parent", "dataset", "weights")
    return tuple(NamedText(name=name, text=str(text)) for name, text in zip(names, row, strict=True)) if row else ()
