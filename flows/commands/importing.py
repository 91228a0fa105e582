"""Convert files of other programs to files that recipes read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentr_core.errors import ConfigError, DataFileError
from agentr_core.exchange.imports import (
    EXPERT,
    GENERAL,
    PAIRS,
    ImportResult,
    Target,
    import_chat,
    import_experts,
    import_pairs,
    read_tools,
)
from agentr_core.recipes.eto import ExpertConfig
from agentr_core.samples.chat_file import World, ignored_fields_text
from agentr_core.system import write_text
from agentr_core.texts import MAX_FAULTS_LISTED, count_text
from flows.commands.environments import MAX_SERVED
from tasks.wiring import named_environment

_SHOWN = 500
"""The most characters of a fault that are shown, since it may quote a long value."""


def import_file(
    source: Path,
    target: Path,
    use: str,
    *,
    environment: str,
    options: Mapping[str, Any],
    split: str,
    opening: int,
    skip_bad: bool,
    tools: Path | None = None,
    say: Callable[[str], Any],
) -> str:
    """Check the records of a file, write them to a new file that a recipe can read, and return a
    line that says what was written.

    Args:
        use: expert, pairs or general; the first two need an environment.
        opening: for expert: the number of turns before the one with the problem.
        skip_bad: leave out records that are not sound; otherwise nothing is written if there is
            one.
        tools: for general: a file with the definitions of tools for records that have none.
        say: called with a sentence about each of the first unsound records, one about the number of
            the others, and one about the fields that are left out.

    Raises:
        DataFileError: the file cannot be read, has a record that is not sound, or no sound one.
        ConfigError: the environment or the split is unknown, or the target is there already.
        DiskError: the target cannot be written.
    """
    if target.exists():
        raise ConfigError(f"{target} is there already; name a new file")
    if use == "general":
        records, setting = import_chat(source, None if tools is None else read_tools(tools)), GENERAL
    elif use == "expert":
        records, setting = import_experts(source, _place(environment, options, split), opening=opening), EXPERT
    else:
        records, setting = import_pairs(source, _place(environment, options, split)), PAIRS
    for fault in records.faults[:MAX_FAULTS_LISTED]:
        say(fault if len(fault) <= _SHOWN else f"{fault[:_SHOWN]}…")
    if more := records.faults[MAX_FAULTS_LISTED:]:
        say(f"and {count_text(len(more), 'more record')} {'is' if len(more) == 1 else 'are'} not sound")
    # All turns are written, so the recipe must skip as many before the problem.
    also = f", with eto.expert.opening: {opening}" if use == "expert" and opening != ExpertConfig().opening else ""
    summary = _write(records, source, target, skip_bad=skip_bad)
    if records.num_ignored_by_field:
        say(ignored_fields_text(records.num_ignored_by_field))
    return f"{summary}; a recipe takes them as {setting}{also}"


def _write(records: ImportResult, source: Path, target: Path, *, skip_bad: bool) -> str:
    count = len(records.faults)
    if count and not skip_bad:
        raise DataFileError(
            f"{count} of {count + len(records.lines)} records of {source} are not sound, so nothing was written; "
            "correct them, or leave them out with --skip-bad"
        )
    if not records.lines:
        raise DataFileError(f"{source} has no sound record; there must be an object on each line, or one array of them")
    write_text(target, "".join(f"{line}\n" for line in records.lines))
    left_out = f", {count} left out" if count else ""
    return f"{count_text(len(records.lines), 'record')} in {target}{left_out}"


def _place(environment: str, options: Mapping[str, Any], split: str) -> Target:
    if not environment:
        raise ConfigError("instances are of an environment; name it with --environment")
    env = named_environment(environment, options)
    try:
        instances = env.instances(split)
        known_instances = frozenset(instances) if len(instances) <= MAX_SERVED else None
        return Target(world=World(env.name, environment), split=split, known_instances=known_instances)
    finally:
        env.close()
