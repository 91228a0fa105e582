"""Harbor's own models and validator on what `agentr export --format atif` writes.

`make test-atif` installs harbor into `.venv-harbor` and runs

    python tests/exchange/validate_atif.py .venv-harbor/bin/python

The other Python validates each file of an export and reads it into Harbor's models. A further
argument names the folder of an export; without one, trajectories of each kind are written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

TESTS = Path(__file__).parents[1]


def write(folder: Path) -> None:
    """Write samples with copied steps, with a grown turn, with calls, token ids and
    log-probabilities, and pairs.
    """
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "core"), str(TESTS.parent / "data" / "models" / "make")]
    cases = import_module("test_exports")
    from agentr_core.episodes.transcript import call_text
    from agentr_core.exchange.formats import export
    from agentr_core.exchange.training_set import SampleRow, TrainingSet

    call_sample = cases.call_reply(call_text("look", '{"at":"door"}', before="I look."), "a door")
    rows = [
        SampleRow(id=f"s{number}", sample=sample, origin=cases.ORIGIN, logprobs=((-0.5, -0.25), (float("-inf"),)))
        for number, sample in enumerate((call_sample, cases.grown_sample(), *cases.samples()))
    ]
    export(TrainingSet(name="toy-1", facts={}, samples=rows), folder / "samples", "atif")
    export(cases.pairs(), folder / "pairs", "atif")


def read_folder(folder: Path) -> None:
    """Validate and read all trajectories of a folder with Harbor; fail unless they are what the
    files say.
    """
    validator = import_module("harbor.utils.trajectory_validator").TrajectoryValidator()
    model = import_module("harbor.models.trajectories").Trajectory
    files = sorted(folder.rglob("trajectories/*.json"))
    num_calls = num_logprobs = num_copied = 0
    for file in files:
        assert validator.validate(file), (file, validator.errors)
        data = json.loads(file.read_text(encoding="utf-8"))
        read_back = model.model_validate(data)
        for step, record in zip(read_back.steps, data["steps"], strict=True):
            assert step.model_dump(exclude_none=True, mode="json") == _without_nulls(record), (file, step)
            num_calls += len(step.tool_calls or ())
            num_logprobs += len((step.metrics and step.metrics.logprobs) or ())
            num_copied += bool(step.is_copied_context)
    assert files, f"{folder} has no trajectory"
    counts = f"{num_calls} calls, {num_logprobs} log-probabilities, {num_copied} copied steps"
    print(f"harbor {version('harbor')}: {len(files)} trajectories read, with {counts}")  # noqa: T201


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def main() -> None:
    """Write here and read with the Python that is named, or read here."""
    if sys.argv[1] == "--read":
        read_folder(Path(sys.argv[2]))
        return
    with TemporaryDirectory() as folder:
        if len(sys.argv) == 2:
            write(Path(folder))
        subprocess.run([sys.argv[1], __file__, "--read", *(sys.argv[2:] or [folder])], check=True)


if __name__ == "__main__":
    main()
