"""The encyclopaedia of an invented universe: an article for each entity, and questions that lead
from article to article. Articles and questions come from one table of relations.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from agentr_core.environments.reasoning.grammar import SEARCH
from agentr_core.environments.reasoning.made.universe import Entity
from agentr_core.environments.reasoning.problems import Move, Problem
from agentr_core.errors import ConfigError
from agentr_core.fingerprint import derive_seed

SOURCE = "encyclopaedia"
_MOST_TRIES = 1000


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


def problems(
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
                source=SOURCE,
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
