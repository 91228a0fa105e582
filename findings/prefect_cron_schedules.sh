#!/usr/bin/env bash
# A deployment with two schedules, one by interval and one by cron, under the oldest whenever that Prefect's own
# requirement allows, and under the next.
#
# One would assume: a version within the range that Prefect declares (whenever >=0.10.5,<0.12) works, or fails at import.
# What happens: on Python 3.11 and 3.12, where Prefect's times are pendulum's, whenever 0.10.5 refuses their time zone ("must
#   be of type ZoneInfo (exactly)"), though it is a subclass. Only cron schedules go through whenever, so schedules by
#   interval are planned and those by cron are not: the server's scheduler logs the error and goes on, the schedule stays
#   active, no run is ever started. 0.11.0 takes such a zone.
# Versions: prefect 3.9.1, pendulum 3.3.0, whenever 0.10.5 against 0.11.0, Python 3.11.
# Why it matters: a lock file that an older Prefect resolved keeps 0.10.5 when Prefect is upgraded, and a trial by interval
#   shows nothing.
#
# Needs python3.11 and a registry of packages. Takes about two minutes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/venv"
export PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1 PREFECT_LOGGING_LEVEL=CRITICAL PYTHONWARNINGS=ignore
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=300 PREFECT_CLIENT_MAX_RETRIES=0
unset PREFECT_API_URL
cd "$work"
cat > trial.py <<'PY'
import sys
from datetime import timedelta
from importlib.metadata import version

import httpx
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule


@flow
def nightly() -> None:
    pass


answers = []
for schedule in (IntervalSchedule(interval=timedelta(days=1)), CronSchedule(cron="0 3 * * *", timezone="UTC")):
    name = type(schedule).__name__
    # A server that answers with status 500 closes the connection too.
    with get_client(sync_client=True) as client:
        active = DeploymentScheduleCreate(schedule=schedule, active=True)
        deployment = client.create_deployment(client.create_flow(nightly), name, schedules=[active])
        try:
            client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment}, json={"max_runs": 3})
        except httpx.HTTPStatusError as error:
            print(f"{name}: status {error.response.status_code}")
    with get_client(sync_client=True) as client:
        runs = [run for run in client.read_flow_runs() if run.deployment_id == deployment]
    print(f"whenever {version('whenever')}: {name}, {len(runs)} runs planned")
    answers.append(len(runs) > 0)
assert answers == [True, sys.argv[1] == "both"], "this has changed"
PY
"$work/venv/bin/pip" install --quiet --disable-pip-version-check prefect==3.9.1 pendulum==3.3.0 whenever==0.10.5
"$work/venv/bin/pip" check
PREFECT_HOME="$work/older" "$work/venv/bin/python" trial.py interval
"$work/venv/bin/pip" install --quiet --disable-pip-version-check whenever==0.11.0
PREFECT_HOME="$work/newer" "$work/venv/bin/python" trial.py both
