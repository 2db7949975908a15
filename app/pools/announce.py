"""Tells every router replica what a pool replica holds, through Ray Serve."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from app.contracts.pool import PoolSnapshot

logger = logging.getLogger(__name__)

# A router that has not taken a snapshot by then will have the next one.
TOLD_LIMIT_S = 2.0


def announcer(deployment: str) -> tuple[str, Callable[[PoolSnapshot], Awaitable[None]]]:
    """This replica's name, and a way to tell all replicas of `deployment`, which has `told`."""
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(deployment, context.app_name)
    telling: set[asyncio.Task[None]] = set()

    async def tell(snapshot: PoolSnapshot) -> None:
        try:
            broadcast = handle.broadcast("told", snapshot)
            await broadcast.results_async(timeout_s=TOLD_LIMIT_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.debug("no router was told: %s", type(error).__name__)

    async def announce(snapshot: PoolSnapshot) -> None:
        # Not waited for: a router that hangs keeps no news from the others.
        task = asyncio.create_task(tell(snapshot))
        telling.add(task)
        task.add_done_callback(telling.discard)

    return context.replica_id.unique_id, announce
