"""The autoscaling policy: as many replicas as hold the future peak."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hf_paged.ray.autoscaling import FuturePeakPolicy
from hf_paged.ray.flags import namespace
from hf_paged.ray.routing import LoadBound


@pytest.mark.parametrize(
    ("metrics", "replicas"),
    [
        ({}, 3),
        ({"future_peak": {"a": 0.8, "b": 0.8}, "rows": {"a": 0.1, "b": 0.1}}, 2),
        ({"future_peak": {"a": 2.0, "b": 0.4}, "rows": {"a": 0.1, "b": 0.1}}, 3),
        ({"future_peak": {"a": 0.1}, "rows": {"a": 3.2}}, 4),
        ({"future_peak": {"a": 0.0}, "rows": {"a": 0.0}}, 0),
    ],
)
def test_replicas_are_as_many_as_hold_the_future_peak(metrics: dict[str, Any], replicas: float) -> None:
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=3)
    wanted, state = FuturePeakPolicy(target=0.8)(context)
    assert wanted == pytest.approx(replicas)
    assert state == {}


def test_a_wrong_target_is_refused() -> None:
    with pytest.raises(ValueError, match="target=0 is not a share"):
        FuturePeakPolicy(0)


def test_the_example_is_understood() -> None:
    """Every key of deploy/ray.yaml is one, and its names can be imported."""
    config = yaml.safe_load((Path(__file__).parents[1] / "deploy" / "ray.yaml").read_text())
    (application,) = config["applications"]
    args = application["args"]
    LoadBound(**args.pop("routing"))
    assert namespace(args).model == "demo"
    replica, gateway = application["deployments"]
    policy = replica["autoscaling_config"]["policy"]
    assert policy["policy_function"] == f"{FuturePeakPolicy.__module__}:{FuturePeakPolicy.__name__}"
    FuturePeakPolicy(**policy["policy_kwargs"])
    assert (replica["name"], gateway["name"]) == ("Replica", "Gateway")
