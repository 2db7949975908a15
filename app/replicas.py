"""Ray Serve's choice of a replica: the one that the request names."""

from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from app.contracts.exchange import PoolRequest


class NamedReplicaRouter(RequestRouter):
    """Sends a `PoolRequest` to its replica; to any other if that one has gone."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Sequence[list[RunningReplica]]:
        if pending_request is not None:
            # Else Serve would ask again at once, without end, while the replica is full.
            pending_request.routing_context.should_backoff = True
        named = _name(pending_request)
        if named is not None:
            chosen = [r for r in candidate_replicas if r.replica_id.unique_id == named]
            if chosen:
                return [chosen]
        return [candidate_replicas]


def _name(pending: PendingRequest | None) -> str | None:
    if pending is None or not pending.args or not isinstance(pending.args[0], PoolRequest):
        return None
    return pending.args[0].replica
