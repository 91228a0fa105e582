"""From a trained base model to its directory."""

from __future__ import annotations

import json
import shutil
from typing import Any

from agentr_core.base_model.job import BaseJob, record_file


def publish(job: BaseJob, model: Any, tokenizer: Any) -> None:
    """Write the directory of a finished model, all at once. Another model in its place is moved
    aside.
    """
    output = job.output
    draft = output.with_name(output.name + ".new")
    shutil.rmtree(draft, ignore_errors=True)
    model.config.use_cache = True  # the trainer turns it off
    model.float().save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    record_file(draft).write_text(json.dumps(job.record, indent=2) + "\n", encoding="utf-8")
    if output.exists():
        output.rename(output.with_name(f"{output.name}.before-{job.key}"))
    draft.rename(output)
