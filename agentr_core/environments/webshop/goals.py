"""WebShop's products, the search over them, the goals with their price bounds and splits, and the
reward.

The published shop draws prices and bounds from an unseeded generator, so that goals change with
every start. Here both follow from a seed. The order of goals is the published one, so that an index
means the same goal.

Source: WebShop (arXiv 2207.01206), section 3.1, and AgentGym (arXiv 2406.04151), whose 6910 ids are
the synthetic goals of the first 1000 products.
"""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import ijson
import numpy as np
from pydantic import TypeAdapter, ValidationError
from rapidfuzz import fuzz, utils

from agentr_core.errors import ConfigError, DataFileError
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.system import content_sha256, move_into_place
from agentr_core.texts import path_for_message
from agentr_core.tools.search.retriever import Bm25Ranker, make_analyser

# Products of WebShop, and the original files they come from.
#
# `items_shuffle*.json` is a list of products, `items_ins_v2*.json` their attributes and synthetic
# instructions by asin, `items_human_ins.json` the wishes of people, by asin. Files are read as
# streams: the list one product at a time.
#
# Source: WebShop (arXiv 2207.01206), sections 3 and 4, and its public data.

NO_PRICE = 100.0
NO_ATTRIBUTE = "DUMMY_ATTR"
_MAX_ASIN_CHARS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanInstruction:
    """A human instruction, and the attributes and options that it names."""

    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product. `prices` are one price in dollars, or both ends of a range; `options` maps the
    name of an option to its values.

    `instruction` is the synthetic one, empty if there is none; `wishes` are the human ones.
    """

    asin: str
    title: str
    query: str
    category: str
    product_category: str
    description: str
    bullets: tuple[str, ...]
    prices: tuple[float, ...]
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    instruction: str = ""
    instruction_attributes: tuple[str, ...] = ()
    wishes: tuple[HumanInstruction, ...] = ()

    @property
    def price_tag(self) -> str:
        """The price as pages show it."""
        return " to ".join(f"${price}" for price in self.prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueFiles:
    """The files of one catalogue; `wishes` is None if there is no file of human instructions."""

    products: Path
    attributes: Path
    wishes: Path | None


def find_files(folder: Path, suffix: str, *, wishes: bool) -> CatalogueFiles:
    """Return the files of a catalogue, whose names end with a suffix such as `_1000`.

    Args:
        wishes: whether the file of human instructions is required; if it exists, it is always used.

    Raises `ConfigError` if the folder or a file is missing.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"environment.options.data_dir: there is no folder {path_for_message(folder)}; "
            f"name the one with WebShop's files"
        )
    products, attributes = folder / f"items_shuffle{suffix}.json", folder / f"items_ins_v2{suffix}.json"
    human = folder / "items_human_ins.json"
    for path in (products, attributes, *([human] if wishes else [])):
        if not path.is_file():
            names = ", ".join(sorted(path.name for path in folder.glob("items_*.json"))) or "no items_*.json"
            raise ConfigError(
                f"environment.options.data_dir: {folder} has no {path.name} but {names}; set data_dir, or suffix to "
                "what stands before .json in items_shuffle*.json"
            )
    return CatalogueFiles(products=products, attributes=attributes, wishes=human if human.is_file() else None)


def read_products(files: CatalogueFiles, limit: int = 0) -> Iterator[Product]:
    """Yield the products in the order of their file: those of its first `limit` entries, or of all
    if `limit` is 0.

    As in the published code, an entry is skipped if its asin is invalid or occurred before.

    Raises `DataFileError` if a file is cut off or malformed.
    """
    annotations = dict(_stream_entries(files.attributes))
    wishes = dict(_stream_entries(files.wishes)) if files.wishes else {}
    asins = set()
    for position, raw in enumerate(islice(_stream_items(files.products), limit or None)):
        with _convert_errors(files.products, f"product {position}"):
            asin = raw["asin"]
            if asin == "nan" or len(asin) > _MAX_ASIN_CHARS or asin in asins:
                continue
            asins.add(asin)
            product = _product(raw, annotations.get(asin) or {}, wishes.get(asin) or ())
        yield product


def _product(raw: Mapping[str, Any], annotation: Mapping[str, Any], wishes: Iterable[Mapping[str, Any]]) -> Product:
    bullets = raw["small_description"]
    # One price or two, as in "$9.99" or "$9.99 to $19.99".
    prices = tuple(float(re.sub(r"[^\d.]", "", amount)) for amount in (raw.get("pricing") or "").split("$")[1:])
    return Product(
        asin=raw["asin"],
        title=raw["name"] or "",
        query=raw["query"].lower().strip(),
        category=raw["category"],
        product_category=raw["product_category"],
        description=raw["full_description"] or "",
        bullets=tuple(str(bullet) for bullet in (bullets if isinstance(bullets, list) else [bullets or ""])),
        prices=prices[:2] or (NO_PRICE,),
        options={
            name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
            for name, values in (raw["customization_options"] or {}).items()
            if values is not None
        },
        attributes=tuple(annotation.get("attributes", (NO_ATTRIBUTE,))),
        instruction=annotation.get("instruction") or "",
        instruction_attributes=tuple(annotation.get("instruction_attributes") or ()),
        wishes=tuple(
            HumanInstruction(
                instruction=wish["instruction"],
                attributes=tuple(wish["instruction_attributes"]),
                options=tuple(wish["instruction_options"]),
            )
            for wish in wishes
        ),
    )


def _stream_items(path: Path) -> Iterator[Any]:
    with _convert_errors(path), path.open("rb") as stream:
        yield from ijson.items(stream, "item", use_float=True)


def _stream_entries(path: Path) -> Iterator[tuple[str, Any]]:
    with _convert_errors(path), path.open("rb") as stream:
        yield from ijson.kvitems(stream, "", use_float=True)


@contextmanager
def _convert_errors(path: Path, item: str = "") -> Iterator[None]:
    """Turn an error from a damaged file into a `DataFileError` that names the file."""
    try:
        yield
    except (OSError, ijson.JSONError) as error:
        reason = " ".join(str(error).split())
        raise DataFileError(f"catalogue file {path} is cut off or not JSON ({reason}); download it again") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        prefix = f"{item} of " if item else ""
        raise DataFileError(
            f"{prefix}catalogue file {path} is malformed ({reason}); download the file again"
        ) from error


# The text of a product that is searched, and how it is split into words.
#
# The published engine is Lucene. Here, words are split, stemmed and filtered by stop words as in
# its English analyser, but not in every corner case, so ranks can differ from published ones.
#
# Source: WebShop's search engine (Pyserini's defaults): k1 0.9, b 0.4, at most 50 results.

MAX_RESULTS = 50
_WORD = re.compile(r"\w+(?:['\u2019.]\w+)*")
_POSSESSIVE = re.compile(r"['\u2019]s$")


def product_text(product: Product) -> str:
    """Return the text of a product for the search: title, description, first bullet and options, in
    lower case.
    """
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first_bullet = product.bullets[0] if product.bullets else ""
    return " ".join([product.title, product.description, first_bullet, options]).lower()


def _split_words(text: str) -> Iterator[str]:
    return (_POSSESSIVE.sub("", word) for word in _WORD.findall(text))


WORD_ANALYSER = make_analyser(_split_words, stemmer="porter")


# A prepared catalogue: its products by row and the search index, cached on disk under the hash of
# their files.
#
# The folder `<cache>/<hash>` holds `products.jsonl` with the offset of each line, the rows that
# have an instruction, and the search index. A process reads a product when it is needed and
# memory-maps the index, so a million products take little memory.

CATALOGUE_VERSION = 1
"""Raise it when the same files would give a different catalogue or index."""

_PRODUCTS_FILE, _OFFSETS_FILE, _SYNTHETIC_ROWS_FILE, _HUMAN_ROWS_FILE, _INDEX_FOLDER = (
    "products.jsonl",
    "starts.npy",
    "instructed.npy",
    "wished.npy",
    "index",
)
_PRODUCT_ADAPTER = TypeAdapter(Product)
_MAX_CACHED_PRODUCTS = 4096
_MAX_CACHED_QUERIES = 4096


class Catalogue:
    """Products by row, in the order of their file, and search over them: `search` returns the rows
    of at most `MAX_RESULTS` products, the best first. Threads may share it.
    """

    def __init__(self, folder: Path) -> None:
        """Open a prepared catalogue. Raises `DataFileError` if it is damaged."""
        try:
            self._offsets = np.load(folder / _OFFSETS_FILE)
            self.synthetic_rows: Sequence[int] = np.load(folder / _SYNTHETIC_ROWS_FILE).tolist()
            self.human_rows: Sequence[int] = np.load(folder / _HUMAN_ROWS_FILE).tolist()
        except (OSError, ValueError, EOFError) as error:
            raise DataFileError(f"catalogue {folder} is damaged ({error}); delete it to have it rebuilt") from error
        self._folder = folder
        self.product = lru_cache(_MAX_CACHED_PRODUCTS)(self._product)
        search_index = Bm25Ranker.load(folder / _INDEX_FOLDER, WORD_ANALYSER)

        def search(query: str) -> tuple[int, ...]:
            (hits,) = search_index.rank([query], MAX_RESULTS)
            return tuple(row for row, _ in hits)

        self.search = lru_cache(_MAX_CACHED_QUERIES)(search)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def _product(self, row: int) -> Product:
        start, end = int(self._offsets[row]), int(self._offsets[row + 1])
        try:
            with (self._folder / _PRODUCTS_FILE).open("rb") as file:
                file.seek(start)
                return _PRODUCT_ADAPTER.validate_json(file.read(end - start))
        except (OSError, ValidationError) as error:
            raise DataFileError(f"catalogue {self._folder} is damaged; delete it to have it rebuilt") from error


def open_catalogue(files: CatalogueFiles, limit: int, cache: Path) -> Catalogue:
    """Return the catalogue of some files; it is built unless the cache has one for their content.

    Args:
        limit: how many entries of the product file are used, from its start; 0 means all.
        cache: a folder, which is made if necessary.

    Raises:
        DataFileError: a file is cut off or malformed; no unfinished catalogue is left behind.
        ConfigError: the cache folder cannot be made.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"environment.options.cache_dir: {cache} cannot be made ({error}); name another") from error
    paths = [files.products, files.attributes, *([files.wishes] if files.wishes else [])]
    folder = cache / fingerprint("webshop", CATALOGUE_VERSION, limit, [content_sha256(path, cache) for path in paths])
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as temporary_folder:
            _build_catalogue(files, limit, Path(temporary_folder) / "catalogue")
            move_into_place(Path(temporary_folder) / "catalogue", folder)
    return Catalogue(folder)


def _build_catalogue(files: CatalogueFiles, limit: int, folder: Path) -> None:
    folder.mkdir()
    offsets, synthetic_rows, human_rows = [0], [], []

    def documents() -> Iterator[str]:
        with (folder / _PRODUCTS_FILE).open("wb") as file:
            for row, product in enumerate(read_products(files, limit)):
                offsets.append(offsets[-1] + file.write(_PRODUCT_ADAPTER.dump_json(product) + b"\n"))
                if product.instruction:
                    synthetic_rows.append(row)
                if product.wishes:
                    human_rows.append(row)
                yield product_text(product)
        if len(offsets) == 1:
            raise DataFileError(f"catalogue file {files.products} has no product; download it again")

    Bm25Ranker.build(documents(), WORD_ANALYSER).save(folder / _INDEX_FOLDER)
    np.save(folder / _OFFSETS_FILE, np.array(offsets, dtype=np.int64))
    np.save(folder / _SYNTHETIC_ROWS_FILE, np.array(synthetic_rows, dtype=np.int64))
    np.save(folder / _HUMAN_ROWS_FILE, np.array(human_rows, dtype=np.int64))


GoalKind = Literal["synthetic", "human"]
SplitRule = Literal["product", "webshop"]

UNBOUNDED = 1_000_000.0
_PRICE_BOUNDS = [10.0 * step for step in range(1, 100)]
_ORDER_SEED = 233
_TEST_RANGE, _DEV_RANGE = range(500), range(500, 1500)
_TEST_SHARE, _DEV_SHARE = 0.2, 0.1
LISTED_SPLITS = ("test", "train")
"""The splits for which AgentGym has files of goals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """An instruction to buy, and the row of the product that it was made from. In a human goal, the
    names of options are empty.
    """

    row: int
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    price_bound: float


def product_price(product: Product, seed: int) -> float:
    """Return the price of a product in dollars; if it has a price range, a value in it drawn from
    the seed and the asin.
    """
    if len(product.prices) == 1:
        return product.prices[0]
    low, high = product.prices
    return random.Random(derive_seed("webshop-price", seed, product.asin)).uniform(low, high)


def make_goals(catalogue: Catalogue, kind: GoalKind, seed: int) -> tuple[Goal, ...]:
    """Return the goals of a catalogue in the published order. All are held in memory, at about a
    kilobyte each.

    Raises `ConfigError` if the catalogue has no instruction of that kind.
    """
    rng = random.Random(seed)
    goals_of_row = _synthetic_goals if kind == "synthetic" else _human_goals
    rows = catalogue.synthetic_rows if kind == "synthetic" else catalogue.human_rows
    goals = [goal for row in rows for goal in goals_of_row(row, catalogue.product(row), rng, seed)]
    if not goals:
        raise ConfigError(f"environment.options.goals: the catalogue has no {kind} instruction; choose the other kind")
    random.Random(_ORDER_SEED).shuffle(goals)
    return tuple(goals)


def _synthetic_goals(row: int, product: Product, rng: random.Random, seed: int) -> Iterator[Goal]:
    """Yield a goal for each combination of a product's option values, all with the same price
    bound.
    """
    bound, price_text = _price_bound(product_price(product, seed), rng)
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        options = tuple(zip(names, values, strict=True))
        option_text = ", and ".join(f"{name}: {value}" for name, value in options)
        yield Goal(
            row=row,
            instruction=f"{product.instruction}{' with ' if options else ''}{option_text}{price_text}",
            attributes=product.instruction_attributes,
            options=options,
            price_bound=bound,
        )


def _human_goals(row: int, product: Product, rng: random.Random, seed: int) -> Iterator[Goal]:
    """Yield a goal for each wish that names an attribute."""
    for wish in product.wishes:
        if wish.attributes:
            bound, price_text = _price_bound(product_price(product, seed), rng)
            yield Goal(
                row=row,
                instruction=wish.instruction.strip(".") + price_text,
                attributes=wish.attributes,
                options=tuple(("", value) for value in wish.options),
                price_bound=bound,
            )


def _price_bound(price: float, rng: random.Random) -> tuple[float, str]:
    """Return a price bound and its wording in the instruction: the greater of two that are drawn
    from the next four multiples of ten above the price. `UNBOUNDED` and no wording if fewer than
    two of those up to 990 are above it.
    """
    higher_bounds = [bound for bound in _PRICE_BOUNDS if bound > price][:4]
    if len(higher_bounds) < 2:
        return UNBOUNDED, ""
    bound = max(rng.sample(higher_bounds, 2))
    return bound, f", and price lower than {bound:.2f} dollars"


def split_goals(goals: Sequence[Goal], rule: SplitRule) -> Mapping[str, tuple[int, ...]]:
    """Return the goal indices of the splits `train`, `dev` and `test`.

    `webshop` takes the published ranges: test is 0 to 499, dev 500 to 1499, train the rest.
    `product` splits by product, so that no product is the target in two splits: a fifth of the
    products is for test, a tenth for dev. A goal with the same instruction as an earlier one (in
    the order test, dev, train) is left out.

    Raises `ConfigError` if a split would be empty.
    """
    if rule == "webshop":
        split_by_index = {
            index: "test" if index in _TEST_RANGE else "dev" if index in _DEV_RANGE else "train"
            for index in range(len(goals))
        }
    else:
        rows = sorted({goal.row for goal in goals})
        random.Random(_ORDER_SEED).shuffle(rows)
        test_end, dev_end = round(len(rows) * _TEST_SHARE), round(len(rows) * (_TEST_SHARE + _DEV_SHARE))
        split_by_row = {
            row: "test" if position < test_end else "dev" if position < dev_end else "train"
            for position, row in enumerate(rows)
        }
        split_by_index = {index: split_by_row[goal.row] for index, goal in enumerate(goals)}
    splits = _without_repeated(
        goals,
        {
            name: [index for index, goal_split in split_by_index.items() if goal_split == name]
            for name in ("test", "dev", "train")
        },
    )
    if not all(splits.values()):
        raise ConfigError(
            f"environment.options.split: {len(goals)} goals are too few for the rule {rule!r}; "
            "choose product, or a larger catalogue"
        )
    return splits


def goals_file(folder: Path, split: str) -> Path:
    """Return the path of AgentGym's file with the goals of a split."""
    return folder / f"webshop_{split}.json"


def listed_goals(goals: Sequence[Goal], folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the goal indices of the splits `train` and `test` from AgentGym's files
    `webshop_train.json` and `webshop_test.json`, without repeated instructions.

    Raises `DataFileError` if a file is missing or malformed, or lists a goal that does not exist.
    """
    splits: dict[str, list[int]] = {}
    for name in LISTED_SPLITS:
        path = goals_file(folder, name)
        try:
            with path.open("rb") as stream:
                splits[name] = [int(item.removeprefix("webshop_")) for item in ijson.items(stream, "item.item_id")]
        except (OSError, ijson.JSONError, ValueError, AttributeError) as error:
            raise DataFileError(
                f"{path} is not a list of AgentGym items ({' '.join(str(error).split())}); set "
                "environment.options.ids_dir to the folder of webshop_train.json and webshop_test.json"
            ) from error
    for name, indices in splits.items():
        out_of_range = [index for index in indices if not 0 <= index < len(goals)]
        if out_of_range:
            raise DataFileError(
                f"{goals_file(folder, name)} lists goal {out_of_range[0]}, but there are {len(goals)} goals; "
                "its ids are for the synthetic goals of the first 1000 products (suffix _1000)"
            )
    return _without_repeated(goals, splits)


def _without_repeated(goals: Sequence[Goal], splits: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the splits without goals whose instruction is that of an earlier goal, in the same or
    an earlier split.
    """
    instructions: set[str] = set()
    unique_by_split = {}
    for name, indices in splits.items():
        unique_indices = []
        for index in indices:
            if goals[index].instruction not in instructions:
                instructions.add(goals[index].instruction)
                unique_indices.append(index)
        unique_by_split[name] = tuple(unique_indices)
    return unique_by_split


# The reward of a purchase: type, attributes, options and price, as the public code computes it.
#
# reward = type * (attributes met + options met + price within bound) / (attributes + options + 1)
#
# Source: WebShop (arXiv 2207.01206), section 3.2 and appendix A.2, and its public code, which
# decides where the two differ. The type needs the nouns of a title, for which the published shop
# runs a spaCy model; `word_nouns` stands in if there is none.

NounFinder = Callable[[str], Sequence[str]]
"""A function that returns the nouns and proper nouns of a title, in lower case, each as often as it
occurs.
"""

_COLOUR_WORDS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire
seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white
wine yellow
"""
COLOURS = tuple(_COLOUR_WORDS.split())
"""The words that stand for a colour, in the order in which they are looked for."""

_FUNCTION_WORDS = """
a an the and or nor but as at by for from in into of off on onto out over per than to up upon via with within without
about above across after against along among around before behind below beneath between beyond during except inside
near outside since through throughout under until while if because so that this these those it its he she they them
their his her our your my we you i who which what when where how all any both each every few more most much many no
not only own same some such too very is are was were be been being has have had do does did can could will would
should may might must also just now then there here
"""
_FUNCTION_WORD_SET = frozenset(_FUNCTION_WORDS.split())
_NOUN = re.compile(r"(?<!['\u2019\w])[^\W\d_]\w*")
_MIN_SIMILARITY = 85
_DROPPED_CHARACTERS = dict.fromkeys(range(128, 256))
"""The characters that the published comparison removes first; those beyond them are kept."""


def purchase_reward(
    goal: Goal, target: Product, purchase: Product, value_by_option: Mapping[str, str], price: float, nouns: NounFinder
) -> float:
    """Return the reward in [0, 1] for buying a product, by the formula above.

    Args:
        target: the product that the goal was made from.
        value_by_option: the values chosen on the product's page, by option name.
        price: the price of the bought product, in dollars.
        nouns: finds the nouns of titles.
    """
    num_met = num_attributes_met(goal.attributes, purchase) + num_options_met(
        goal.options, tuple(value_by_option.values())
    )
    num_met += price <= goal.price_bound
    return type_reward(target, purchase, nouns) * num_met / (len(goal.attributes) + len(goal.options) + 1)


def type_reward(target: Product, purchase: Product, nouns: NounFinder) -> float:
    """Return how well a product matches the type of the wanted one: 1, 0.5, 0.1 or 0, in decreasing
    similarity.
    """
    category_sets = [
        {part.strip() for part in product.product_category.split("\u203a")} for product in (target, purchase)
    ]
    target_nouns = nouns(target.title)
    overlap = len(set(target_nouns) & set(nouns(purchase.title))) / len(target_nouns) if target_nouns else 0.2
    if overlap == 0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    is_similar = purchase.query == target.query or len(category_sets[0] & category_sets[1]) >= 2 or overlap > 0.2
    return 1.0 if is_similar else 0.5


def num_attributes_met(attributes: Sequence[str], product: Product) -> int:
    """Return how many of the attributes a product has, in its list of attributes or in its
    texts.
    """
    texts = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    return sum(
        any(_is_similar(value, attribute) for value in product.attributes) or any(attribute in text for text in texts)
        for attribute in attributes
    )


def num_options_met(options: Sequence[tuple[str, str]], chosen_values: Sequence[str]) -> int:
    """Return how many options of a goal are met by the chosen values.

    A value that contains a colour counts as that colour. The public code compares a synthetic
    option as the pair of name and value, so that "size large" is not met by "x-large"; a human
    option is the value alone, so that "large" is met by "x-large".
    """
    values = [colour_of(value) for value in chosen_values]
    return sum(any(_is_similar(value, _option_text(name, option)) for value in values) for name, option in options)


def colour_of(value: str) -> str:
    """Return the first of `COLOURS` that a value contains, or the value itself if there is none."""
    return next((colour for colour in COLOURS if colour in value), value)


def _option_text(name: str, value: str) -> str:
    if not name:
        return colour_of(value)
    # For a pair, the public code checks whether a colour is one of its two members, and otherwise
    # compares the pair as Python prints it.
    return next((colour for colour in COLOURS if colour in (name, value)), str((name, value)))


def _is_similar(first: str, second: str) -> bool:
    first, second = (utils.default_process(text.translate(_DROPPED_CHARACTERS)) for text in (first, second))
    return round(fuzz.token_set_ratio(first, second)) > _MIN_SIMILARITY


# The default, since the published tagger takes 500 MB. In the examples of the published tests, the
# shares of common nouns differ by at most 0.05, on the same side of each threshold.
def word_nouns(title: str) -> list[str]:
    """Return the words of a title, except function words and numbers, as an approximation of its
    nouns.

    Titles are strings of names, and a tagger calls most of their words nouns. Unlike a tagger, this
    also counts adjectives and verbs.
    """
    return [word for word in _NOUN.findall(title.lower()) if word not in _FUNCTION_WORD_SET]


@lru_cache(maxsize=2)
def spacy_nouns(model: str) -> NounFinder:
    """Return a noun finder that uses a spaCy model, as in the published code (`en_core_web_lg`).
    Raises `ConfigError` if the model cannot be loaded.
    """
    try:
        import spacy

        pipeline = spacy.load(model)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"environment.options.nouns: the spaCy model {model!r} cannot be loaded ({' '.join(str(error).split())}); "
            f"in the checkout, `pip install -c constraints.txt -e '.[webshop]'` and `python -m spacy download "
            f"{model}`; or set nouns to words"
        ) from error
    return lru_cache(4096)(
        lambda title: [token.text.lower() for token in pipeline(title) if token.pos_ in ("NOUN", "PROPN")]
    )
