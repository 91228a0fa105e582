"""Makes a small ALFWorld of invented homes, in the layout and file formats of the original data.

Run in the root of the checkout, with `pip install -c constraints.txt -e '.[alfworld]'`:

    python data/alfworld/make.py runs/alfworld

A game is a room, some things in it and one of the six tasks of the benchmark. Domain and grammar
are those of the installed package `alfworld`; the walkthrough of each game comes from the engine's
planner. The same arguments give the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentr_core.environments.alfworld.engine import acquire_game

SEED = 20261121
GAMES = {"train": 60, "valid_seen": 12, "valid_unseen": 12}
_SCENES = {"train": range(1, 9), "valid_seen": range(1, 9), "valid_unseen": range(9, 13)}

_OPENABLE = ("Cabinet", "Drawer", "Fridge", "Microwave")
_FOOD = ("Apple", "Bread", "Egg", "Potato", "Tomato")
_DISHES = ("Bowl", "Cup", "Mug", "Plate")
_SMALL = ("Book", "CD", "CellPhone", "KeyChain", "Pen", "Pencil")
_CLEANABLE = ("Apple", "Potato", "Tomato", *_DISHES)
_HEATABLE = (*_FOOD, "Cup", "Mug", "Plate")
_COOLABLE = (*_FOOD, *_DISHES)
_LAMP = "DeskLamp"
_TASKS = {
    "kitchen": (
        "pick_and_place_simple",
        "pick_clean_then_place_in_recep",
        "pick_heat_then_place_in_recep",
        "pick_cool_then_place_in_recep",
        "pick_two_obj_and_place",
    ),
    "bedroom": ("pick_and_place_simple", "look_at_obj_in_light", "pick_two_obj_and_place"),
}
_SAID = {
    "pick_and_place_simple": "put a {thing} in {place}.",
    "look_at_obj_in_light": "look at {thing} under the {lamp}.",
    "pick_clean_then_place_in_recep": "put a clean {thing} in {place}.",
    "pick_heat_then_place_in_recep": "put a hot {thing} in {place}.",
    "pick_cool_then_place_in_recep": "put a cool {thing} in {place}.",
    "pick_two_obj_and_place": "put two {thing} in {place}.",
}
_STATE = {
    "pick_clean_then_place_in_recep": ("(isClean ?o)", _CLEANABLE),
    "pick_heat_then_place_in_recep": ("(isHot ?o)", _HEATABLE),
    "pick_cool_then_place_in_recep": ("(isCool ?o)", _COOLABLE),
}


@dataclass(frozen=True)
class Room:
    """A room: its receptacles by type, and the types of things that may lie in it."""

    kind: str
    receptacles: dict[str, int]
    things: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """One task of the benchmark in one scene; `place` is empty for the lamp's."""

    kind: str
    thing: str
    place: str
    scene: int

    @property
    def folder(self) -> str:
        """Name the folder of its trials, as the original data does."""
        return f"{self.kind}-{self.thing}-None-{self.place or _LAMP}-{self.scene}"


def room_of(scene: int) -> Room:
    """Return the room of a scene: kitchens and bedrooms in turns, no two with the same
    furniture.
    """
    turn = scene // 2
    if scene % 2:
        kitchen = {"CounterTop": 2, "DiningTable": 1, "Fridge": 1, "GarbageCan": 1, "Microwave": 1, "SinkBasin": 1}
        return Room("kitchen", {**kitchen, "Cabinet": 1 + turn % 3, "Drawer": 1 + turn // 3}, _FOOD + _DISHES)
    bedroom = {"Bed": 1, "Desk": 1, "GarbageCan": 1, "SideTable": 1}
    return Room("bedroom", {**bedroom, "Shelf": 1 + turn % 3, "Drawer": 1 + turn // 3}, _SMALL)


def tasks(scene: int) -> list[Task]:
    """Return all tasks of a scene that make sense, in a fixed order."""
    room = room_of(scene)
    made = []
    for kind, thing, place in itertools.product(_TASKS[room.kind], room.things, room.receptacles):
        if kind == "look_at_obj_in_light":
            made.append(Task(kind, thing, "", scene))
        elif place not in ("Bed", "GarbageCan", "Microwave", "SinkBasin") and thing in _STATE.get(kind, ("", thing))[1]:
            made.append(Task(kind, thing, place, scene))
    return list(dict.fromkeys(made))


def chosen(split: str, count: int) -> Iterator[tuple[Task, random.Random]]:
    """Yield the tasks of a split with what draws the rest of each game; scenes and kinds take
    turns.

    Every fourth task of a scene is for `valid_seen`, so that no two splits share one.
    """
    dealt = []
    for scene in _SCENES[split]:
        order = tasks(scene)
        random.Random(f"{SEED} {scene}").shuffle(order)
        if split != "valid_unseen":
            order = [task for place, task in enumerate(order) if (place % 4 == 0) == (split == "valid_seen")]
        kinds = _TASKS[room_of(scene).kind]
        first = scene // 2 % len(kinds)
        dealt.append(
            _in_turns([[task for task in order if task.kind == kind] for kind in kinds[first:] + kinds[:first]])
        )
    for task in _in_turns(dealt)[:count]:
        yield task, random.Random(f"{SEED} {split} {task.folder}")


def _in_turns(rows: list[list[Task]]) -> list[Task]:
    return [task for turn in itertools.zip_longest(*rows) for task in turn if task is not None]


def problem(task: Task, rng: random.Random) -> str:
    """Return the PDDL problem of a game: the room is that of the scene, what lies where is
    drawn.
    """
    room = room_of(task.scene)
    layout = random.Random(f"{SEED} layout {task.scene}")
    spots = iter(layout.sample([(x, z) for x in range(-9, 10) for z in range(-9, 10)], 40))
    places: dict[str, tuple[str, str]] = {}
    for kind, count in room.receptacles.items():
        for _ in range(count):
            x, z = next(spots)
            places[_id(kind, x, z)] = (kind, f"loc_bar_{_number(x)}_bar_{_number(z)}_bar_0_bar_30")
    x, z = next(spots)
    start = f"loc_bar_{_number(x)}_bar_{_number(z)}_bar_0_bar_30"
    things: dict[str, tuple[str, str]] = {}
    drawn = [task.thing] * 2 + rng.sample([kind for kind in room.things if kind != task.thing], 3)
    goal_places = [each for each, (kind, _) in places.items() if kind == task.place]
    closed = rng.random() < 0.5
    for number, kind in enumerate(drawn):
        free = [
            each
            for each, (where, _) in places.items()
            if each not in goal_places and (closed or where not in _OPENABLE)
        ]
        things[_id(kind, 20 + number, rng.randint(-9, 9))] = (kind, rng.choice(free))
    facts = [f"(atLocation agent1 {start})"]
    for each, (kind, spot) in places.items():
        facts += [f"(receptacleType {each} {kind}Type)", f"(receptacleAtLocation {each} {spot})"]
        facts += [f"(openable {each})"] * (kind in _OPENABLE)
    if room.kind == "bedroom":
        desk = next(each for each, (kind, _) in places.items() if kind == "Desk")
        things[_id(_LAMP, 30, 0)] = (_LAMP, desk)
    for each, (kind, where) in things.items():
        facts += [f"(objectType {each} {kind}Type)", f"(inReceptacle {each} {where})"]
        facts.append(f"(objectAtLocation {each} {places[where][1]})")
        facts.append(f"(toggleable {each})" if kind == _LAMP else f"(pickupable {each})")
        for fact, fitting in (("cleanable", _CLEANABLE), ("heatable", _HEATABLE), ("coolable", _COOLABLE)):
            facts += [f"({fact} {each})"] * (kind in fitting)
    kinds = sorted({kind for kind, _ in things.values()} | {task.thing})
    facts += [f"(canContain {place}Type {kind}Type)" for place in room.receptacles for kind in kinds if kind != _LAMP]
    # The domain names these types, so every problem must have them.
    rtypes = sorted({*room.receptacles, "SinkBasin", "Microwave", "Fridge"})
    otypes = sorted({*kinds, "Knife", "ButterKnife"})
    objects = [
        "agent1 - agent",
        *(f"{kind}Type - rtype" for kind in rtypes),
        *(f"{kind}Type - otype" for kind in otypes),
    ]
    objects += [f"{each} - receptacle" for each in places] + [f"{each} - object" for each in things]
    objects += [f"{spot} - location" for spot in sorted({start, *(spot for _, spot in places.values())})]
    return "\n".join(
        [
            f"(define (problem plan_{task.scene})",
            "(:domain alfred)",
            "(:objects",
            *objects,
            ")",
            "(:init",
            *facts,
            ")",
            f"(:goal {_goal(task)})",
            ")",
            "",
        ]
    )


def _goal(task: Task) -> str:
    lies = f"(objectType ?o {task.thing}Type) (receptacleType ?r {task.place}Type) (inReceptacle ?o ?r)"
    if task.kind == "look_at_obj_in_light":
        lamp = f"(objectType ?t {_LAMP}Type) (isToggled ?t) (objectAtLocation ?t ?l) (atLocation ?a ?l)"
        held = f"(objectType ?o {task.thing}Type) (holds ?a ?o)"
        return f"(exists (?t - object ?o - object ?a - agent ?l - location) (and {lamp} {held}))"
    if task.kind == "pick_two_obj_and_place":
        other = f"(objectType ?p {task.thing}Type) (inReceptacle ?p ?r) (not (= ?o ?p))"
        return f"(exists (?r - receptacle ?o - object ?p - object) (and {lies} {other}))"
    return f"(exists (?r - receptacle ?o - object) (and {lies} {_STATE.get(task.kind, ('', ()))[0]}))"


def _id(kind: str, x: int, z: int) -> str:
    """Return the name of a thing as the original problems have it; a basin's ends with its kind."""
    first = kind.removesuffix("Basin")
    name = f"{first}_bar_{_number(x)}_dot_25_bar__plus_00_dot_90_bar_{_number(z)}_dot_50"
    return f"{name}_bar_{kind}" if first != kind else name


def _number(value: int) -> str:
    return f"_{'minus' if value < 0 else 'plus'}_{abs(value):02}"


def package_data(name: str) -> str:
    """Return a file of the installed package, which is not imported: that would make folders and
    set variables.
    """
    spec = importlib.util.find_spec("alfworld")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "making games needs the package alfworld: in the checkout, pip install -c constraints.txt -e '.[alfworld]'"
        )
    return (Path(spec.origin).parent / "data" / name).read_text(encoding="utf-8")


def make(folder: Path, counts: dict[str, int]) -> None:
    """Write the games of each split below `folder`/json_2.1.1."""
    domain, grammar = package_data("alfred.pddl"), package_data("alfred.twl2")
    game = acquire_game()
    for split, count in counts.items():
        for task, rng in chosen(split, count):
            said = _SAID[task.kind].format(thing=task.thing.lower(), place=task.place.lower(), lamp=_LAMP.lower())
            trial = folder / "json_2.1.1" / split / task.folder / f"trial_T2026{rng.randrange(10**4):04}_000000"
            trial.mkdir(parents=True, exist_ok=True)
            text = problem(task, rng)
            content = {
                "pddl_domain": domain,
                "grammar": grammar.replace("UNKNOWN GOAL.", said),
                "pddl_problem": text,
                "solvable": True,
            }
            game.open(content)
            content["walkthrough"] = game.plan()
            parts = {
                "object_target": task.thing,
                "parent_target": task.place,
                "toggle_target": "" if task.place else _LAMP,
            }
            trajectory = {"task_type": task.kind, "pddl_params": parts, "scene": {"scene_num": task.scene}}
            trial.joinpath("initial_state.pddl").write_text(text, encoding="utf-8")
            trial.joinpath("traj_data.json").write_text(json.dumps(trajectory), encoding="utf-8")
            trial.joinpath("game.tw-pddl").write_text(json.dumps(content), encoding="utf-8")
    game.release()


def main() -> None:
    """Make the games of the command line."""
    parser = argparse.ArgumentParser(description="Makes a small ALFWorld of invented homes.")
    parser.add_argument("folder", type=Path)
    for split, count in GAMES.items():
        parser.add_argument(f"--{split.replace('_', '-')}", type=int, default=count, dest=split)
    given = parser.parse_args()
    make(given.folder, {split: getattr(given, split) for split in GAMES})


if __name__ == "__main__":
    main()
