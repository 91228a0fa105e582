"""The output of `agentr headroom`: scores by difficulty, what an iteration would make, and which
methods learn from it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from agentr_core.evaluation.metrics import Estimate
from agentr_core.reports import wording
from agentr_core.reports.document import Column, Row, Table
from agentr_core.reports.model_card import table_text
from agentr_core.stages.evaluate import Measures, measures_by_depth, pass_at_ks
from agentr_core.stages.headroom import GREEDY_SUFFIX, TEST, TRAIN, HeadroomReport

_SETS = {TRAIN: "training", TEST: "held-out"}
_HOW = """\
These are forecasts, not counts. Each instance has a Beta distribution of pass rates, fitted over all that were
tried and updated by its own episodes; a dive of a tree is taken for an episode that ends in search.width paths.
Intervals are for which instances were tried.
"""
_BY_THE_ORACLE = """\
Right: the world's oracle says the same. Bad: how many steps called bad are, and how many bad steps are called so.
First error: the same step of an episode is the first bad one, or none is.
"""


def render(headroom: HeadroomReport, form: str) -> str:
    """Return the report as text for a terminal or as JSON; `form` is `table` or `json`."""
    if form == "json":
        return json.dumps(_plain(headroom), indent=2) + "\n"
    judges = [_judges(headroom)] if headroom.judges else []
    return "\n".join([_scores(headroom), _contrast(headroom), _forecasts(headroom), *judges, _verdicts(headroom)])


def _scores(headroom: HeadroomReport) -> str:
    ks = _shown_ks(headroom)
    columns = (
        Column("Instances", "text"),
        Column("Depth"),
        Column("Number"),
        Column("Greedy %"),
        *(Column(f"pass@{k} %") for k in ks),
    )
    rows = []
    for name, title in _SETS.items():
        sampling_measures, greedy = headroom.measures[name], headroom.measures[name + GREEDY_SUFFIX]
        of_greedy = dict(measures_by_depth(greedy))
        classes = [
            (str(depth), of_greedy.get(depth, {}), part)
            for depth, part in measures_by_depth(sampling_measures)
            if "pass@1" in part
        ]
        for label, once, often in [("all", greedy, sampling_measures), *classes]:
            cells = [_share(once.get("success")), *(_share(often.get(f"pass@{k}")) for k in ks)]
            number = often.get("pass@1")
            rows.append(Row((title, label, wording.count(number.n if number else 0), *cells)))
    return f"Success, with 95% intervals\n{table_text(Table(columns, tuple(rows)))}"


def _contrast(headroom: HeadroomReport) -> str:
    columns = (
        Column("Instances", "text"),
        Column("Number"),
        Column("Always won %"),
        Column("Mixed %"),
        Column("Never won %"),
    )
    rows = []
    for name, title in _SETS.items():
        kinds = [_of_kind(headroom.measures[name], kind) for kind in ("always", "mixed", "never")]
        rows.append(Row((title, wording.count(kinds[0].n if kinds[0] else 0), *map(_share, kinds))))
    return f"Instances by what their {headroom.episodes} episodes show\n{table_text(Table(columns, tuple(rows)))}"


def _forecasts(headroom: HeadroomReport) -> str:
    columns = (Column("Method", "text"), Column("Would make", "text"), Column("Number"), Column("95% interval"))
    rows = [
        Row(
            (
                prospect.method,
                forecast.name.replace("_", " "),
                f"{forecast.expected.mean:.0f}",
                _range(forecast.expected),
            )
        )
        for prospect in headroom.prospects
        for forecast in prospect.forecasts
    ]
    head = f"What an iteration on {wording.count(headroom.instances)} training instances would make"
    return f"{head}\n{table_text(Table(columns, tuple(rows)))}{_HOW}"


def _judges(headroom: HeadroomReport) -> str:
    """Return a table of how many verdicts of each judge could be read and, if the world has an
    oracle, how well they agree with it.
    """
    shares = {
        "Read %": "read",
        "Right %": "right",
        "Bad: right %": "bad_is_right",
        "Bad: seen %": "bad_is_seen",
        "First error %": "first_error",
    }
    fields = {title: name for title, name in shares.items() if any(getattr(judge, name).n for judge in headroom.judges)}
    columns = (Column("Judge", "text"), Column("Votes"), *map(Column, fields))
    rows = [
        Row((judge.name, wording.count(judge.votes), *(_shown(name, getattr(judge, name)) for name in fields.values())))
        for judge in headroom.judges
    ]
    first = headroom.judges[0]
    head = f"Who can judge: {wording.count(first.steps)} steps of {wording.count(first.episodes)} lost episodes"
    if first.bad.n:
        head += f", {wording.percent(first.bad.mean)}% of them bad"
    note = _BY_THE_ORACLE if "Right %" in fields else "This world has no oracle to compare them with.\n"
    return f"{head}\n{table_text(Table(columns, tuple(rows)))}{note}"


def _shown(name: str, estimate: Estimate) -> str:
    if not estimate.n:
        return wording.NOTHING
    return _share(estimate) if name == "right" else wording.percent(estimate.mean)


def _verdicts(headroom: HeadroomReport) -> str:
    lines = [
        f"{prospect.method:<8}  {'yes' if prospect.learns else 'no'}: {prospect.reason}"
        for prospect in headroom.prospects
    ]
    return "\n".join(["Who can learn from it", *lines, _gap(headroom)]) + "\n"


def _gap(headroom: HeadroomReport) -> str:
    """Return a line on what sampling finds beyond what the greedy policy does already."""
    sampling_measures, greedy = headroom.measures[TRAIN], headroom.measures[TRAIN + GREEDY_SUFFIX]
    most = _shown_ks(headroom)[-1]
    number = wording.count(sampling_measures["pass@1"].n)
    best, now = sampling_measures[f"pass@{most}"].mean, greedy["success"].mean if greedy else math.nan
    comparison = (
        f"pass@{most} is {wording.percent(best)}% and greedy {wording.percent(now)}% on {number} training instances"
    )
    if best > now:
        return f"{comparison}: {wording.points(best - now)} points are within reach of sampling"
    return f"{comparison}: no headroom, sampling finds nothing that the model does not do already"


def _shown_ks(headroom: HeadroomReport) -> list[int]:
    """Return those of k = 1, 8, 64 that were measured, and the largest k."""
    all_ks = pass_at_ks(headroom.measures[TRAIN])
    return [k for k in all_ks if k in (1, 8, 64) or k == all_ks[-1]]


def _of_kind(measures: Measures, kind: str) -> Estimate | None:
    return next((estimate for name, estimate in measures.items() if name.startswith(f"{kind}@")), None)


def _share(estimate: Estimate | None) -> str:
    if estimate is None:
        return wording.NOTHING
    if math.isnan(estimate.low):
        return wording.percent(estimate.mean)
    low, high = wording.percent(estimate.low), wording.percent(estimate.high)
    return f"{wording.percent(estimate.mean)} ({low}{wording.DASH}{high})"


def _range(estimate: Estimate) -> str:
    return wording.NOTHING if math.isnan(estimate.low) else f"{estimate.low:.0f}{wording.DASH}{estimate.high:.0f}"


def _plain(headroom: HeadroomReport) -> dict[str, Any]:
    def estimates(measures: Measures) -> Iterator[tuple[str, Any]]:
        yield from ((name, _numbers(estimate)) for name, estimate in measures.items())

    return {
        "instances": headroom.instances,
        "episodes": headroom.episodes,
        "measures": {name: dict(estimates(measures)) for name, measures in headroom.measures.items()},
        "prospects": [
            {
                "method": prospect.method,
                "learns": prospect.learns,
                "reason": prospect.reason,
                "forecasts": {forecast.name: _numbers(forecast.expected) for forecast in prospect.forecasts},
            }
            for prospect in headroom.prospects
        ],
        "judges": [
            {
                field.name: _numbers(value) if isinstance(value := getattr(judge, field.name), Estimate) else value
                for field in dataclasses.fields(judge)
            }
            for judge in headroom.judges
        ],
    }


def _numbers(estimate: Estimate) -> dict[str, float | int | None]:
    low, high = (None if math.isnan(end) else end for end in (estimate.low, estimate.high))
    return {"value": estimate.mean, "low": low, "high": high, "n": estimate.n}
