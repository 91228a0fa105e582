"""Number problems that are quick to answer with a few lines of Python, and hard without them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import count

from agentr_core.environments.reasoning.grammar import PYTHON
from agentr_core.environments.reasoning.problems import Move, Problem
from agentr_core.fingerprint import derive_seed

SOURCE = "numbers"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of problem: the templates of its question and of the expert's code, how the numbers in
    them are drawn, and how the answer is computed.
    """

    question: str
    code: str
    draw: Callable[[random.Random], dict[str, int]]
    answer: Callable[..., int | Fraction]


def problems(seed: int, prefix: str) -> Iterator[Problem]:
    """Yield problems without end, all different; their ids begin with `prefix`."""
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
            source=SOURCE,
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
