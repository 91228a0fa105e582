"""Invented universes: people and places with names, and the relations between them, from a seed.

Nothing in one is true of the real world, so its questions are answered by looking things up, not
from memory. Idea: PhantomWiki (arXiv 2502.20377).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from agentr_core.errors import ConfigError
from agentr_core.fingerprint import derive_seed

# fmt: off
_ONSETS = (
    "b", "br", "d", "dr", "f", "fl", "g", "gl", "h", "k", "kr", "l", "m", "n", "p", "pl", "r", "s",
    "sk", "st", "t", "tr", "v", "w", "z",
)
_VOWELS = ("a", "e", "i", "o", "u", "ae", "ia", "or", "en", "al")
_CODAS = ("", "l", "n", "r", "s", "th", "m", "ck")
_TOWN_ENDS = ("bury", "dale", "field", "ford", "haven", "mere", "stead", "wick")
_PROFESSIONS = (
    "architect", "baker", "botanist", "cartographer", "clockmaker", "cooper", "farrier", "fisher",
    "glassblower", "judge", "lutenist", "mason", "miller", "painter", "physician", "potter",
    "printer", "surveyor", "tailor", "weaver",
)
# fmt: on
_COUNTRIES = 6
_A_COUPLES_CHILDREN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    """A person, town, country or river. `kind` is one of these words.

    `facts` maps a relation to what it leads to: the name of another entity, or a value. Each
    relation leads to one thing, so a chain of relations has one end.
    """

    name: str
    kind: str
    facts: Mapping[str, str]


def universe(seed: int, *, people: int, towns: int) -> dict[str, Entity]:
    """Return the entities of an invented universe by their names, which are unique. It has `towns`
    towns, and `people` people or a few more, since whole generations are drawn.

    Raises `ConfigError` for fewer than 20 people or 12 towns, and for more towns than people, since
    each person is mayor of at most one.
    """
    if people < max(20, towns) or towns < 2 * _COUNTRIES:
        raise ConfigError(
            f"a universe needs 20 people and {2 * _COUNTRIES} towns at least, and no more towns than people, "
            f"not {people} people and {towns} towns"
        )
    rng = random.Random(derive_seed(seed, "universe"))
    names = _Names(rng)
    persons = _people(rng, names, people)
    places = [names.fresh(rng.choice(_TOWN_ENDS)) for _ in range(towns)]
    rivers = [f"{names.fresh()} River" for _ in range(max(2, towns // 3))]
    countries = [names.fresh("ia") for _ in range(_COUNTRIES)]
    found: dict[str, Entity] = {}
    for name, facts in persons.items():
        facts["birthplace"], facts["home"] = rng.sample(places, 2)
        facts["profession"] = rng.choice(_PROFESSIONS)
        found[name] = Entity(name=name, kind="person", facts=facts)
    mayors = rng.sample(list(persons), towns)
    for number, name in enumerate(places):
        facts = {
            "country": countries[number % _COUNTRIES],
            "river": rng.choice(rivers),
            "mayor": mayors[number],
            "founded": str(rng.randrange(802, 1790)),
        }
        found[name] = Entity(name=name, kind="town", facts=facts)
    for number, name in enumerate(countries):
        facts = {"capital": places[number], "currency": names.fresh().lower()}
        found[name] = Entity(name=name, kind="country", facts=facts)
    for name in rivers:
        found[name] = Entity(name=name, kind="river", facts={"length": str(rng.randrange(40, 1900))})
    return found


def _people(rng: random.Random, names: _Names, count: int) -> dict[str, dict[str, str]]:
    """Return people with their families and teachers: couples and their children, who marry in
    turn.

    A child has the family name of its father, and a wife that of her husband.
    """
    facts: dict[str, dict[str, str]] = {}
    generation = _couples(names, facts, max(2, count // 12))
    while len(facts) < count and generation:
        children: list[str] = []
        for mother, father in generation:
            for _ in range(rng.randint(1, _A_COUPLES_CHILDREN)):
                child = f"{names.fresh()} {father.rpartition(' ')[2]}"
                facts[child] = {"mother": mother, "father": father}
                children.append(child)
        generation = []
        for child in children:
            family = child.rpartition(" ")[2]
            spouse = f"{names.fresh()} {family}"
            facts[spouse] = {}
            generation.append((spouse, child))
            _marry(facts, spouse, child)
    known = list(facts)
    for name in known:
        teacher = rng.choice([other for other in known if other != name])
        facts[name]["teacher"] = teacher
    return facts


def _couples(names: _Names, facts: dict[str, dict[str, str]], count: int) -> list[tuple[str, str]]:
    couples = []
    for _ in range(count):
        family = names.fresh()
        wife, husband = f"{names.fresh()} {family}", f"{names.fresh()} {family}"
        facts[wife], facts[husband] = {}, {}
        _marry(facts, wife, husband)
        couples.append((wife, husband))
    return couples


def _marry(facts: dict[str, dict[str, str]], one: str, other: str) -> None:
    facts[one]["spouse"], facts[other]["spouse"] = other, one


class _Names:
    """A source of invented words, each drawn once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._given: set[str] = set()

    def fresh(self, end: str = "") -> str:
        """Return a new capitalised word; `end` is its ending."""
        while True:
            parts = [self._rng.choice(_ONSETS) + self._rng.choice(_VOWELS) for _ in range(self._rng.choice((1, 2, 2)))]
            word = "".join(parts) + (end or self._rng.choice(_CODAS))
            if len(word) >= 4 and word not in self._given:
                self._given.add(word)
                return word.capitalize()
