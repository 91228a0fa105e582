"""Questions made from a seed, whose answers are derived, never written down.

An invented universe has people and places with names, and relations between them. Nothing in it is
true of the real world, so its questions are answered by looking things up, not from memory. Its
encyclopaedia has an article for each entity, and questions lead from article to article; articles
and questions come from one table of relations. Idea: PhantomWiki (arXiv 2502.20377).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count

from agentr_core.environments.reasoning.grammar import PYTHON, SEARCH
from agentr_core.environments.reasoning.problems import Move, Problem
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
_MOST_TRIES = 1000


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


@dataclass(frozen=True, slots=True)
class Relation:
    """The sentence that states a relation of a subject, and the phrase for its object without its
    name.
    """

    sentence: str
    phrase: str


RELATIONS: Mapping[str, Relation] = {
    "mother": Relation("{subject}'s mother is {object}.", "the mother of {subject}"),
    "father": Relation("{subject}'s father is {object}.", "the father of {subject}"),
    "spouse": Relation("{subject} is married to {object}.", "the spouse of {subject}"),
    "teacher": Relation("{subject} was taught by {object}.", "the teacher of {subject}"),
    "birthplace": Relation("{subject} was born in {object}.", "the town in which {subject} was born"),
    "home": Relation("{subject} lives in {object}.", "the town in which {subject} lives"),
    "profession": Relation("{subject} has the profession of {object}.", "the profession of {subject}"),
    "country": Relation("{subject} is a town in {object}.", "the country to which {subject} belongs"),
    "river": Relation("{subject} lies on the {object}.", "the river on which {subject} lies"),
    "mayor": Relation("The mayor of {subject} is {object}.", "the mayor of {subject}"),
    "founded": Relation("{subject} was founded in the year {object}.", "the year in which {subject} was founded"),
    "capital": Relation("The capital of {subject} is {object}.", "the capital of {subject}"),
    "currency": Relation("People in {subject} pay with the {object}.", "the currency of {subject}"),
    "length": Relation("The {subject} is {object} km long.", "the length in km of {subject}"),
}


def articles(entities: Mapping[str, Entity]) -> list[dict[str, str]]:
    """Return the documents of a corpus, one for each entity: id, title, contents."""
    return [
        {"id": f"article-{number}", "title": entity.name, "contents": " ".join(_sentences(entity))}
        for number, entity in enumerate(entities.values())
    ]


def encyclopaedia_problems(
    entities: Mapping[str, Entity], subjects: Sequence[str], *, hops: Sequence[int], seed: int, prefix: str
) -> Iterator[Problem]:
    """Yield questions about subjects, all different, with the given numbers of hops in turn; their
    ids begin with `prefix`.

    Raises `ConfigError` if no further question can be drawn.
    """
    rng = random.Random(derive_seed(seed, "questions", prefix))
    asked: set[str] = set()
    for number in count():
        problem = _fresh(entities, subjects, hops[number % len(hops)], rng, asked, f"{prefix}-{number}")
        asked.add(problem.question)
        yield problem


def follow(entities: Mapping[str, Entity], subject: str, relations: Sequence[str]) -> list[str]:
    """Return a chain: the subject, and what each relation leads to in turn."""
    chain = [subject]
    for relation in relations:
        chain.append(entities[chain[-1]].facts[relation])
    return chain


def _fresh(
    entities: Mapping[str, Entity],
    subjects: Sequence[str],
    hops: int,
    rng: random.Random,
    asked: Collection[str],
    name: str,
) -> Problem:
    for _ in range(_MOST_TRIES):
        subject = rng.choice(subjects)
        relations = _walk(entities, subject, hops, rng)
        if relations and (question := _question(entities, subject, relations)) not in asked:
            chain = follow(entities, subject, relations)
            return Problem(
                id=name,
                question=question,
                golds=(chain[-1],),
                source="encyclopaedia",
                domain="knowledge",
                depth=hops,
                solution=tuple(_moves(chain, relations)),
            )
    raise ConfigError(f"no further question of {hops} hops can be drawn; ask for fewer, or make a larger universe")


def _walk(entities: Mapping[str, Entity], subject: str, hops: int, rng: random.Random) -> list[str]:
    """Return random relations of a chain that visits no place twice; empty if the draw reached a
    dead end.
    """
    place, relations, seen = subject, [], {subject}
    for hop in range(hops):
        facts = entities[place].facts if place in entities else {}
        # A relation to a plain value can only end a chain.
        onward = [
            relation
            for relation, leads_to in facts.items()
            if leads_to not in seen and (hop == hops - 1 or leads_to in entities)
        ]
        if not onward:
            return []
        relations.append(rng.choice(onward))
        place = facts[relations[-1]]
        seen.add(place)
    return relations


def _question(entities: Mapping[str, Entity], subject: str, relations: Sequence[str]) -> str:
    phrase = subject
    for relation in relations:
        phrase = RELATIONS[relation].phrase.format(subject=phrase)
    last = follow(entities, subject, relations)[-1]
    person = last in entities and entities[last].kind == "person"
    return f"{'Who' if person else 'What'} is {phrase}?"


def _moves(chain: Sequence[str], relations: Sequence[str]) -> Iterator[Move]:
    known = ""
    for place, relation, leads_to in zip(chain, relations, chain[1:], strict=False):
        yield Move(thought=f"{known}I look up {place}.", tool=SEARCH, query=place)
        known = f"{RELATIONS[relation].sentence.format(subject=place, object=leads_to)} "
    yield Move(thought=known.strip())


def _sentences(entity: Entity) -> list[str]:
    return [
        RELATIONS[relation].sentence.format(subject=entity.name, object=leads_to)
        for relation, leads_to in entity.facts.items()
    ]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of problem: the templates of its question and of the expert's code, how the numbers in
    them are drawn, and how the answer is computed.
    """

    question: str
    code: str
    draw: Callable[[random.Random], dict[str, int]]
    answer: Callable[..., int | Fraction]


def number_problems(seed: int, prefix: str) -> Iterator[Problem]:
    """Yield number problems without end, all different; their ids begin with `prefix`. They are
    quick to answer with a few lines of Python, and hard without them.
    """
    rng = random.Random(derive_seed(seed, "numbers"))
    seen: set[str] = set()
    for number in count():
        kind = _KINDS[number % len(_KINDS)]
        while (question := kind.question.format(**(values := kind.draw(rng)))) in seen:
            pass
        seen.add(question)
        yield Problem(
            id=f"{prefix}-{number}",
            question=question,
            golds=(_written(kind.answer(**values)),),
            source="numbers",
            domain="math",
            depth=1,
            solution=(
                Move(thought="I calculate it.", tool=PYTHON, query=kind.code.format(**values)),
                Move(thought="The code printed the answer."),
            ),
        )


def _written(value: int | Fraction) -> str:
    fraction = Fraction(value)
    if fraction.denominator == 1:
        return str(fraction.numerator)
    return rf"\frac{{{fraction.numerator}}}{{{fraction.denominator}}}"


def _digit_sum(base: int, power: int) -> int:
    total, rest = 0, base**power
    while rest:
        rest, digit = divmod(rest, 10)
        total += digit
    return total


def _primes(low: int, high: int) -> int:
    return sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in range(max(2, low), high + 1))


def _divisors(n: int) -> int:
    return sum(1 if d * d == n else 2 for d in range(1, math.isqrt(n) + 1) if n % d == 0)


def _collatz(n: int) -> int:
    steps = 0
    while n != 1:
        n = 3 * n + 1 if n % 2 else n // 2
        steps += 1
    return steps


def _one_but_not_both(n: int, a: int, b: int) -> int:
    """Return the sum by inclusion and exclusion: multiples of a plus those of b, minus twice those
    of both.
    """

    def multiples(step: int) -> int:
        terms = n // step
        return step * terms * (terms + 1) // 2

    return multiples(a) + multiples(b) - 2 * multiples(math.lcm(a, b))


def _ways_to_pay(n: int, a: int, b: int, c: int) -> int:
    return sum((n - c * z - b * y) % a == 0 for z in range(n // c + 1) for y in range((n - c * z) // b + 1))


def _dice(dice: int, sides: int, total: int) -> Fraction:
    """Return the probability of a total by inclusion and exclusion over dice that are too high."""
    ways = sum(
        (-1) ** k * math.comb(dice, k) * math.comb(total - k * sides - 1, dice - 1)
        for k in range((total - dice) // sides + 1)
    )
    return Fraction(ways, sides**dice)


def _recurrence(a: int, b: int, n: int, m: int) -> int:
    """Return the term, from a matrix power by repeated squaring."""
    result, base, power = (1, 0, 0, 1), (a, b, 1, 0), n - 1
    while power:
        if power % 2:
            result = _times(result, base, m)
        base, power = _times(base, base, m), power // 2
    return (result[0] + result[1]) % m


def _times(one: tuple[int, ...], other: tuple[int, ...], m: int) -> tuple[int, int, int, int]:
    (a, b, c, d), (e, f, g, h) = one, other
    return (a * e + b * g) % m, (a * f + b * h) % m, (c * e + d * g) % m, (c * f + d * h) % m


_KINDS = (
    _Kind(
        "What is the sum of the decimal digits of {base}^{power}?",
        "print(sum(map(int, str({base} ** {power}))))",
        lambda rng: {"base": rng.randrange(3, 40), "power": rng.randrange(15, 60)},
        _digit_sum,
    ),
    _Kind(
        "How many prime numbers are there from {low} to {high}, both included?",
        "primes = [n for n in range({low}, {high} + 1) if all(n % d for d in range(2, int(n ** 0.5) + 1))]\n"
        "print(len(primes))",
        lambda rng: {"low": (low := rng.randrange(100, 3000)), "high": low + rng.randrange(100, 900)},
        _primes,
    ),
    _Kind(
        "What is the remainder when {base}^{power} is divided by {modulus}?",
        "print(pow({base}, {power}, {modulus}))",
        lambda rng: {
            "base": rng.randrange(2, 90),
            "power": rng.randrange(100, 5000),
            "modulus": rng.randrange(101, 2000),
        },
        lambda base, power, modulus: base**power % modulus,
    ),
    _Kind(
        "How many positive divisors does {n} have?",
        "n = {n}\nprint(sum(n % d == 0 for d in range(1, n + 1)))",
        lambda rng: {"n": 12 * rng.randrange(500, 9000)},
        _divisors,
    ),
    _Kind(
        "Begin with {n}. Halve a number that is even; triple one that is odd and add 1. "
        "After how many such steps is the number 1 for the first time?",
        "n, steps = {n}, 0\nwhile n != 1:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1\n    steps += 1\nprint(steps)",
        lambda rng: {"n": rng.randrange(27, 9000)},
        _collatz,
    ),
    _Kind(
        "What is the sum of all whole numbers from 1 to {n} that are divisible by {a} or by {b}, but not by both?",
        "print(sum(k for k in range(1, {n} + 1) if (k % {a} == 0) != (k % {b} == 0)))",
        lambda rng: {
            "n": rng.randrange(200, 4000),
            "a": (a := rng.randrange(3, 13)),
            "b": a + rng.randrange(1, 9),
        },
        _one_but_not_both,
    ),
    _Kind(
        "In how many ways can {n} cents be paid with coins of {a}, {b} and {c} cents, "
        "if their order does not matter and a kind of coin may be left out?",
        "ways = [1] + [0] * {n}\nfor coin in ({a}, {b}, {c}):\n    for k in range(coin, {n} + 1):\n"
        "        ways[k] += ways[k - coin]\nprint(ways[{n}])",
        lambda rng: {
            "n": rng.randrange(60, 400),
            "a": (a := rng.randrange(1, 5)),
            "b": (b := a + rng.randrange(1, 6)),
            "c": b + rng.randrange(1, 9),
        },
        _ways_to_pay,
    ),
    _Kind(
        "{dice} fair dice with {sides} sides, numbered from 1 to {sides}, are thrown. "
        "What is the probability that they show {total} in all? Give a fraction in lowest terms.",
        "from fractions import Fraction\nfrom itertools import product\n"
        "throws = product(range(1, {sides} + 1), repeat={dice})\n"
        "print(Fraction(sum(sum(throw) == {total} for throw in throws), {sides} ** {dice}))",
        lambda rng: {
            "dice": (dice := rng.randrange(3, 6)),
            "sides": (sides := rng.randrange(4, 9)),
            "total": rng.randrange(dice + 2, dice * sides - 1),
        },
        _dice,
    ),
    _Kind(
        "A sequence begins with 1 and 1; each further term is {a} times the term before it plus {b} times the one "
        "before that. What is the remainder when its term number {n} is divided by {m}?",
        "x, y = 1, 1\nfor _ in range({n} - 2):\n    x, y = y, ({a} * y + {b} * x) % {m}\nprint(y)",
        lambda rng: {
            "a": rng.randrange(1, 9),
            "b": rng.randrange(1, 9),
            "n": rng.randrange(30, 900),
            "m": rng.randrange(11, 998),
        },
        lambda a, b, n, m: _recurrence(a, b, n - 1, m),
    ),
    _Kind(
        "What is the sum of the greatest common divisors of {n} and k, over all whole numbers k from 1 to {n}?",
        "from math import gcd\nprint(sum(gcd({n}, k) for k in range(1, {n} + 1)))",
        lambda rng: {"n": 6 * rng.randrange(20, 500)},
        # By Euler's function: d is the greatest common divisor for phi(n / d) numbers.
        lambda n: sum(d * _coprime(n // d) for d in range(1, n + 1) if n % d == 0),
    ),
)


def _coprime(n: int) -> int:
    found, rest, p = n, n, 2
    while p * p <= rest:
        if rest % p == 0:
            found -= found // p
            while rest % p == 0:
                rest //= p
        p += 1
    return found - found // rest if rest > 1 else found
