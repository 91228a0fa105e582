"""Write the general data of the recipes for TextCraft, each conversation on a line, as
`data.general.file` takes it.

    python data/textcraft/general.py

`general.jsonl` is what the shipped base learned from, in conversations that it never saw.
`judgements.jsonl` is for a model that was never taught to judge: the judge's question about an
action of an expert that errs, and the oracle's verdict with its reason.

The settings are those of `data/models/make/textcraft-tiny.yaml`, with other seeds. Drills
are left out, and episodes with mistakes that the base was not trained on: every assistant turn of
general data is trained.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "models" / "make"))

from base_settings import BaseConfig, load
from crafting_samples import Curriculum

HERE = Path(__file__).resolve().parent
SETTINGS = HERE.parent / "models" / "make" / "textcraft-tiny.yaml"


def conversations(config: BaseConfig, *, seed: int, number: int) -> str:
    """Return the first conversations of a curriculum without drills, a line each."""
    lines = (
        json.dumps({"messages": [{"role": message.role, "content": message.text} for message in sample.messages]})
        for sample in itertools.islice(Curriculum(replace(config, drills=0), seed), number)
    )
    return "".join(f"{line}\n" for line in lines)


def texts() -> dict[str, str]:
    """Return the text of each file by its name."""
    base = load(SETTINGS)
    return {
        "general.jsonl": conversations(replace(base, mistake_share=0.0), seed=1, number=400),
        "judgements.jsonl": conversations(replace(base, judge_share=1.0), seed=2, number=300),
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (HERE / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{text.count(chr(10))} conversations are in {HERE / name}\n")
