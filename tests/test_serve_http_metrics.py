"""/metrics: families that dashboards know, and numbers that add up."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")

from serving import Served, serving, until

from hf_paged.serve.http.metrics import Histogram, Metrics

VLLM_FAMILIES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_success_total",
]
LINE = re.compile(r'(hf_paged|vllm):[a-z_0-9]+\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\} -?[0-9.e+-]+')


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(vllm_metric_names=True) as made:
        yield made


def values(served: Served) -> dict[str, float]:
    lines = served.client.get("/metrics").text.splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")
    }


def test_the_exposition_is_prometheus(served: Served) -> None:
    served.complete(max_tokens=3)
    response = served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds: dict[str, str] = {}
    for line in response.text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert name not in kinds
            kinds[name] = kind
            assert (kind == "counter") == name.endswith("_total")
        elif not line.startswith("#"):
            assert LINE.fullmatch(line), line
            name = line.partition("{")[0]
            assert any(name == known or name.startswith(known + "_") for known in kinds)
    for family in VLLM_FAMILIES:
        for prefix in ("hf_paged", "vllm"):
            assert f"{prefix}:{family}" in kinds


COUNT = 'hf_paged:http_requests_total{model_name="demo",route="/v1/completions",status="200"}'


def settled(served: Served) -> dict[str, float]:
    """The values once requests of earlier tests are counted: that comes after the last byte."""
    found = values(served)
    while True:
        time.sleep(0.2)
        again = values(served)
        if again.get(COUNT) == found.get(COUNT):
            return again
        found = again


def test_numbers_add_up(served: Served) -> None:
    before = settled(served)
    usages = [
        served.complete("The fox", max_tokens=5)["usage"],
        served.complete(["The owl", "The fox"], max_tokens=4)["usage"],
    ]
    served.stream(prompt="The fox", max_tokens=6)
    until(lambda: values(served)[COUNT] - before.get(COUNT, 0) == 3)  # it is counted after the last byte
    after = values(served)

    def grown(name: str, more: str = "") -> float:
        key = f'hf_paged:{name}{{model_name="demo"{more}}}'
        return after[key] - before.get(key, 0)

    assert grown("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages) + 3
    assert grown("generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages) + 6
    assert grown("prefix_cache_queries_total") == grown("prompt_tokens_total")
    assert grown("prefix_cache_hits_total") >= sum(
        usage["prompt_tokens_details"]["cached_tokens"] for usage in usages
    )
    assert grown("request_success_total", ',finished_reason="length"') == 4
    for family in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    ):
        assert grown(f"{family}_count") == 4
    assert grown("inter_token_latency_seconds_count") <= 5  # tokens that come together have one time
    assert after['hf_paged:num_requests_running{model_name="demo"}'] == 0


def test_every_answer_of_a_client_that_leaves_counts(served: Served) -> None:
    """Four answers to one prompt are four ends."""
    aborted = 'hf_paged:request_success_total{model_name="demo",finished_reason="abort"}'
    before = values(served).get(aborted, 0.0)
    body = {
        "prompt": "The fox",
        "n": 4,
        "temperature": 1,
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": True,
    }
    for _ in range(2):
        with served.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    until(lambda: not served.service.admission.in_flight)
    assert values(served)[aborted] - before == 8


def test_histograms() -> None:
    histogram = Histogram("h", "", (1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 1)):
        histogram.observe(value, times)
    found = {(name, labels): value for name, labels, value in histogram.samples()}
    assert found[("h_bucket", (("le", "1.0"),))] == 3
    assert found[("h_bucket", (("le", "2.0"),))] == 4
    assert found[("h_bucket", (("le", "+Inf"),))] == found[("h_count", ())] == 5
    assert found[("h_sum", ())] == 13.0
    assert histogram.mean == 2.6


def test_odd_names_are_escaped() -> None:
    stats = {
        "blocks": {},
        "running": 0,
        "waiting": 0,
        "preempted": 0,
        "preemptions": 0,
        "steps": 0,
        "tokens": 0,
        "verify": {"checked": 8, "mismatched": 1},
    }
    text = Metrics('a"b\\c\nd').exposition(stats, 0)
    assert 'model_name="a\\"b\\\\c\\nd"' in text
    assert re.search(r"hf_paged:kv_blocks_mismatched_total\{[^}]*\} 1", text)
