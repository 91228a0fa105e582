"""The reward of a purchase: type, attributes, options and price, as the public code computes it.

    reward = type * (attributes met + options met + price within bound) / (attributes + options + 1)

Source: WebShop (arXiv 2207.01206), section 3.2 and appendix A.2, and its public code, which decides
where the two differ. The type needs the nouns of a title, for which the published shop runs a spaCy
model; `word_nouns` stands in if there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from rapidfuzz import fuzz, utils

from agentr_core.environments.webshop.files import Product
from agentr_core.environments.webshop.goals import Goal
from agentr_core.errors import ConfigError

Nouns = Callable[[str], Sequence[str]]
"""A function for the nouns and proper nouns of a title, in lower case, repeated as often as they
occur.
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
_NO_NOUN = frozenset(_FUNCTION_WORDS.split())
_WORD = re.compile(r"(?<!['\u2019\w])[^\W\d_]\w*")
_ALIKE = 85
_DROPPED = dict.fromkeys(range(128, 256))
"""The characters that the published comparison first leaves out; characters beyond them are
compared.
"""


def reward(goal: Goal, wanted: Product, bought: Product, chosen: Mapping[str, str], cost: float, nouns: Nouns) -> float:
    """Return the reward in [0, 1] for buying a product.

    Args:
        wanted: the product the goal was made from.
        chosen: values chosen on the product's page, by option name.
        cost: the price of the bought product, in dollars.
    """
    met = attributes_met(goal.attributes, bought) + options_met(goal.options, tuple(chosen.values()))
    met += cost <= goal.price_bound
    return type_reward(wanted, bought, nouns) * met / (len(goal.attributes) + len(goal.options) + 1)


def type_reward(wanted: Product, bought: Product, nouns: Nouns) -> float:
    """Return how well a product matches the wanted type: 1, or 0.5, 0.1 or 0 for less and less
    similar ones.
    """
    parts = [{part.strip() for part in each.product_category.split("\u203a")} for each in (wanted, bought)]
    names = nouns(wanted.title)
    overlap = len(set(names) & set(nouns(bought.title))) / len(names) if names else 0.2
    if overlap == 0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    alike = bought.query == wanted.query or len(parts[0] & parts[1]) >= 2 or overlap > 0.2
    return 1.0 if alike else 0.5


def attributes_met(attributes: Sequence[str], bought: Product) -> int:
    """Return how many attributes a product has, in its list of attributes or somewhere in its
    texts.
    """
    texts = (bought.title.lower(), " ".join(bought.bullets).lower(), bought.description.lower())
    return sum(
        any(_alike(own, wanted) for own in bought.attributes) or any(wanted in text for text in texts)
        for wanted in attributes
    )


def options_met(options: Sequence[tuple[str, str]], chosen: Sequence[str]) -> int:
    """Return how many options of a goal are met by chosen values.

    A value with a colour in it counts as that colour. The public code compares a synthetic option
    as the pair of name and value, so that "size large" is not met by "x-large"; a human option is
    the bare value, so that "large" is met by "x-large".
    """
    values = [normal_colour(value) for value in chosen]
    return sum(any(_alike(value, _option_text(name, wanted)) for value in values) for name, wanted in options)


def normal_colour(value: str) -> str:
    """Return the first colour in a value, or the value if there is none."""
    return next((colour for colour in COLOURS if colour in value), value)


def _option_text(name: str, value: str) -> str:
    if not name:
        return normal_colour(value)
    # For a pair, the public code checks whether the colour is a member of it, and otherwise
    # compares the pair as Python writes it.
    return next((colour for colour in COLOURS if colour in (name, value)), str((name, value)))


def _alike(one: str, other: str) -> bool:
    return round(fuzz.token_set_ratio(one, other, processor=_compared)) > _ALIKE


def _compared(text: str) -> str:
    return utils.default_process(text.translate(_DROPPED))


def word_nouns(title: str) -> list[str]:
    """Return the words of a title except function words and numbers.

    Titles are strings of names, and a tagger calls most of their words nouns. This function also
    counts adjectives and verbs.
    """
    return [word for word in _WORD.findall(title.lower()) if word not in _NO_NOUN]


def spacy_nouns(model: str) -> Nouns:
    """Return a tagger that asks a spaCy model, as published (`en_core_web_lg`). Raises
    `ConfigError` if the model cannot be loaded.
    """
    try:
        import spacy

        tag = spacy.load(model)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"environment.options.nouns: the spaCy model {model!r} cannot be loaded ({' '.join(str(error).split())}); "
            f"in the checkout, `pip install -c constraints.txt -e '.[webshop]'` and `python -m spacy download "
            f"{model}`; or set nouns to words"
        ) from error
    return lru_cache(4096)(lambda title: [t.text.lower() for t in tag(title) if t.pos_ in ("NOUN", "PROPN")])
