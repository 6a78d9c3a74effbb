"""The Ray Serve application: replicas of the server behind a gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from ..cli import serve as cli
from .flags import namespace
from .gateway import Gateway
from .replica import Replica

ROUTER = "hf_paged.ray.router.PrefixRouter"
SEQUENCES = 256
"""That an engine runs at once unless a flag says otherwise."""
STATS_SECONDS = 2.0


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application, for `import_path: hf_paged.ray:app` and `serve run hf_paged.ray:app model=demo`.

    args: `model` and flags of `hf-paged serve` by their names; `replicas` (2), unless the file has
    num_replicas or autoscaling_config of the deployment Replica; `routing`, the fields of LoadBound. Engines
    admit by the future peak unless `admission` says otherwise, because autoscaling is by it.
    """
    options: dict[str, Any] = {"admission": "future", **args}
    replicas = int(options.pop("replicas", 2))
    routing = dict(options.pop("routing", None) or {})
    given = namespace(options)
    limits = cli.server_options(given, "model").limits
    replica = serve.deployment(
        Replica,
        name="Replica",
        num_replicas=replicas,
        max_ongoing_requests=(given.max_num_seqs or SEQUENCES) + limits.waiting,
        graceful_shutdown_timeout_s=limits.drain_seconds,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs=routing,
            request_routing_stats_period_s=STATS_SECONDS,
        ),
    )
    gateway = serve.deployment(
        Gateway,
        name="Gateway",
        max_ongoing_requests=limits.connections,
        graceful_shutdown_timeout_s=limits.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    )
    return gateway.bind(replica.bind(options), options)
