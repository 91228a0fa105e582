#!/usr/bin/env bash
# A deployment's schedule may have parameters of its own, which override those of the deployment.
#
# One would assume: to pause a schedule and to resume it changes whether it is active, and nothing else.
# What happens: both also empty the schedule's parameters, so that every later run gets those of the deployment alone.
#   The request that the client sends is right (only `active` is in it); the server validates it into a record whose
#   `parameters` default to {}, and writes that.
# Versions: prefect 3.9.1 with SQLAlchemy 2.1.9, SQLite.
# Why it matters: a schedule that is shipped inactive, as `prefect.yaml` allows, can only be started by resuming it. A
#   nightly training then runs with other parameters than were deployed: it repeats what is done, or trains on defaults.
#
# Needs python3.11 and a registry of packages. Takes about two minutes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check prefect==3.9.1 sqlalchemy==2.1.9 fastapi==0.150.0
export PREFECT_HOME="$work/home" PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=300
unset PREFECT_API_URL
cd "$work"
cat > trial.py <<'PY'
from datetime import timedelta

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import IntervalSchedule


@flow
def nightly(more: int = 0) -> None:
    pass


with get_client(sync_client=True) as client:
    daily = DeploymentScheduleCreate(
        schedule=IntervalSchedule(interval=timedelta(days=1)), active=False, parameters={"more": 1}
    )
    deployment = client.create_deployment(client.create_flow(nightly), "trial", schedules=[daily])

    def parameters() -> dict:
        (schedule,) = client.read_deployment_schedules(deployment)
        print(f"active {schedule.active}, parameters {schedule.parameters}")
        return schedule.parameters

    before = parameters()
    (schedule,) = client.read_deployment_schedules(deployment)
    client.update_deployment_schedule(deployment, schedule.id, active=True)
    after = parameters()

assert (before, after) == ({"more": 1}, {}), "this has changed"
PY
"$work/venv/bin/python" trial.py
