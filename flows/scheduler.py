"""Check whether a Prefect server plans scheduled runs. A server that fails to do so says it only in
its own log, and still shows its schedules as active.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import FlowFilter, FlowFilterId
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from agentr_core.errors import ConfigError
from flows import server

MONTH = timedelta(days=30)
"""The interval of the test schedules: so long that none of their runs is due during the test."""


def scheduler_line(*, timeout_seconds: float = 75) -> str:
    """Return a line that says which server plans scheduled runs, or that there is none.

    The server that PREFECT_API_URL names is tested with a temporary deployment, which is deleted
    again. Raises `ConfigError` if it is not a Prefect server, or does not plan the runs.

    Args:
        timeout_seconds: how long to wait until a run is planned. The server's scheduler looks at
            new deployments every 5 seconds and at all of them every 60.
    """
    address = PREFECT_API_URL.value()
    if not address:
        return "scheduler: none, since PREFECT_API_URL names no server; a run has one of its own, until it ends"
    server.ensure_server()
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow_from_name(f"agentr-doctor-{uuid4().hex}")
        try:
            now = datetime.now(UTC)
            # The server has separate code for each kind of schedule, so either can fail alone.
            monthly = IntervalSchedule(interval=MONTH, anchor_date=now + MONTH)
            by_cron = CronSchedule(cron=f"0 0 {min((now + MONTH / 2).day, 28)} * *", timezone="UTC")
            deployment = client.create_deployment(
                flow_id,
                "doctor",
                schedules=[DeploymentScheduleCreate(schedule=schedule) for schedule in (monthly, by_cron)],
            )
            # This requests one run of each schedule; any further run was planned by the scheduler.
            # Without the setting, the client would retry a failed request for minutes.
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                client.request(
                    "POST", "/deployments/{id}/schedule", path_params={"id": deployment}, json={"max_runs": 1}
                )
            deadline = time.monotonic() + timeout_seconds
            while client.count_flow_runs(flow_filter=FlowFilter(id=FlowFilterId(any_=[flow_id]))) <= 2:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"the Prefect server at {address} planned no run within {timeout_seconds:g} seconds, so no "
                        "schedule fires; start it without --no-services, or its services beside it with `prefect "
                        "server services start`"
                    )
                time.sleep(0.5)
        except httpx.HTTPStatusError as error:
            raise ConfigError(
                f"the Prefect server at {address} fails to plan a run (status {error.response.status_code}, its log "
                "has the reason), so no schedule fires; install it with the versions of constraints.txt"
            ) from error
        finally:
            client.delete_flow(flow_id)
    return f"scheduler: the server at {address} plans the runs of schedules"
