"""Shared by what runs the Ray Serve application live: the application, its replicas' actors, its clients."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

GUARD = 240
"""Seconds after which something hangs."""
DEMO = {"num-blocks": 1500, "block-size": 8, "max-num-seqs": 32, "log-level": "error"}
YAML = Path(__file__).parents[2] / "deploy" / "ray.yaml"
NAME = "hf-paged"
DEPLOYMENT = "Replica"


@contextmanager
def local_ray(cpus: int) -> Iterator[None]:
    """Ray on this machine, with logical CPUs: each process has one thread."""
    ray.init(
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        runtime_env={
            "env_vars": {
                "OMP_NUM_THREADS": "1",
                "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
            }
        },
    )
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Application:
    """The application behind an address."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=GUARD)

    def deploy(self, args: dict[str, Any] | None = None, **replica: Any) -> None:
        """Deploy deploy/ray.yaml, or deploy it anew, with other arguments and another Replica."""
        config = yaml.safe_load(YAML.read_text())
        (application,) = config["applications"]
        application["args"] |= args or {}
        application["deployments"][0] |= replica
        for name in [name for name, value in application["deployments"][0].items() if value is None]:
            del application["deployments"][0][name]
        config["http_options"]["port"] = self._port
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)
        until(lambda: serve.status().applications[NAME].status != ApplicationStatus.DEPLOYING)
        state = serve.status().applications[NAME]
        assert state.status == ApplicationStatus.RUNNING, state.message

    @property
    def states(self) -> dict[str, int]:
        """How many replicas there are in each state."""
        return dict(serve.status().applications[NAME].deployments[DEPLOYMENT].replica_states)

    def actors(self) -> list[str]:
        """The names of the replicas' actors."""
        named = ray.util.list_named_actors(all_namespaces=True)
        return sorted(each["name"] for each in named if f"#{DEPLOYMENT}#" in each["name"])

    def kill(self, actor: str) -> None:
        """Kill a replica's process."""
        ray.kill(ray.get_actor(actor, namespace="serve"), no_restart=True)

    def complete(self, prompt: Any, tokens: int = 8, **body: Any) -> httpx.Response:
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **body}
        return self.client.post("/v1/completions", json=asked)

    def stream(self, prompt: Any, tokens: int, first: Callable[[], object] = lambda: None) -> list[Any]:
        """The events of a stream, "[DONE]" at the end; `first` is called with the first one."""
        found: list[Any] = []
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    found.append(data if data == "[DONE]" else json.loads(data))
                    if len(found) == 1:
                        first()
        return found


def together(count: int, act: Callable[[int], Any]) -> list[Any]:
    """The answers of `count` calls at once."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(act, range(count)))


def kill_worker(of: str, folder: Path, files: int) -> int:
    """Kill a worker process of this Ray, of those whose title has `of`, as soon as a folder has so many files:
    its process id.
    """
    until(lambda: folder.exists() and len(list(folder.glob("*.jsonl"))) >= files)
    workers = [
        each for each in psutil.Process().children(recursive=True) if of in " ".join(each.cmdline()[:1])
    ]
    workers[0].kill()
    return workers[0].pid


def until(true: Callable[[], bool], seconds: float = GUARD) -> float:
    """Wait until something holds: the seconds that took."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds
        time.sleep(0.05)
    return time.monotonic() - begun
