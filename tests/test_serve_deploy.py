"""deploy/: what its files name is there. Flags are the command's, metrics those of /metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from serving import serving

from hf_paged_cli.parser import parser

DEPLOY = Path(__file__).parents[1] / "deploy"


COMMANDS = {
    "Dockerfile": r"hf_paged MODEL(.*)|^CMD (.*)",
    "hf-paged.service": r"hf-paged serve \$(.*)\\\n(.*)",
}
"""Where in each file flags of the command are."""


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_are_those_of_the_command(name: str) -> None:
    known = parser()[1]["serve"]._option_string_actions
    found = re.findall(COMMANDS[name], (DEPLOY / name).read_text(), re.MULTILINE)
    flags = set(re.findall(r"--[a-z][a-z-]+", " ".join(" ".join(each) for each in found)))
    assert {"--host", "--api-key-file"} <= flags
    assert flags <= set(known)


def test_the_unit_leaves_time_for_the_drain() -> None:
    unit = (DEPLOY / "hf-paged.service").read_text()
    stop = int(re.search(r"TimeoutStopSec=(\d+)", unit)[1])
    assert stop > int(re.search(r"--limit-drain-seconds (\d+)", unit)[1])


def test_the_board_shows_metrics_that_exist() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    with serving(api_keys=("one",), admin_api_keys=("boss",)) as served:
        served.stream(prompt="The fox and the owl", max_tokens=6)
        shown = served.client.get("/metrics", headers={"authorization": "Bearer boss"}).text
    found = set(re.findall(r"^(hf_paged:\w+)\{", shown, re.MULTILINE))
    labels = set(re.findall(r"(\w+)=\"", shown))
    for expression in asked:
        assert set(re.findall(r"hf_paged:\w+", expression)) <= found, expression
        by = {name.strip() for some in re.findall(r"by \(([^)]*)\)", expression) for name in some.split(",")}
        assert by <= labels, expression
