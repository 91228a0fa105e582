#!/usr/bin/env bash
# A deployment with an active schedule, on a Prefect server that pip has resolved without complaint.
#
# One would assume: versions that `pip check` accepts plan the runs of a schedule, or else something shows that they do not.
# What happens: with SQLAlchemy 2.1 the insert of planned runs is refused ("Can't evaluate bulk DML statement"), in the
#   server's log only. The schedule stays active, the deployment looks healthy, and no run is ever started. Asked for runs
#   over its API, the server answers 503; with SQLAlchemy below 2.1 the same request gives three runs.
# Versions: prefect 3.8.8 with sqlalchemy 2.1.9, against sqlalchemy 2.0.51; prefect 3.9.1 works with both.
# Why it matters: 3.8.8 sets no upper bound, so an environment that was made anew stops its nightly trainings in silence.
#
# Needs python3.11 and a registry of packages. Takes about three minutes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
export PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1 PREFECT_LOGGING_LEVEL=CRITICAL
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=300 PREFECT_CLIENT_MAX_RETRIES=0
unset PREFECT_API_URL
cd "$work"
cat > trial.py <<'PY'
import sys
from datetime import timedelta

import httpx
import sqlalchemy
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import IntervalSchedule


@flow
def nightly() -> None:
    pass


with get_client(sync_client=True) as client:
    daily = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(days=1)), active=True)
    deployment = client.create_deployment(client.create_flow(nightly), "trial", schedules=[daily])
    try:
        client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment}, json={"max_runs": 3})
        answer = "planned"
    except httpx.HTTPStatusError as error:
        answer = f"status {error.response.status_code}"
    runs = [run for run in client.read_flow_runs() if run.deployment_id == deployment]
    print(f"sqlalchemy {sqlalchemy.__version__}: {answer}, {len(runs)} runs")
assert (answer, len(runs) > 0) == (sys.argv[1], sys.argv[1] == "planned"), "this has changed"
PY
"$work/venv/bin/pip" install --quiet --disable-pip-version-check prefect==3.8.8 sqlalchemy==2.1.9 fastapi==0.150.0
"$work/venv/bin/pip" check
PREFECT_HOME="$work/newer" "$work/venv/bin/python" trial.py "status 503"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check sqlalchemy==2.0.51
PREFECT_HOME="$work/older" "$work/venv/bin/python" trial.py planned
