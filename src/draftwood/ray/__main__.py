"""`python -m draftwood.ray`: replicas on this machine's Ray, or on the cluster that RAY_ADDRESS names."""

from __future__ import annotations

import argparse
import os
import time

from draftwood.config import EngineConfig
from draftwood.errors import InvalidRequest
from draftwood.server.config import ServerConfig


def main() -> None:
    """Until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m draftwood.ray", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--tree")
    parser.add_argument("--weights", default="stored")
    parser.add_argument("--threads", type=int, default=1, help="of each replica; also the CPUs that Ray sets aside")
    parser.add_argument("--gpus", type=float, default=0.0, help="of each replica")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--max-replicas", type=int, default=0, help="more than --replicas: as many as there is work for"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--allowed-host", action="append", default=[], help="a name clients call the front by")
    flags = parser.parse_args()
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray import serve  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    except ImportError as error:
        raise InvalidRequest("Replicas need Ray: pip install 'draftwood[serve,ray]'.") from error
    from draftwood.ray.deployment import ReplicaOptions, application

    keys = tuple(filter(None, [os.environ.get("DRAFTWOOD_API_KEY")]))
    options = ReplicaOptions(
        flags.model,
        ServerConfig(flags.model, api_keys=keys, allowed_hosts=(flags.host, *flags.allowed_host)),
        flags.drafter,
        flags.tree,
        engine=EngineConfig(weights=flags.weights, threads=flags.threads),
    )
    ray.init(include_dashboard=False, log_to_driver=False)  # pyright: ignore[reportAttributeAccessIssue]
    serve.start(http_options={"host": flags.host, "port": flags.port})
    most = max(flags.replicas, flags.max_replicas)
    serve.run(application(options, (flags.replicas, most), flags.threads, flags.gpus), name="draftwood")
    print(f"{flags.replicas} replicas of {flags.model} at http://{flags.host}:{flags.port}/v1", flush=True)  # noqa: T201
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()
