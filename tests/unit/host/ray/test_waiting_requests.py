"""Requests to deployments without a replica."""

from __future__ import annotations

import asyncio

from host.ray.waiting_requests import WaitingRequests
from tests.waiting import eventually


def test_requests_are_given_up_only_if_their_deployment_has_no_replica() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        asked: list[str] = []

        async def has_replica(name: str) -> bool:
            asked.append(name)
            # A replica that returns after some time is in time.
            return name == "busy" or (name == "late" and asked.count(name) == 5)

        waiting = WaitingRequests(has_replica, check_seconds=0)
        gone = {name: loop.create_future() for name in ("busy", "late", "deserted")}
        requests = {name: waiting.add(name, lambda: None) for name in ("busy", "late")}
        lost = waiting.add("deserted", lambda: gone["deserted"].set_result(None))
        await gone["deserted"]
        await eventually(lambda: asked.count("late") >= 5, "the replica to be back")
        assert lost.given_up and not any(one.given_up for one in requests.values())
        for request in (lost, *requests.values()):
            waiting.discard(request)
        await eventually(lambda: len(asyncio.all_tasks()) == 1, "the checks to end")

    asyncio.run(main())
