"""Agent-R's part of a report, read from the store."""

from __future__ import annotations

from collections.abc import Mapping

from agentr_core.methods.agent_r import report_sections
from agentr_core.methods.agent_r.oracle import agreement
from agentr_core.methods.agent_r.report_audit import audit, audit_of_run
from agentr_core.methods.agent_r.report_examples import examples
from agentr_core.methods.agent_r.report_records import JudgeRecord, SpliceSurvival
from agentr_core.reports.document import Section
from agentr_core.reports.records import FunnelStage
from agentr_core.runtime.place import Workplace
from agentr_core.stages.report_funnels import expert_episodes, rejected_by, to_rows
from agentr_core.store.queries import funnels, judging, usage
from agentr_core.store.queries.iterations import iteration_state

_DIED = ("verify-", "no-try-", "no-gain", "ended-at-revision-turn")
"""How the reasons begin for which a splice that was played is turned away."""


def tree_funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return the counts of each stage from trees to trained rows; empty while there are none."""
    source, own = place.source_id(iteration), place.iteration_id(iteration)
    made = funnels.tree_counts(place.store, source)
    if made is None or iteration_state(place.store, own) is None:
        return ()
    lost = rejected_by(place, source, "splice")
    died = {reason: count for reason, count in lost.items() if reason.startswith("verify-")}
    unspliced = {reason: count for reason, count in lost.items() if reason not in died}
    stages = [
        FunnelStage(name="trees", count=made.trees),
        *([FunnelStage(name="after the expert's steps", count=made.led)] if made.led else []),
        FunnelStage(name="ended paths", count=made.paths),
        FunnelStage(name="candidate pairs", count=made.pairs, rejected=rejected_by(place, source, "pairs")),
        FunnelStage(name="judged", count=made.critiques),
        FunnelStage(name="spliced", count=made.spliced, rejected=unspliced),
        FunnelStage(name="verified", count=made.verified, rejected=died),
    ]
    if place.recipe.splice.mode != "verified":
        stages.pop()
    if place.recipe.data.use == "both+expert":
        stages.append(expert_episodes(place, iteration))
    return to_rows(place, iteration, stages)


def revision_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the sections on splices and on the judge; none without a search."""
    if not _searches(place, iteration):
        return ()
    judged = judge_record(place, iteration)
    # Read after the judge's record, which asks the oracle for missing verdicts.
    source = place.source_id(iteration)
    return (
        report_sections.survival(survival_record(place, iteration)),
        report_sections.judge(judged),
        audit(judging.path_audits(place.store, source), judging.judged_steps(place.store, source)),
    )


def run_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section on the judge over all iterations up to one; none if no path was judged."""
    found = {
        number: judging.path_audits(place.store, place.source_id(number))
        for number in range(1, iteration + 1)
        if _searches(place, number)
    }
    judged = {number: paths for number, paths in found.items() if paths}
    return (audit_of_run(judged),) if judged else ()


def sample_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section with some revisions that were trained on; none without a search."""
    if not _searches(place, iteration):
        return ()
    return (report_sections.revision_samples(examples(place, iteration, count=5)),)


def survival_record(place: Workplace, iteration: int) -> SpliceSurvival | None:
    """Return what became of the splices that were played; None in a splice mode that plays none."""
    if place.recipe.splice.mode not in ("verified", "continued"):
        return None
    source = place.source_id(iteration)
    turned_away = funnels.rejection_counts(place.store, source).get("splice", {})
    return survival_of(funnels.count_revised_pairs(place.store, source), turned_away)


def survival_of(survived: int, turned_away: Mapping[str, int]) -> SpliceSurvival:
    """Return what became of the splices that were played, of which some survived, given all splices
    turned away by reason: those that could not be played do not count.
    """
    died = {reason: count for reason, count in turned_away.items() if reason.startswith(_DIED)}
    return SpliceSurvival(tried=survived + sum(died.values()), survived=survived, died=died)


def judge_record(place: Workplace, iteration: int) -> JudgeRecord | None:
    """Return the record of an iteration's judge; None if it gave no verdict."""
    source = place.source_id(iteration)
    verdicts = judging.verdict_counts(place.store, source)
    if not verdicts:
        return None
    errors = judging.first_errors(place.store, source)
    replies, unreadable = usage.unreadable_replies(place.store, source).get("judge", (0, 0))
    return JudgeRecord(
        verdicts=verdicts,
        paths=len(errors),
        replies=replies,
        unreadable=unreadable,
        model=place.recipe.models.judge.label if place.recipe.models.judge else "",
        no_error=errors.count(None),
        revision_lengths=judging.revision_lengths(place.store, source),
        oracle=agreement(place, iteration),
    )


def _searches(place: Workplace, iteration: int) -> bool:
    return place.recipe.data.use != "expert" and not place.plan(iteration).phase
