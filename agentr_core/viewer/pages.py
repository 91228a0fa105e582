"""The contents of each page: rows from the store as the values of a template."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final, NamedTuple
from xml.etree import ElementTree as ET

import yaml
from markupsafe import Markup

from agentr_core.errors import ConfigError
from agentr_core.evaluation.failures import failure_steps
from agentr_core.recipes.models import mask_secrets
from agentr_core.recipes.parsing import restore_recipe
from agentr_core.recipes.recipe import Recipe
from agentr_core.reports import document, wording
from agentr_core.reports.comparison import MEANS_NOTE, group_means_table
from agentr_core.reports.document import Figure
from agentr_core.runtime.live import read_progress, read_steps
from agentr_core.samples.rendering import RenderedToken
from agentr_core.stages.curves import fine_tuning_figures, group_rl_figures
from agentr_core.stages.means import means_over_seeds
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.database import Store
from agentr_core.store.queries.datasets import preference_head, rejection_counts, sample_head, training_curve
from agentr_core.store.queries.facts import load_facts
from agentr_core.store.queries.failures import closest_win, neighbour_failures
from agentr_core.store.queries.listings import (
    ancestry,
    evaluation_lines,
    event_lines,
    find_entities,
    find_first_observation,
    find_instance_id,
    iteration_lines,
    last_episodes,
    run_line,
    run_lines,
    stage_lines,
)
from agentr_core.store.queries.runs import configs_of_all, find_iteration_id, find_runs, run_config, run_versions
from agentr_core.store.queries.scorings import comparisons_by_scoring, episode_rescores
from agentr_core.store.queries.trees import (
    FamilyMember,
    PathStep,
    SampledTokens,
    StoredToolCall,
    TreeNode,
    VerdictLine,
    family_members,
    group_head,
    group_rollouts,
    group_steps,
    node_steps,
    oracle_verdicts,
    pair_head,
    pairs_of_tree,
    samples_of_pair,
    tool_calls,
    trajectory_head,
    trajectory_steps,
    tree_head,
    tree_nodes,
    validations,
    verdicts_of_pair,
)
from agentr_core.store.text_index import MAX_RANKED, Matches, TextLocation, load_texts, phrases
from agentr_core.texts import escape_invisible
from agentr_core.viewer import strip
from agentr_core.viewer.lists import list_page

# The result of a request: a page, or a redirection.


@dataclass(frozen=True, slots=True)
class Page:
    """A template with its values; `elsewhere` is the address to go to instead, if any."""

    template: str
    values: Mapping[str, Any]
    redirect_to: str | None = None


# A search tree as a drawing: numbers and short labels in, SVG out.

_ROW_HEIGHT: Final = 38
_COLUMN_WIDTH: Final = 188
_BEND: Final = 34
_MARGIN: Final = 30
_MAX_PORTRAIT_WIDTH: Final = 1000
"""A wider drawing is printed in landscape: on a portrait page its text would be too small."""
_MAX_LABEL_CHARS: Final = 20
"""Characters of an action that are shown; the page of its node shows all of it."""
_TONES: Final = ("passed", "", "bad", "good", "both")
MAX_NODES: Final = 1500
"""A drawing of more nodes is too long to look at and slow to show."""


def tree_drawing(
    nodes: Sequence[TreeNode],
    tree_id: str,
    good_nodes: Collection[int],
    bad_nodes: Collection[int],
    first_nodes: Sequence[Collection[int]] = (),
) -> str:
    """Return the SVG drawing of a tree with the root at the top left; each node links to its page.
    Children are ordered from the most visited one down, but nodes on given paths come first.

    Args:
        nodes: in the order of their numbers; not empty.
        good_nodes, bad_nodes: the numbers of nodes on good and bad paths of pairs, which are
            coloured.
        first_nodes: sets of node numbers; the nodes of an earlier set are placed before others.
    """
    paths = (*first_nodes, good_nodes, bad_nodes)

    def sort_key(node: TreeNode) -> tuple[int, int]:
        return next((number for number, path in enumerate(paths) if node.number in path), len(paths)), -node.visits

    children: dict[int, list[int]] = {}
    for node in sorted(nodes, key=sort_key):
        children.setdefault(node.parent, []).append(node.number)
    rows = _row_by_node(children)
    width = 2 * _MARGIN + _COLUMN_WIDTH * (max(node.depth for node in nodes) + 1)
    height = 2 * _MARGIN + _ROW_HEIGHT * max(rows.values())
    css_class = "tree wide" if width > max(_MAX_PORTRAIT_WIDTH, height) else "tree"
    svg = ET.Element("svg", {"class": css_class, "viewBox": f"0 0 {width} {height:g}", "role": "img"})
    svg.attrib.update({"width": str(width), "height": f"{height:g}", "aria-label": f"{len(nodes)} nodes"})
    positions = {
        node.number: (_MARGIN + _COLUMN_WIDTH * node.depth, _MARGIN + _ROW_HEIGHT * rows[node.number]) for node in nodes
    }
    # Edges that were not taken are drawn below those that were.
    for node in sorted(nodes[1:], key=lambda node: _TONES.index(_tone(node, good_nodes, bad_nodes))):
        (x1, y1), (x2, y2) = positions[node.parent], positions[node.number]
        bend = x2 - _BEND
        middle = (bend + x2) / 2
        # Straight along the label of the parent, which is written above and below the edge.
        curve = f"M{x1:g} {y1:g}H{bend:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"
        tone = _tone(node, good_nodes, bad_nodes)
        ET.SubElement(svg, "path", {"class": f"edge {tone}".strip(), "d": curve})
        if tone == "both":
            # As in the legend: green above red.
            ET.SubElement(svg, "path", {"class": "edge bad", "d": curve, "transform": "translate(0 2.2)"})
    max_visits = max(node.visits for node in nodes)
    for node in nodes:
        _draw_node(svg, node, tree_id, positions[node.number], max_visits, _tone(node, good_nodes, bad_nodes))
    return ET.tostring(svg, encoding="unicode")


def _row_by_node(children: dict[int, list[int]]) -> dict[int, int]:
    """Return the row of each node, by number; the root is in row 0.

    A node, its first child, that one's first child and so on share a row, the topmost that is free
    for all of them. So short branches are beside long ones, and no edges cross.
    """
    rows: dict[int, int] = {}
    free_row_by_column: dict[int, int] = {}
    stack = [(0, 0)]
    while stack:
        node, depth = stack.pop()
        chain = [node]
        while child_numbers := children.get(chain[-1]):
            chain.append(child_numbers[0])
        columns = range(depth, depth + len(chain))
        row = max(free_row_by_column.get(column, 0) for column in columns)
        free_row_by_column.update(dict.fromkeys(columns, row + 1))
        for column, node in zip(columns, chain, strict=True):
            rows[node] = row
            # The stack ends with the branches of the deepest node, so they are placed first.
            stack.extend((child, column + 1) for child in reversed(children.get(node, [])[1:]))
    return rows


def _tone(node: TreeNode, good_nodes: Collection[int], bad_nodes: Collection[int]) -> str:
    if node.number in good_nodes:
        return "both" if node.number in bad_nodes else "good"
    if node.number in bad_nodes:
        return "bad"
    return "" if node.visits else "passed"


def _draw_node(
    svg: ET.Element, node: TreeNode, tree_id: str, position: tuple[float, float], max_visits: int, tone: str
) -> None:
    x, y = position
    href = f"/node/{tree_id}/{node.number}"
    link = ET.SubElement(svg, "a", {"href": href, "class": f"node {tone}".strip()})
    radius = 3.5 + 7 * sqrt(node.visits / max_visits) if max_visits else 3.5
    shape = {"cx": f"{x:g}", "cy": f"{y:g}", "r": f"{radius:.1f}"}
    ET.SubElement(link, "circle", {"class": "ground", **shape})
    # The better the value, the fuller the circle.
    shape["fill-opacity"] = f"{0.12 + 0.88 * min(max(node.value or 0.0, 0.0), 1.0):.2f}"
    ET.SubElement(link, "circle", shape)
    if node.success or node.disaster:
        ring = {"class": "ring win" if node.success else "ring lost", "cx": f"{x:g}", "cy": f"{y:g}"}
        ET.SubElement(link, "circle", {**ring, "r": f"{radius + 3:.1f}"})
    action = escape_invisible(" ".join((node.action or ("start" if node.parent < 0 else "no action")).split()))
    short_action = action if len(action) <= _MAX_LABEL_CHARS else action[: _MAX_LABEL_CHARS - 1] + "…"
    _draw_text(link, x + radius + 5, y - 5, short_action, "action")
    label_parts = [f"{node.visits} {wording.TIMES}", wording.NOTHING if node.value is None else f"{node.value:.2f}"]
    if not node.duplicates:
        label_parts.append("the expert's")
    elif node.duplicates > 1:
        label_parts.append(f"{node.duplicates} alike")
    if not node.valid:
        label_parts.append("invalid")
    label_parts.extend(wording.label(label_part) for label_part in (node.verdict, node.stop) if label_part)
    _draw_text(link, x + radius + 5, y + 13, " ".join(label_parts), "numbers")
    ET.SubElement(link, "title").text = f"node {node.number}: {action[:300]}\n{escape_invisible(node.text)}".rstrip()


def _draw_text(parent: ET.Element, x: float, y: float, text: str, kind: str) -> None:
    ET.SubElement(parent, "text", {"class": kind, "x": f"{x:g}", "y": f"{y:g}"}).text = text


# The page of a search: the texts that match, with their places.

PAGE_ROWS: Final = 20
MAX_SEARCH_CHARS: Final = 300
"""The maximum length of a search."""
_CONTEXT_CHARS: Final = 160
"""Characters that are shown before and after the first word that was found."""


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A text that was found: an extract in pieces, each with a flag for a search word."""

    pieces: list[tuple[str, bool]]
    places: list[tuple[str, str]]
    """The name and the address of each place."""


def search_page(store: Store, words: str, matches: Matches, *, page: int, complete: bool) -> Page:
    """Return the page of a search; `complete` says whether the index has all texts of the store."""
    texts = load_texts(store, matches.texts)
    has_more = (page + 1) * PAGE_ROWS < matches.total
    values = {
        "words": words,
        "hits": [
            SearchHit(extract(texts[match.digest], phrases(words)), list(map(_place_link, match.locations)))
            for match in matches.texts
            if match.digest in texts
        ],
        "total": matches.total,
        "many": matches.total >= MAX_RANKED,
        "first": page * PAGE_ROWS + 1,
        "complete": complete,
        "previous": document.with_query("/search", {"q": words, "page": page - 1}) if page else None,
        "following": document.with_query("/search", {"q": words, "page": page + 1}) if has_more else None,
    }
    return Page("search", values)


def extract(text: str, words: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the text around the first search word, in pieces, each with a flag for a search word;
    the beginning of the text if no search word occurs in it literally.
    """
    pattern = re.compile("|".join(re.escape(word) for word in words), re.IGNORECASE)
    first_match = pattern.search(text) if words else None
    middle = first_match.start() if first_match else 0
    start, end = max(0, middle - _CONTEXT_CHARS), min(len(text), middle + 2 * _CONTEXT_CHARS)
    excerpt = ("… " if start else "") + text[start:end] + (" …" if end < len(text) else "")
    pieces: list[tuple[str, bool]] = []
    end_of_piece = 0
    for match in pattern.finditer(excerpt) if words else ():
        pieces += [(excerpt[end_of_piece : match.start()], False), (match[0], True)]
        end_of_piece = match.end()
    return [piece for piece in [*pieces, (excerpt[end_of_piece:], False)] if piece[0]]


def _place_link(place: TextLocation) -> tuple[str, str]:
    if place.kind == "node":
        return f"node {place.key[:8]}#{place.position}", f"/node/{place.key}/{place.position}"
    position_text = (
        "" if place.position is None else f", {'message' if place.kind == 'sample' else 'step'} {place.position}"
    )
    anchor = "" if place.position is None else f"#{place.position}"
    return f"{place.kind} {place.key[:8]}{position_text}", f"{document.page_path(place.kind, place.key)}{anchor}"


# The pages of search trees, their nodes, and the pairs that were taken from them.


def tree(store: Store, tree_id: str) -> Page | None:
    """Return the page of a search tree, with a drawing if it has at most `MAX_NODES` nodes."""
    head = tree_head(store, tree_id)
    if head is None:
        return None
    nodes = tree_nodes(store, tree_id)
    pairs = pairs_of_tree(store, tree_id)
    good = _with_ancestors(nodes, (leaf for _, leaf, _ in pairs))
    bad = _with_ancestors(nodes, (leaf for _, _, leaf in pairs))
    first_pair_nodes = [_with_ancestors(nodes, [leaf]) for _, *leaves in pairs[:1] for leaf in leaves]
    drawable = 0 < len(nodes) <= MAX_NODES
    drawing = Markup(tree_drawing(nodes, tree_id, good, bad, first_pair_nodes)) if drawable else None
    values = {
        "head": head,
        "nodes": nodes,
        "most_nodes": MAX_NODES,
        "pairs": pairs,
        # The only markup of a page that does not come from its template: made by `tree_drawing`,
        # which escapes texts.
        "drawing": drawing,
        "ancestry": ancestry(store, tree_id, "tree"),
    }
    return Page("tree", values)


def node(store: Store, tree_id: str, index: int) -> Page | None:
    """Return the page of a node: the path to it, step by step, and its siblings."""
    head = tree_head(store, tree_id)
    nodes = {node.number: node for node in tree_nodes(store, tree_id)} if head else {}
    if head is None or index not in nodes:
        return None
    steps = node_steps(store, tree_id, _with_ancestors(nodes.values(), [index]))
    position_by_node = {step.node: step.position for step in steps}
    tree_calls = [call for call in tool_calls(store, "node", tree_id) if call.position in position_by_node]
    calls = [call._replace(position=position_by_node[call.position]) for call in tree_calls]
    values = {
        "head": head,
        "node": nodes[index],
        "steps": steps,
        "siblings": _siblings(nodes.values(), steps),
        "children": [node for node in nodes.values() if node.parent == index],
        "calls": calls_by_position(calls),
        "ancestry": ancestry(store, f"{tree_id}#{index}", "node"),
    }
    return Page("node", values)


def pair(store: Store, pair_id: str) -> Page | None:
    """Return the page of a pair: its good and its bad path side by side."""
    head = pair_head(store, pair_id)
    if head is None:
        return None
    nodes = tree_nodes(store, head.tree_id)
    good_numbers, bad_numbers = _with_ancestors(nodes, [head.good_leaf]), _with_ancestors(nodes, [head.bad_leaf])
    steps = node_steps(store, head.tree_id, good_numbers | bad_numbers)
    good = [step for step in steps if step.node in good_numbers]
    bad = [step for step in steps if step.node in bad_numbers]
    samples = samples_of_pair(store, pair_id)
    oracle = oracle_verdicts(store, head.tree_id)
    siblings = _siblings(nodes, steps)
    verdicts = {verdict.position: verdict for verdict in verdicts_of_pair(store, pair_id)}

    def mean_value(siblings: Sequence[TreeNode]) -> float | None:
        visits = sum(sibling.visits for sibling in siblings)
        return sum(sibling.visits * (sibling.value or 0.0) for sibling in siblings) / visits if visits else None

    step_verdicts = [
        StepVerdicts(step, verdicts.get(step.position), mean_value(siblings[step.node]), oracle.get(step.node))
        for step in bad
        # Only steps from the first one on that the judge saw, so that all three can be compared.
        if step.node is not None and step.position >= min(verdicts, default=0)
    ]
    max_drop = max((line.drop for line in step_verdicts if line.drop is not None), default=0.0)
    values = {
        "head": head,
        "witnesses": step_verdicts,
        "tree_error": next((line.step.position for line in step_verdicts if line.drop == max_drop > 0), None),
        "oracle_error": next((line.step.position for line in step_verdicts if line.oracle == "bad"), None),
        "knows": bool(oracle),
        "siblings": siblings,
        "shared": bad[: head.shared_steps],
        "good": good[head.shared_steps :],
        "bad": bad[head.shared_steps :],
        "verdicts": verdicts,
        "samples": samples,
        "splices": load_samples(store, [sample.sample_id for sample in samples[:1]]),
        "ancestry": ancestry(store, pair_id, "pair"),
    }
    return Page("pair", values)


class StepVerdicts(NamedTuple):
    """What the judge, the tree and the oracle say about a step of a bad path, None if nothing."""

    step: PathStep
    judge: VerdictLine | None
    siblings: float | None
    """The mean value of its siblings, weighted by their visits; None if none was visited."""
    oracle: str | None

    @property
    def drop(self) -> float | None:
        """The siblings' mean value minus the step's, to 9 decimals, as equal means may differ in
        their last digits; may be None.
        """
        return None if self.siblings is None or self.step.value is None else round(self.siblings - self.step.value, 9)


def _siblings(nodes: Collection[TreeNode], steps: Sequence[PathStep]) -> dict[int, list[TreeNode]]:
    """Return the siblings of the node of each step, by the node's number."""
    children: dict[int, list[TreeNode]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node)
    parents = {node.number: node.parent for node in nodes}
    numbers = [step.node for step in steps if step.node is not None]
    return {number: [node for node in children[parents[number]] if node.number != number] for number in numbers}


def calls_by_position(calls: Sequence[StoredToolCall]) -> dict[int, list[StoredToolCall]]:
    """Return tool calls, grouped by the position of the step that made them."""
    by_position: dict[int, list[StoredToolCall]] = {}
    for call in sorted(calls, key=lambda call: call.position):
        by_position.setdefault(call.position, []).append(call)
    return by_position


def _with_ancestors(nodes: Collection[TreeNode], leaves: Iterable[int]) -> set[int]:
    """Return the numbers of the leaves and of all their ancestors."""
    parents = {node.number: node.parent for node in nodes}
    numbers: set[int] = set()
    for leaf in leaves:
        while leaf in parents and leaf not in numbers:
            numbers.add(leaf)
            leaf = parents[leaf]
    return numbers


def runs(store: Store | None) -> Page:
    """Return the page that lists the runs of a workspace; None: it has no store yet."""
    lines = run_lines(store) if store else []
    moves = "/" if not lines or any(line.at_work for line in lines) else None
    return Page("runs", {"runs": lines, "moves": moves, "state": "", "every": 5})


def means(store: Store) -> Page:
    """Return the page of the means over seeds of all runs of a workspace that were evaluated."""
    recipes: dict[str, Recipe] = {}
    errors: list[str] = []
    for run_id, config in configs_of_all(store).items():
        try:
            recipes[run_id] = restore_recipe(json.loads(config), source=f"recipe of run {run_id}")
        except ConfigError as error:
            errors.append(str(error))
    averages = means_over_seeds(store, recipes)
    groups = {mean.group: mean.runs for mean in sorted(averages, key=lambda mean: len(mean.runs))}
    return Page("means", {"groups": groups, "table": group_means_table(averages), "note": MEANS_NOTE, "unread": errors})


def scorings(store: Store, run_id: str = "") -> Page:
    """Return the page of the scorings of stored episodes, of one run or of all."""
    return Page("scorings", {"scorings": comparisons_by_scoring(store, run_id), "run_id": run_id})


# The parts of the pages of a run and its stages that change while the run is at work.

_NUM_LAST_EPISODES: Final = 10


def live_page(store: Store, run_id: str, iteration: int | None = None, stage: str = "") -> Page | None:
    """Return the part of a run's page, or with `iteration` and `stage` of a stage's page, that
    changes while the run is at work: progress, learning curves, times of the stages, and the last
    episodes. None if the run is not stored.
    """
    head = run_line(store, run_id)
    if head is None:
        return None
    progress = read_progress(store.path.parent, run_id) if head.at_work else None
    work = None
    if progress is not None and (iteration is None or (progress.iteration, progress.stage) == (iteration, stage)):
        age_s = max(0.0, time.time() - progress.told)
        seconds_left = [s if s is None else max(0.0, s - age_s) for s in (progress.stage_left, progress.run_left)]
        work = {"progress": progress, "elapsed": progress.told + age_s - progress.began, "left": seconds_left}
    stages = stage_lines(store, run_id)
    own_stages = [line for line in stages if (line.iteration, line.stage) == (iteration, stage)]
    current_iteration = iteration if iteration is not None else progress.iteration if progress else None
    if own_stages and not work and not any(line.train for line in own_stages):
        # The stage itself trained nothing, so the curves of its iteration do not belong here.
        current_iteration = None
    path = document.page_path("run", run_id) if iteration is None else document.stage_path(run_id, iteration, stage)
    values = {
        "run": head,
        "work": work,
        "waits": head.at_work and not work and not own_stages,
        "learning": {}
        if current_iteration is None
        else {current_iteration: learning_curves(store, run_id, current_iteration)},
        "stages": stages,
        "own": own_stages,
        "episodes": last_episodes(store, run_id, iteration=iteration, limit=_NUM_LAST_EPISODES),
        "moves": f"/moving{path}" if head.at_work else None,
        "state": f"{head.status} {progress.iteration} {progress.stage}" if progress else head.status,
        "every": 2,
    }
    return Page("moving", values)


def learning_curves(store: Store, run_id: str, iteration: int) -> list[Figure]:
    """Return an iteration's learning curves; during fine-tuning, up to its last reported step."""
    iteration_id = find_iteration_id(store, run_id, iteration)
    if iteration_id is None:
        return []
    if steps := group_steps(store, iteration_id):
        group_size = json.loads(run_config(store, run_id) or "{}").get("grpo", {}).get("num_generations", "n")
        return group_rl_figures(steps, validations(store, iteration_id), group_size)
    return fine_tuning_figures(training_curve(store, iteration_id) or read_steps(store.path.parent, run_id, iteration))


def stage(store: Store, run_id: str, iteration: int, name: str) -> Page | None:
    """Return the page of a stage: progress, time, events, rejections. None if it is not known."""
    page = live_page(store, run_id, iteration, name)
    iteration_id = find_iteration_id(store, run_id, iteration)
    if page is None or iteration_id is None:
        return None
    events = event_lines(store, run_id, iteration_id=iteration_id, stage=name)
    if not (page.values["own"] or events or page.values["work"]):
        return None
    rejections = rejection_counts(store, iteration_id).get(name, {})
    own_values = {"iteration": iteration, "stage": name, "events": events, "rejections": rejections}
    return Page("stage", {**page.values, **own_values})


class SettingDifference(NamedTuple):
    """A field in which two runs differ, as text."""

    name: str
    here: str
    there: str


def setting_differences(value: Any, other_value: Any, name: str = "") -> list[SettingDifference]:
    """Return the fields in which two JSON-like values differ, each with its dotted path."""
    if isinstance(value, dict) and isinstance(other_value, dict):
        keys = [*value, *(key for key in other_value if key not in value)]
        return [
            setting
            for key in keys
            for setting in setting_differences(
                value.get(key, _ABSENT), other_value.get(key, _ABSENT), f"{name}.{key}".removeprefix(".")
            )
        ]
    if value == other_value:
        return []
    texts = [
        "not there" if v is _ABSENT else v if v and isinstance(v, str) else json.dumps(v) for v in (value, other_value)
    ]
    return [SettingDifference(name, *texts)]


_ABSENT: Final = object()


def run(store: Store, run_id: str, against: str = "") -> Page | None:
    """Return the page of a run, or None if it is not stored, as the other functions here do.

    Args:
        against: the id of the run with which its settings are compared; if empty or unknown, that
            is another run of the same recipe that started before it, if there is one.
    """
    page = live_page(store, run_id)
    if page is None:
        return None
    head = page.values["run"]
    others = [line for line in run_lines(store) if line.run_id != run_id]
    earlier = [line for line in others if line.recipe == head.recipe and line.started_at <= head.started_at]
    candidates = [against, *(line.run_id for line in earlier)]
    against = next((key for key in candidates if key in {line.run_id for line in others}), "")
    config = mask_secrets(json.loads(run_config(store, run_id) or "{}"))
    versions = run_versions(store, run_id)
    settings: list[SettingDifference] = []
    if against:
        settings = setting_differences(config, mask_secrets(json.loads(run_config(store, against) or "{}")))
        settings += setting_differences({"versions": versions}, {"versions": run_versions(store, against)})
    iterations, curves = iteration_lines(store, run_id), page.values["learning"]
    # Each evaluation is compared with the earliest one on the same set.
    evaluations = []
    first_by_set: dict[tuple[str, str], str] = {}
    for line in evaluation_lines(store, run_id):
        base = first_by_set.setdefault((line.name, line.split), line.evaluation_id)
        evaluations.append((line, base if base != line.evaluation_id else None))
    values = {
        **page.values,
        "scorings": comparisons_by_scoring(store, run_id),
        "config": yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=110),
        "versions": versions,
        "others": others,
        "against": against,
        "settings": settings,
        "iterations": iterations,
        "evaluations": evaluations,
        "events": event_lines(store, run_id),
        # The curves of the iteration at work are drawn already.
        "learning": {
            number: curves[number] if number in curves else learning_curves(store, run_id, number)
            for number in (line.iteration for line in iterations)
        },
        "steps": {line.iteration: group_steps(store, line.iteration_id) for line in iterations if line.groups},
        "rejections": {
            line.iteration: rejection_counts(store, line.iteration_id) for line in iterations if line.rejections
        },
    }
    return Page("run", values)


def listing(store: Store, name: str, query: Mapping[str, str]) -> Page:
    """Return a page of a long list."""
    return Page("list", {"list": list_page(store, name, query)})


def trajectory(store: Store, trajectory_id: str) -> Page | None:
    """Return the page of a trajectory: the steps that went wrong, its actions next to those of a
    successful episode of the same instance, and all its steps.
    """
    head = trajectory_head(store, trajectory_id)
    if head is None:
        return None
    steps = trajectory_steps(store, trajectory_id)
    winner = None if head.success else closest_win(store, head)
    parting_step = strip.parting_position([step.action for step in steps], winner.actions) if winner else None
    folds = strip.folds(steps, parting_step)
    values = {
        "head": head,
        "facts": load_facts(store, head.instance_id),
        "rescored": episode_rescores(store, trajectory_id),
        "steps": steps,
        "strip": folds,
        "wrong": [] if head.success else failure_steps(steps, head.stop),
        "win": winner,
        "parting": parting_step,
        "beside": strip.folds(trajectory_steps(store, winner.trajectory_id), parting_step) if winner else [],
        "failures": neighbour_failures(store, trajectory_id),
        "same": strip.first_same_observation(head.first_observation, steps),
        "calls": calls_by_position(tool_calls(store, "step", trajectory_id)),
        "ancestry": ancestry(store, trajectory_id, "trajectory"),
    }
    return Page("trajectory", values)


def family_page(store: Store, trajectory_id: str) -> Page | None:
    """Return the page of a trajectory's family: which was derived from which, by what operator."""
    members = family_members(store, trajectory_id)
    if not members:
        return None
    ids = {member.child_id for member in members}
    children: dict[str | None, list[FamilyMember]] = {}
    for member in members:
        children.setdefault(member.parent_id if member.parent_id in ids else None, []).append(member)
    # Depth first: each is listed below the one that it was derived from, or below each of these.
    lines: list[tuple[int, FamilyMember]] = []
    stack = [(0, member) for member in reversed(children.get(None, []))]
    while stack:
        depth, member = stack.pop()
        lines.append((depth, member))
        stack.extend((depth + 1, child) for child in reversed(children.get(member.child_id, [])))
    return Page("family", {"trajectory_id": trajectory_id, "lines": lines})


def sample(store: Store, sample_id: str) -> Page | None:
    """Return the page of a sample: its messages, with the trained ones marked."""
    head = sample_head(store, sample_id)
    if head is None:
        return None
    values = {
        "head": head,
        "opening": head.instance_id and find_first_observation(store, head.instance_id),
        "messages": load_samples(store, [sample_id])[sample_id].messages,
        "ancestry": ancestry(store, sample_id, "sample"),
    }
    return Page("sample", values)


class TokenTurn(NamedTuple):
    """Consecutive tokens of one writer and the end of turn after them, each with its position."""

    name: str
    tokens: list[tuple[int, RenderedToken]]
    trained: int


def token_turns(tokens: Sequence[RenderedToken]) -> list[TokenTurn]:
    """Return the tokens of a conversation as turns, one for each change of writer; an end of turn
    belongs to the turn that it ends.
    """
    turns: list[tuple[str, list[tuple[int, RenderedToken]]]] = []
    for position, token in enumerate(tokens):
        if not turns or token.writer not in (turns[-1][0], "end of turn"):
            turns.append((token.writer, []))
        turns[-1][1].append((position, token))
    return [TokenTurn(name, turn, sum(token.train for _, token in turn)) for name, turn in turns]


class ReplyRange(NamedTuple):
    """The tokens from `start` to before `end` of a conversation, which are the reply of a step."""

    conversation: int
    start: int
    end: int
    sampled: SampledTokens


def locate_replies(
    conversations: Sequence[Sequence[RenderedToken]], replies: Sequence[SampledTokens]
) -> dict[int, ReplyRange]:
    """Return, by the position of the step, where the sampled tokens of each reply of a trajectory
    are in its conversations: up to the first reply whose token ids are not found there, and without
    those whose ids were not stored.
    """
    queue = [reply for reply in replies if reply.token_ids]
    range_by_step: dict[int, ReplyRange] = {}
    for number, tokens in enumerate(conversations):
        ids = [token.token for token in tokens]
        position = 0
        while queue:
            reply_ids = queue[0].token_ids
            ends = (start + len(reply_ids) for start in range(position, len(ids)) if tokens[start].train)
            position = next((end for end in ends if ids[end - len(reply_ids) : end] == reply_ids), 0)
            if not position:
                break
            step = queue.pop(0)
            range_by_step[step.position] = ReplyRange(number, position - len(reply_ids), position, step)
    return range_by_step


def token_text(text: str) -> str:
    """Return the text of a token with visible signs for white space and invisible characters."""
    return escape_invisible(text.replace("\n", "\u23ce").replace("\t", "\u21e5")).replace(" ", "\u00b7")


def preference(store: Store, preference_id: str) -> Page | None:
    """Return the page of a preference: its two samples side by side."""
    head = preference_head(store, preference_id)
    if head is None:
        return None
    samples = load_samples(store, [head.chosen_sample_id, head.rejected_sample_id])
    chosen, rejected = (samples[key].messages for key in (head.chosen_sample_id, head.rejected_sample_id))
    num_shared = next(
        (i for i, (better, worse) in enumerate(zip(chosen, rejected, strict=False)) if better != worse),
        min(len(chosen), len(rejected)),
    )
    values = {
        "head": head,
        "opening": head.instance_id and find_first_observation(store, head.instance_id),
        "shared": chosen[:num_shared],
        "chosen": chosen[num_shared:],
        "rejected": rejected[num_shared:],
        "ancestry": ancestry(store, preference_id, "preference"),
    }
    return Page("preference", values)


def group(store: Store, iteration_id: str, step: int, number: int) -> Page | None:
    """Return the page of a group of group RL: its episodes with their advantages."""
    head = group_head(store, iteration_id, step, number)
    if head is None:
        return None
    rollouts = group_rollouts(store, iteration_id, step, number)
    max_advantage = max((abs(rollout.advantage) for rollout in rollouts), default=0.0) or 1.0
    return Page("group", {"head": head, "rollouts": rollouts, "most": max_advantage})


def find(store: Store, words: str) -> Page:
    """Return a redirection to the page of the only entity whose id begins with `words`, to the
    trajectories of instances whose id does, or else to the search for these words.
    """
    words = words.strip()
    address = document.with_query("/search", {"q": words})
    if re.fullmatch(r"[0-9a-f]{4,64}(#\d+)?", words):
        matches = [("run", key) for key in find_runs(store, words)]
        matches += [(entity.kind, entity.key) for entity in find_entities(store, words, limit=3)]
        if len(matches) == 1:
            address = document.page_path(*matches[0])
    if "/" in words and find_instance_id(store, words) is not None:
        address = document.list_path("trajectories", instance=words)
    return Page("", {}, redirect_to=address)


def origin_page_maker(kind: str) -> MakeDetailPage:
    """Return the function that makes the page of a checkpoint, a dataset or an evaluation, which
    shows only what it was made from.
    """

    def origin_page(store: Store, key: str) -> Page | None:
        lines = ancestry(store, key, kind)
        return Page("origin", {"kind": kind, "key": key, "ancestry": lines}) if lines else None

    return origin_page


MakeDetailPage = Callable[[Store, str], Page | None]
DETAIL_PAGES: Mapping[str, MakeDetailPage] = {
    "trajectory": trajectory,
    "family": family_page,
    "tree": tree,
    "pair": pair,
    "sample": sample,
    "preference": preference,
    "checkpoint": origin_page_maker("checkpoint"),
    "dataset": origin_page_maker("dataset"),
    "evaluation": origin_page_maker("evaluation"),
}
"""For each kind of entity, the function that returns its page by id, None if there is none."""
