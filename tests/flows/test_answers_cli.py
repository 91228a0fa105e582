"""`agentr eval --answers`: what a file of another system's replies is refused for."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentr_core.errors import DataFileError
from flows.commands.answering import score_answers

RECIPE = Path("deployments/recipes/textcraft-tiny.yaml")


def test_a_file_without_a_record_is_told(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("\n", encoding="utf-8")
    with pytest.raises(DataFileError, match=f"{answers} has no record; there must be an object on each line"):
        score_answers(RECIPE, [f"workspace={tmp_path}"], answers, opening=2)
