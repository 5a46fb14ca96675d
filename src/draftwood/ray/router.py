"""Ray's way to a replica, by how a prompt begins."""

from __future__ import annotations

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from draftwood.ray.ranking import ranked


class PrefixRouter(RequestRouter):
    """For handles of `Replica`, whose first argument is a `Forwarded`."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, the best first."""
        if not candidate_replicas:
            return []
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        queues = self.replica_queue_len_cache
        busy = {name: queues.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        given = pending_request.args if pending_request is not None else ()
        prefix = given[0].prefix if given else ""
        return [[by_name[name] for name in group] for group in ranked(prefix, busy)]
