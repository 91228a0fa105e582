"""Episodes of a `verifiers` taskset (0.4), many at once, each with an address of its own:
`python deployments/agents/verifiers_taskset.py http://127.0.0.1:8170 TASKSET 16`.

The recipe's `splits` are numbers of tasks: `train` are the first ones of the taskset, and any other
split the last ones. The reward is the taskset's own. `uv` must be on the path, since verifiers
runs its plainest harness with it.
"""

import asyncio
import os
import sys

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.envs.single_agent.env import SingleAgentEnv, SingleAgentEnvConfig

KEY = "AGENTR_GATEWAY_TOKEN"  # printed by a gateway that other machines reach


async def play(environment: SingleAgentEnv, task: vf.Task, base_url: str) -> dict[str, float | str]:
    """Return the reward of a task, or why there is none."""
    client = EvalClientConfig(base_url=base_url, api_key_var=KEY)
    (slot,) = environment.slots(task)
    episode = await environment.run_slot(slot, ModelContext(model="policy", client=client))
    if episode.ok:
        return {"reward": episode.traces[0].reward}
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return {"reason": "; ".join(error.message for error in errors) or "the rollout failed without a word"}


async def work(gateway: httpx.AsyncClient, environment: SingleAgentEnv, tasks: list[vf.Task]) -> None:
    while True:
        if (answer := await gateway.post("/episodes")).status_code == httpx.codes.OK:
            offer = answer.json()
            task = tasks[offer["index"] if offer["split"] == "train" else -1 - offer["index"]]
            result = await play(environment, task, offer["base_url"])
            last = "reward" if "reward" in result else "failed"
            await gateway.post(f"/episodes/{offer['episode']}/{last}", json=result)


async def main(url: str, taskset: str, at_once: int) -> None:
    os.environ.setdefault(KEY, "none")
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    environment = SingleAgentEnv(SingleAgentEnvConfig.model_validate({"taskset": {"id": taskset}, "agent": agent}))
    tasks = list(environment.taskset)
    headers = {"Authorization": f"Bearer {os.environ[KEY]}"}
    async with environment.serving(), httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as gateway:
        await asyncio.gather(*(work(gateway, environment, tasks) for _ in range(at_once)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
