"""Write the general data of the tiny recipes: what the shipped base learned from, in conversations
that it never saw.

    python data/textcraft/general.py

Its settings are those of `deployments/recipes/textcraft-tiny-base.yaml`, with another seed. Drills
are left out, and episodes with mistakes that the base was not trained on: every assistant turn of
general data is trained.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

from agentr_core.base_model.curriculum import Curriculum
from agentr_core.recipes import load

HERE = Path(__file__).resolve().parent
FILE = HERE / "general.jsonl"
RECIPE = HERE.parents[1] / "deployments" / "recipes" / "textcraft-tiny-base.yaml"
SEED = 1
CONVERSATIONS = 400


def conversations() -> str:
    """Return the file: a conversation on each line, as `data.general.file` takes it."""
    base = load(RECIPE, []).base
    curriculum = Curriculum(replace(base, mistake_share=0.0, drills=0), SEED)
    lines = (
        json.dumps({"messages": [{"role": message.role, "content": message.text} for message in sample.messages]})
        for sample in itertools.islice(curriculum, CONVERSATIONS)
    )
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(conversations(), encoding="utf-8")
    sys.stdout.write(f"{CONVERSATIONS} conversations are in {FILE}\n")
