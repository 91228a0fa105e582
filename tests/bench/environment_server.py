"""TextCraft behind HTTP, one request a step, as AgentGym serves it; prints its port once it
listens.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import uvicorn
from fastapi import FastAPI

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.types import Instance


def application() -> FastAPI:
    """Return the application; an environment lives as long as it does."""
    app = FastAPI()
    environments: list[TextCraft] = []

    @app.post("/create")
    async def create() -> dict[str, int]:
        environments.append(TextCraft())
        return {"id": len(environments) - 1}

    @app.post("/reset")
    async def reset(body: dict[str, Any]) -> dict[str, str]:
        instance = Instance(environment="textcraft", split=body["split"], index=body["index"])
        return {"observation": environments[body["id"]].reset(instance)}

    @app.post("/step")
    async def step(body: dict[str, Any]) -> dict[str, Any]:
        return dict(environments[body["id"]].step(body["action"])._asdict())

    @app.get("/processor_seconds")
    async def processor_seconds() -> float:
        return time.process_time()

    return app


async def serve() -> None:
    """Serve on a free port until the process is ended."""
    server = uvicorn.Server(uvicorn.Config(application(), port=0, log_level="critical", ws="none"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    sys.stdout.write(f"{server.servers[0].sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await serving


if __name__ == "__main__":
    asyncio.run(serve())
