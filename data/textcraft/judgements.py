"""Write judged steps for a model that was never taught to judge: the judge's question about an
action, and the oracle's verdict with its reason.

    python data/textcraft/judgements.py

The episodes are of an expert that errs in invented worlds; no official goal is among them. Section
`base` of `deployments/recipes/textcraft-tiny-base.yaml` says how they are drawn, with another seed.
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
FILE = HERE / "judgements.jsonl"
RECIPE = HERE.parents[1] / "deployments" / "recipes" / "textcraft-tiny-base.yaml"
SEED = 2
CONVERSATIONS = 300


def conversations() -> str:
    """Return the file: a conversation on each line, as `data.general.file` takes it."""
    base = load(RECIPE, []).base
    curriculum = Curriculum(replace(base, judge_share=1.0, drills=0), SEED)
    lines = (
        json.dumps({"messages": [{"role": message.role, "content": message.text} for message in sample.messages]})
        for sample in itertools.islice(curriculum, CONVERSATIONS)
    )
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(conversations(), encoding="utf-8")
    sys.stdout.write(f"{CONVERSATIONS} conversations are in {FILE}\n")
