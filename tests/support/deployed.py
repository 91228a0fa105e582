"""The shipped deployments on a Prefect server of a test."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import httpx
from readme import ROOT
from servers import PREFECT, wait_for


def prefect(*words: str, env: Mapping[str, str]) -> str:
    done = subprocess.run([PREFECT, *words], cwd=ROOT, env=dict(env), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def deploy(name: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Make one of the shipped deployments; return it."""
    prefect("--no-prompt", "deploy", "--prefect-file", "deployments/prefect.yaml", "-n", name, env=env)
    flow, own = name.split("/")
    wanted = {"deployments": {"name": {"any_": [own]}}, "flows": {"name": {"any_": [flow]}}}
    (found,) = wait_for(f"{env['PREFECT_API_URL']}/deployments/filter", wanted)
    return dict(found)


def runs_of(deployment: dict[str, Any], env: Mapping[str, str]) -> list[dict[str, Any]]:
    wanted = {"deployments": {"id": {"any_": [deployment["id"]]}}}
    answer = httpx.post(f"{env['PREFECT_API_URL']}/flow_runs/filter", json=wanted, timeout=60)
    found: list[dict[str, Any]] = answer.raise_for_status().json()
    return found
