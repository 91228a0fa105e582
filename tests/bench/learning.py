"""Does the wheel teach? Held-out success of three arms, each trained on the same number of tokens,
over several seeds.

    python tests/bench/learning.py --seeds 0 1 2 --workspace runs/learning

Arms: `agent-r` is the recipe as it is; `good-only` trains on the good trajectories of the same
search; `cloning` trains on the expert's episodes of as many training instances. All start from the
same model; every arm and seed is a run of its own in one store, and a run that is finished is not
repeated. The table has means over seeds with 95% t-intervals.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentr_core.evaluation.metrics import mean_over_seeds
from agentr_core.store.database import Store
from tasks.wiring import load_recipe, run_reference
from tasks.workspaces import STORE_FILE

RECIPE = Path("deployments/recipes/textcraft-tiny.yaml")
ARMS: dict[str, tuple[str, ...]] = {
    "agent-r": (),
    "good-only": ("data.use=good",),
    "cloning": ("data.use=expert", "environment.options.expert=lazy"),
}


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--workspace", type=Path, default=Path("runs/learning"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("-o", "--override", action="append", default=[])
    options = parser.parse_args()
    options.workspace.mkdir(parents=True, exist_ok=True)
    runs = [(arm, seed, changes(arm, seed, options)) for seed in options.seeds for arm in options.arms]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda item: run(options.workspace, *item), runs))
    sys.stdout.write(table(runs, options.workspace))


def changes(arm: str, seed: int, options: argparse.Namespace) -> list[str]:
    """Return the overrides of one run."""
    return [*ARMS[arm], f"seed={seed}", f"workspace={options.workspace}", *options.override]


def run(workspace: Path, arm: str, seed: int, overrides: list[str]) -> None:
    """Run the recipe in a process of its own; its output goes to a log in the workspace."""
    command = [sys.executable, "-m", "flows.cli", "run", str(RECIPE)]
    for override in overrides:
        command += ["-o", override]
    with (workspace / f"{arm}-{seed}.log").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


def table(wanted: list[tuple[str, int, list[str]]], workspace: Path) -> str:
    """Return a Markdown table: success on the held-out instances and in the revision test, by arm
    and iteration.
    """
    store = Store(workspace / STORE_FILE)
    lines = ["| arm | iteration | success | revision test | seeds |", "|---|---|---|---|---|"]
    for arm in dict.fromkeys(name for name, _, _ in wanted):
        ids = [run_reference(load_recipe(RECIPE, overrides)).run_id for name, _, overrides in wanted if name == arm]
        frame = store.query(
            "select iteration, success, revision_success from v_iterations "
            "where run_id in (select unnest($ids)) order by 1",
            {"ids": ids},
        )
        for iteration, rows in frame.groupby("iteration"):
            success = _cell(rows["success"].tolist())
            recovery = _cell(rows["revision_success"].dropna().tolist())
            lines.append(f"| {arm} | {iteration} | {success} | {recovery} | {len(rows)} |")
    return "\n".join(lines) + "\n"


def _cell(scores: list[float]) -> str:
    if len(scores) < 2:
        return f"{100 * scores[0]:.1f}" if scores else "-"
    estimate = mean_over_seeds(scores)
    return f"{100 * estimate.mean:.1f} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


if __name__ == "__main__":
    main()
