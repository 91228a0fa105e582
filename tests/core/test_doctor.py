"""`agentr env doctor` on as many instances as asked, with gold answers, and doing nothing."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from combination_lock import CombinationLock

from agentr_core.environments import contract, registry
from agentr_core.environments.contract import check
from agentr_core.environments.gold import Gold, read_gold
from agentr_core.errors import ConfigError, DataFileError
from agentr_core.types import Grade, Instance, Trajectory, Transition
from flows.cli import cli

SECRETS = {3: "8 5 1", 4: "4 6 8"}


def lock(index: int, split: str = "train") -> Instance:
    return Instance(environment="combination-lock", split=split, index=index)


class Patient(CombinationLock):
    """Opens by itself after a while."""

    waited = 0

    def reset(self, instance: Instance) -> str:
        self.waited = 0
        return super().reset(instance)

    def step(self, action: str) -> Transition:
        self.waited += not action
        opens = self.waited == 3
        return Transition("It opens.", 1.0, True, False, {"success": True}) if opens else super().step(action)


class Strict:
    """Grants nothing for what the template's expert does."""

    asks = None

    def rule(self, trajectory: Trajectory) -> Grade | None:
        return Grade(reward=0.0, success=False)


class StrictLock(CombinationLock):
    grader = Strict()  # type: ignore[assignment]


def test_doing_nothing_must_not_win() -> None:
    faults = check(Patient)
    assert {fault.rule for fault in faults} == {"idle"}
    assert faults[0].detail == "combination-lock/train/133: doing nothing wins"


def test_the_rule_of_a_grader_says_whether_the_expert_wins() -> None:
    assert {fault.rule for fault in check(StrictLock)} == {"expert"}


def test_as_many_instances_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    instances: list[Instance] = []
    assert check(CombinationLock, instances_per_split=5, on_instance=instances.append) == ()
    reports: list[tuple[int, int, str]] = []
    check(CombinationLock, instances_per_split=2, progress=lambda *report: reports.append(report))
    names = [f"instances of split {split} played" for split in ("train", "test")]
    assert reports == [(num_done, 2, name) for name in names for num_done in range(3)]
    assert [instance.index for instance in instances] == [80, 240, 400, 560, 720, 820, 860, 900, 940, 980]
    monkeypatch.setattr(contract, "ALL_INSTANCES", 500)
    with pytest.raises(ConfigError, match="split train of combination-lock has 800 instances, too many to play all"):
        check(CombinationLock, instances_per_split=500)


def test_gold_answers_must_win() -> None:
    right = {lock(index): [f"Action: try {secret}"] for index, secret in SECRETS.items()}
    assert check(CombinationLock, gold=right) == ()
    faults = check(CombinationLock, gold=right | {lock(3): ["Action: try 1 1 1"], lock(4): ["No idea."]})
    assert [(fault.rule, fault.detail.partition(": ")[2]) for fault in faults] == [
        ("gold", "the gold answer does not succeed"),
        ("parse", "a gold reply has no action"),
        ("gold", "the gold answer does not succeed"),
    ]
    with pytest.raises(ConfigError, match="has no instance combination-lock/train/900; correct the gold answers"):
        check(CombinationLock, gold={lock(900): ["Action: try 1 1 1"]})
    with pytest.raises(ConfigError, match="has no split dev; it has train, test"):
        check(CombinationLock, gold={lock(900, "dev"): ["Action: try 1 1 1"]})


def test_a_file_of_gold_answers(tmp_path: Path) -> None:
    file = tmp_path / "gold.jsonl"
    file.write_text('{"id": "w/test/3", "answer": 42}\n{"id": 4, "answer": ["a", "b"], "replies": ["look"]}\n')
    assert read_gold(file, world="w") == {
        Instance(environment="w", split="test", index=3): Gold(answers=("42",)),
        Instance(environment="w", split="train", index=4): Gold(answers=("a", "b"), replies=("look",)),
    }
    for text, message in {
        '{"id": 3}': r"gold.jsonl:1: there is neither answer nor replies; give one of them",
        '{"id": 3, "answer": true}': r"gold.jsonl:1: answer has True; it must be a text or a number, or a list",
        '{"id": 3, "answer": " "}': r"gold.jsonl:1: answer has ' '; it must be a text or a number",
        '{"id": 3, "answer": "a"}\n{"id": 3, "answer": "b"}': r"gold.jsonl:2: w/train/3 is there twice",
        "\n": "has no gold answers; write one JSON object on each line",
    }.items():
        file.write_text(text)
        with pytest.raises(DataFileError, match=message):
            read_gold(file, world="w")


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORY_BY_NAME", {"combination-lock": CombinationLock})
    monkeypatch.setattr(registry, "entry_points", lambda **_: [SimpleNamespace(name="combination-lock")])


@pytest.mark.slow
@pytest.mark.usefixtures("_registered")
def test_the_doctor_plays_gold_answers_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "gold.jsonl"
    file.write_text(
        "".join(json.dumps({"id": index, "answer": f"try {answer}"}) + "\n" for index, answer in SECRETS.items())
    )
    doctor = ["env", "doctor", "combination-lock", "--gold", str(file)]
    result = CliRunner().invoke(cli, doctor, catch_exceptions=False)
    assert (result.exit_code, result.output) == (0, "combination-lock: ok - keeps the contract on 2 of train\n")
    file.write_text('{"id": 3, "answer": "try 1 1 1"}\n')
    result = CliRunner().invoke(cli, [*doctor, "--format", "json"], catch_exceptions=False)
    (report,) = json.loads(result.output)
    assert (result.exit_code, report["instances"]) == (1, {"train": 1})
    detail = "combination-lock/train/3: the gold answer does not succeed"
    assert report["violations"] == [{"rule": "gold", "detail": detail}]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--instances", "0"], "'0' is no number from 1, and not all"),
        (["--instances", "some"], "'some' is no number from 1, and not all"),
    ],
)
def test_numbers_of_instances_that_are_none(words: list[str], told: str) -> None:
    result = CliRunner().invoke(cli, ["env", "doctor", "combination-lock", *words])
    assert result.exit_code == 2
    assert told in result.output


@pytest.mark.slow
def test_an_answer_is_given_as_the_world_reads_it() -> None:
    reasoning = registry.make("reasoning", {"tools": []})
    try:
        question = reasoning.instances("train")[0]
        gold = reasoning.problem(question).golds[0]  # type: ignore[attr-defined]
        reasoning.reset(question)
        assert reasoning.step(reasoning.parse(reasoning.reply_with(gold))).info["success"]
    finally:
        reasoning.close()
