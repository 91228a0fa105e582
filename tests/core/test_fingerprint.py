"""Content ids: equal for equal content, different for different content, and the same in every
process and version.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from agentr_core.fingerprint import canonical, derive_seed, fingerprint
from agentr_core.types import Instance, SampleKind


@dataclass(frozen=True)
class Point:
    x: int
    y: tuple[int, ...] = ()


def test_one_text_for_one_value() -> None:
    assert canonical({"b": 1, "a": (1, 2)}) == canonical({"a": [1, 2], "b": 1}) == '{"a":[1,2],"b":1}'
    assert canonical(Point(1, (2,))) == '{"x":1,"y":[2]}'
    assert canonical([Instance(environment="é", split="s", index=0), SampleKind.GOOD]) == (
        '[{"environment":"é","index":0,"split":"s"},"good"]'
    )


def test_parts_do_not_run_together() -> None:
    ids = [fingerprint("ab", "c"), fingerprint("a", "bc"), fingerprint("abc"), fingerprint(["a", "bc"]), fingerprint()]
    assert len(set(ids)) == len(ids)
    assert fingerprint(1) != fingerprint("1")
    assert fingerprint(None) != fingerprint("")


def test_what_has_no_canonical_form_is_refused() -> None:
    for value in ({1, 2}, object(), Point, b"bytes"):
        with pytest.raises(TypeError, match="cannot fingerprint a"):
            fingerprint(value)


def test_ids_of_stored_work_never_change() -> None:
    assert fingerprint("tree", 1, Point(1)) == "f6cc5c1ed126a0ae"
    assert derive_seed(0, "tree", 1) == 5973753357822260517


def test_another_process_finds_the_same() -> None:
    code = "from agentr_core.fingerprint import *; print(fingerprint({'b': 1, 'a': 2}), derive_seed(1, 'x'))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.decode()
        for seed in ("1", "2")
    }
    assert outputs == {f"{fingerprint({'a': 2, 'b': 1})} {derive_seed(1, 'x')}\n"}


def test_seeds_are_spread_over_63_bits() -> None:
    seeds = [derive_seed(0, i) for i in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62 > min(seeds)
