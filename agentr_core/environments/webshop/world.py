"""WebShop in this process: buying what an instruction asks for in a shop of text pages.

Source: WebShop (arXiv 2207.01206), its text mode as served by AgentGym (arXiv 2406.04151); pages,
actions and rewards are theirs. The search engine is another one, and price bounds follow from a
seed; see `goals` for both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from jinja2.utils import htmlsafe_json_dumps

from agentr_core import replies
from agentr_core.environment import Environment
from agentr_core.environments.webshop.goals import (
    LISTED_SPLITS,
    Catalogue,
    CatalogueFiles,
    Goal,
    GoalKind,
    NounFinder,
    SplitRule,
    find_files,
    goals_file,
    listed_goals,
    make_goals,
    num_options_met,
    open_catalogue,
    product_price,
    purchase_reward,
    spacy_nouns,
    split_goals,
    word_nouns,
)
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.replies import LabelStyle
from agentr_core.system import data_path
from agentr_core.types import Instance, Transition

# The pages of the shop as pure functions: where an action leads, and the text of that page.
#
# Source: WebShop (arXiv 2207.01206), section 3.1; page texts are those of its public text mode, as
# AgentGym serves it.

Page = Literal["start", "results", "item", "description", "features", "reviews", "end"]

SEPARATOR = " [SEP] "
RESULTS_PER_PAGE = 10
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
_SUBPAGE_BY_BUTTON: dict[str, Page] = {"description": "description", "features": "features", "reviews": "reviews"}
ACTION = re.compile(r"(.+)\[(.+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The page that the shopper is on, and all that the shop remembers.

    `page_number` is the page of results, from 1; `row` is the product that is looked at, and
    `chosen_options` has its chosen options as names with values.
    """

    page: Page = "start"
    query: str = ""
    page_number: int = 1
    row: int = -1
    chosen_options: tuple[tuple[str, str], ...] = ()


def buttons(catalogue: Catalogue, visit: Visit) -> tuple[str, ...]:
    """Return the texts that can be clicked on the present page, in lower case."""
    back, previous = BACK.lower(), PREVIOUS.lower()
    if visit.page in ("start", "end"):
        return ()
    if visit.page == "results":
        asins = (catalogue.product(row).asin.lower() for row in _page_rows(catalogue, visit))
        return (back, *([previous] if visit.page_number > 1 else []), NEXT.lower(), *asins)
    if visit.page == "item":
        values = (value for values in catalogue.product(visit.row).options.values() for value in values)
        # The public shop refuses clicks on anything named "search", even an option.
        return (back, previous, *_SUBPAGE_BY_BUTTON, BUY.lower(), *(value for value in values if value != "search"))
    return (back, previous)


def visit_after(catalogue: Catalogue, visit: Visit, action: str) -> Visit | None:
    """Return the visit after an action, or None if it cannot be done on this page. A search is
    possible on any page but the last.
    """
    match = ACTION.match(action)
    if match is None or visit.page == "end":
        return None
    action_name, button = match[1], match[2].lower()
    if action_name == "search":
        return Visit(page="results", query=button)
    if action_name != "click" or button not in buttons(catalogue, visit):
        return None
    if button == BUY.lower():
        return replace(visit, page="end")
    if button == BACK.lower():
        return Visit()
    if button == NEXT.lower():
        return replace(visit, page_number=visit.page_number + 1)
    if button == PREVIOUS.lower():
        if visit.page == "results":
            return replace(visit, page_number=visit.page_number - 1)
        if visit.page == "item":
            return Visit(page="results", query=visit.query, page_number=visit.page_number)
        return replace(visit, page="item")
    if visit.page == "results":
        row = next(row for row in _page_rows(catalogue, visit) if catalogue.product(row).asin.lower() == button)
        return replace(visit, page="item", row=row)
    if button in _SUBPAGE_BY_BUTTON:
        return replace(visit, page=_SUBPAGE_BY_BUTTON[button])
    # As published, a value that several options have counts for the last of them.
    option_name = [
        option_name for option_name, values in catalogue.product(visit.row).options.items() if button in values
    ][-1]
    return replace(visit, chosen_options=tuple({**dict(visit.chosen_options), option_name: button}.items()))


def page_text(catalogue: Catalogue, visit: Visit, instruction: str, reward: float = 0.0) -> str:
    """Return the text of the present page. The last page shows `reward`."""
    parts = (
        _end_page_parts(catalogue, visit, reward) if visit.page == "end" else _page_parts(catalogue, visit, instruction)
    )
    # As in the public text mode: an empty text is left out, but one of blanks is an empty part.
    return SEPARATOR.join(part.strip() for part in parts if part not in ("", "\n"))


def _page_parts(catalogue: Catalogue, visit: Visit, instruction: str) -> list[str]:
    if visit.page == "start":
        return ["WebShop", "Instruction:", instruction, "Search"]
    parts = ["Instruction:", instruction, BACK]
    if visit.page == "results":
        parts.append(f"Page {visit.page_number} (Total results: {len(catalogue.search(visit.query))})")
        parts.extend([*([PREVIOUS] if visit.page_number > 1 else []), NEXT])
        for row in _page_rows(catalogue, visit):
            product = catalogue.product(row)
            parts.extend([product.asin, product.title, product.price_tag])
        return parts
    product = catalogue.product(visit.row)
    parts.append(PREVIOUS)
    if visit.page == "item":
        for name, values in product.options.items():
            parts.extend([name, *values])
        parts.extend([product.title, f"Price: {product.price_tag}", "Rating: N.A."])
        parts.extend([*(name.capitalize() for name in _SUBPAGE_BY_BUTTON), BUY])
    elif visit.page == "description":
        parts.append(product.description)
    elif visit.page == "features":
        # The page has a blank before each bullet, so that an empty bullet is a part, too.
        parts.extend(f" {bullet}" for bullet in product.bullets)
    # Products have no reviews, so the page of reviews ends here.
    return parts


def _end_page_parts(catalogue: Catalogue, visit: Visit, reward: float) -> list[str]:
    """Return the parts of the last page, with the labels that the public shop hides from people but
    not from agents.
    """
    options = str(htmlsafe_json_dumps(dict(visit.chosen_options), sort_keys=True))
    fields = ["asin", catalogue.product(visit.row).asin, "options", options]
    for label in ("attrs", "category", "query", "product category"):
        fields.extend([label, "None"])
    target = ["asin", "options", "attrs", "price upper", "instuction text", "category", "product category", "query"]
    thanks = ["Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)"]
    score = ["Reward", "Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None"]
    return [*thanks, "Purchased", *fields, "Target", *target, "Goal", "None", *score]


def _page_rows(catalogue: Catalogue, visit: Visit) -> tuple[int, ...]:
    """Return the rows of the products on the present page of results."""
    return catalogue.search(visit.query)[
        (visit.page_number - 1) * RESULTS_PER_PAGE : visit.page_number * RESULTS_PER_PAGE
    ]


# An expert that knows the goal: it searches, goes to the product's page, chooses options and buys.

_PRICE = re.compile(r",? and price lower than [\d.]+ dollars$")
_UNWANTED = re.compile(r"^find me |[\[\]\r\n]", re.IGNORECASE)


def expert_replies(catalogue: Catalogue, goal: Goal) -> list[str] | None:
    """Return replies that buy the product that a goal was made from, or None if neither of two
    searches finds it.

    The search is for the instruction, or for the title if that finds the product on an earlier
    page.
    """
    product = catalogue.product(goal.row)
    texts = (_PRICE.sub("", goal.instruction), product.title)
    queries = [" ".join(_UNWANTED.sub(" ", text).lower().split()) for text in texts]
    # The page of results that the product is on, counted from 0.
    page_by_query = {}
    for query in filter(None, queries):
        rows = catalogue.search(query)
        if goal.row in rows:
            page_by_query[query] = rows.index(goal.row) // RESULTS_PER_PAGE
    if not page_by_query:
        return None
    query = min(page_by_query, key=lambda query: page_by_query[query])
    replies = [_format_reply("I search for what is wanted.", f"search[{query}]")]
    replies += [_format_reply("It is not on this page; the next one may have it.", f"click[{NEXT}]")] * page_by_query[
        query
    ]
    replies.append(_format_reply(f"{product.asin} is what is wanted.", f"click[{product.asin}]"))
    value_by_option: dict[str, str] = {}
    for option in goal.options:
        open_values: Sequence[tuple[str, str]] = [
            (name, value) for name, values in product.options.items() if name not in value_by_option for value in values
        ]
        exact_matches = [(name, value) for name, value in open_values if option in ((name, value), ("", value))]
        matches = exact_matches or [(name, value) for name, value in open_values if num_options_met([option], [value])]
        value_by_option.update(matches[:1])
    for name, value in value_by_option.items():
        replies.append(_format_reply(f"The {name} must be {value}.", f"click[{value}]"))
    return [*replies, _format_reply("All is chosen; I buy it.", f"click[{BUY}]")]


def _format_reply(thought: str, action: str) -> str:
    return f"Thought: {thought}\nAction: {action}"


INSTRUCTION = """\
You buy things in a web shop. The first page says what is wanted. Each turn, reply with a thought and one action:
Thought: what to look for or to choose now
Action: one of the two actions
The actions are:
search[words]
click[text of a button, product number or option value on the page]
You can search on every page. What is not on the page cannot be clicked. On the page of a product, choose the options
that are wanted, then click[Buy Now], which ends the visit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """The data that all visits share: the catalogue, the goals in their published order, and the
    goal indices of each split.
    """

    catalogue: Catalogue
    goals: tuple[Goal, ...]
    splits: Mapping[str, tuple[int, ...]]


class WebShop(Environment):
    """A shop over the shipped catalogue of invented products, or over one in WebShop's files.

    An instance's index is that of its goal. Splits are `train`, `dev` and `test`, or `train` and
    `test` with `ids_dir`.

    Args:
        data_dir: the folder with `items_shuffle*.json`, `items_ins_v2*.json` and, for human goals,
            `items_human_ins.json`; empty means the shipped catalogue.
        suffix: the text before `.json` in the names of the first two, such as `_1000`.
        limit: how many entries of the product file are used, from its start; 0 means all.
        goals: `synthetic`, one for each combination of a product's options, or `human`, those that
            people wrote.
        split: `product` or `webshop`, see `split_goals`.
        ids_dir: a folder with AgentGym's `webshop_train.json` and `webshop_test.json`, which then
            define the splits.
        price_seed: the seed for prices within a range and for price bounds.
        nouns: `words`, or the name of the spaCy model that finds the nouns of titles, as published
            `en_core_web_lg`.
        explain: whether an action that cannot be done is answered with a sentence before the page;
            as published, the page is shown again without one.
        cache_dir: where a catalogue is kept with its search index once it has been read.
    """

    name = "webshop"
    instruction = INSTRUCTION
    step_limit = 10
    labels: LabelStyle = "lenient"

    def __init__(
        self,
        *,
        data_dir: str = "",
        suffix: str = "",
        limit: int = 0,
        goals: GoalKind = "synthetic",
        split: SplitRule = "product",
        ids_dir: str = "",
        price_seed: int = 233,
        nouns: str = "words",
        explain: bool = False,
        cache_dir: str = "runs/cache/webshop",
    ) -> None:
        """Check the options; files are read when they are first needed. Raises `ConfigError`."""
        for option, value, choices in (("goals", goals, get_args(GoalKind)), ("split", split, get_args(SplitRule))):
            if value not in choices:
                raise ConfigError(f"environment.options.{option} must be {' or '.join(choices)}, not {value!r}")
        for option, number in (("limit", limit), ("price_seed", price_seed)):
            if type(number) is not int or number < 0:
                raise ConfigError(f"environment.options.{option} must be a whole number of at least 0, not {number!r}")
        self._files = _catalogue_files(data_dir, suffix, goals)
        self._settings = (limit, goals, split, ids_dir, price_seed, cache_dir)
        self._price_seed = price_seed
        self._nouns_name = nouns
        self._explain = explain
        self._goal: Goal | None = None
        self._visit = Visit()
        self._reward = 0.0

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the files of the catalogue, and those in `ids_dir`. Raises `ConfigError` if one of
        the catalogue is missing.
        """
        files = _catalogue_files(
            options.get("data_dir", ""), options.get("suffix", ""), options.get("goals", "synthetic")
        )
        ids_folder = Path(options["ids_dir"]) if options.get("ids_dir") else None
        paths = (
            files.products,
            files.attributes,
            files.wishes,
            *(goals_file(ids_folder, name) for name in LISTED_SPLITS if ids_folder),
        )
        return tuple(str(path) for path in paths if path)

    @cached_property
    def shop(self) -> Shop:
        """The catalogue and the goals, shared by equal environments of a process and loaded on
        first use.
        """
        return _open_shop(self._files, *self._settings)

    @cached_property
    def _find_nouns(self) -> NounFinder:
        return word_nouns if self._nouns_name == "words" else spacy_nouns(self._nouns_name)

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return tuple(self.shop.splits)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split, in the order of the goals or of the file in
        `ids_dir`.
        """
        if split not in self.shop.splits:
            raise ConfigError(f"webshop has no split {split!r}; it has {', '.join(self.splits())}")
        return [Instance(environment=self.name, split=split, index=index) for index in self.shop.splits[split]]

    def goal(self, instance: Instance) -> Goal:
        """Return the goal of an instance. Raises `EnvironmentFault` for an unknown one."""
        is_known = instance.environment == self.name and instance.split in self.shop.splits
        if not is_known or not 0 <= instance.index < len(self.shop.goals):
            raise EnvironmentFault(
                f"webshop has no instance {instance.key}; it has {len(self.shop.goals)} goals, counted from 0, in the "
                f"splits {', '.join(self.splits())}"
            )
        return self.shop.goals[instance.index]

    def reset(self, instance: Instance) -> str:
        """Begin a visit and return the start page with the instruction."""
        self._goal = self.goal(instance)
        self._visit = Visit()
        self._reward = 0.0
        return self._page_text()

    def parse(self, reply: str) -> str:
        """Return the `search[...]` or `click[...]` after the last "Action:" of a reply.

        Without the label, the whole reply counts if it contains `search[` or `click[`; otherwise
        there is no action. What follows an action is dropped, and a text that is not an action is
        returned as it is.
        """
        return replies.shopping_action(reply, self.labels)

    def step(self, action: str) -> Transition:
        """Carry out an action and return the transition; the purchase gives the reward and ends the
        episode.

        An action that cannot be done leaves the page as it is; an empty action is answered as in
        AgentGym.
        """
        next_visit = visit_after(self.shop.catalogue, self._visit, action)
        if next_visit is None:
            if not action:
                observation = f"Invalid Action.\n\n{self._page_text()}"
            elif not self._explain:
                observation = self._page_text()
            else:
                clickable = ", ".join(buttons(self.shop.catalogue, self._visit)) or "nothing"
                observation = (
                    f"{action!r} cannot be done here; search[words], or click one of: {clickable}.\n\n"
                    f"{self._page_text()}"
                )
            return Transition(observation, 0.0, False, False, {"success": False, "valid": False})
        self._visit = next_visit
        is_purchased = next_visit.page == "end"
        self._reward = self._reward_of(self._current_goal(), next_visit) if is_purchased else 0.0
        success = self._reward == 1.0
        return Transition(self._page_text(), self._reward, is_purchased, False, {"success": success, "valid": True})

    def state(self) -> str:
        """Return as JSON the kind of page, the query, the page of results, the product and the
        chosen options; the order in which these were chosen has no effect.
        """
        visit = self._visit
        return json.dumps([visit.page, visit.query, visit.page_number, visit.row, sorted(visit.chosen_options)])

    def snapshot(self) -> Any:
        """Return the visit, which is immutable, with its goal and reward."""
        return self._goal, self._visit, self._reward

    def restore(self, snapshot: Any) -> None:
        """Put the episode back into a snapshot."""
        self._goal, self._visit, self._reward = snapshot

    def depth(self, instance: Instance) -> int | None:
        """Return the number of options to be chosen."""
        return len(self.goal(instance).options)

    def facts(self, instance: Instance) -> Mapping[str, Any]:
        """Return the category of the product that the goal was made from."""
        return {"category": self.shop.catalogue.product(self.goal(instance).row).category}

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the replies of the expert; None if it cannot find the goal's product, or buying
        that earns less than 1.
        """
        goal = self.goal(instance)
        expert_texts = expert_replies(self.shop.catalogue, goal)
        visit: Visit | None = Visit()
        for reply in expert_texts or ():
            visit = visit and visit_after(self.shop.catalogue, visit, replies.shopping_action(reply))
        return expert_texts if visit and visit.page == "end" and self._reward_of(goal, visit) == 1.0 else None

    def _page_text(self) -> str:
        return page_text(self.shop.catalogue, self._visit, self._current_goal().instruction, self._reward)

    def _reward_of(self, goal: Goal, visit: Visit) -> float:
        target, purchase = (self.shop.catalogue.product(row) for row in (goal.row, visit.row))
        return purchase_reward(
            goal,
            target,
            purchase,
            dict(visit.chosen_options),
            product_price(purchase, self._price_seed),
            self._find_nouns,
        )

    def _current_goal(self) -> Goal:
        if self._goal is None:
            raise EnvironmentFault("webshop: there is no episode; call reset first")
        return self._goal


def _catalogue_files(data_dir: str, suffix: str, goals: GoalKind) -> CatalogueFiles:
    return find_files(Path(data_dir) if data_dir else data_path("webshop"), suffix, wishes=goals == "human")


# A run has hundreds of environments, and each would hold all goals otherwise.
@lru_cache(maxsize=2)
def _open_shop(
    files: CatalogueFiles,
    limit: int,
    goal_kind: GoalKind,
    split_rule: SplitRule,
    ids_dir: str,
    price_seed: int,
    cache_dir: str,
) -> Shop:
    catalogue = open_catalogue(files, limit, Path(cache_dir))
    goals = make_goals(catalogue, goal_kind, price_seed)
    splits = listed_goals(goals, Path(ids_dir)) if ids_dir else split_goals(goals, split_rule)
    return Shop(catalogue=catalogue, goals=goals, splits=splits)
