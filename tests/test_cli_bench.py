"""hf-paged bench: figures that add up, and a picture of them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from hf_paged import Engine, demo
from hf_paged.cli.bench import ROWS, Load, Speed, engine_times, quantiles, stock_times
from hf_paged_cli.main import main


@pytest.mark.parametrize("who", ["stock", "engine"])
def test_every_token_has_its_time(who: str) -> None:
    """Answers have the lengths that were asked for, and times only grow."""
    model = demo.model()
    requests = Load(5, 8, 6, 2).requests(model.config.vocab_size)
    assert all(3 <= length <= 9 for _, length in requests)
    if who == "stock":
        found = stock_times(model, requests, 2)
    else:
        with Engine(model, num_blocks=64) as engine:
            found = engine_times(engine, requests)
    assert [len(times) for times in found] == [length for _, length in requests]
    assert all(times[0] > 0 and times == sorted(times) for times in found)


def test_speeds() -> None:
    speed = Speed.of("x", [[1.0, 1.5, 2.0], [2.0, 4.0]], [0.5, 0.75])
    assert speed.tokens_per_second == 5 / 4
    assert speed.first_token == {"p50": 2000.0, "p99": 2000.0}
    assert speed.between_tokens["p99"] == 2000.0
    assert (speed.alone_first, speed.alone_between) == (500.0, 250.0)
    assert quantiles([0.001 * i for i in range(1, 101)]) == {
        "p50": pytest.approx(51),
        "p99": pytest.approx(100),
    }
    with pytest.raises(ValueError, match="prompts=0"):
        Load(0, 1, 1, 1)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "bench.svg"
    flags = [
        "--num-prompts",
        "4",
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--batch-size",
        "2",
        "--max-num-seqs",
        "4",
    ]
    assert main(["bench", "demo", *flags, "--out", str(picture)]) == 0
    said = capsys.readouterr().out
    for name, _, _ in ROWS:
        assert name in said
    drawn: Any = ET.parse(picture).getroot()
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}rect")) == 2 + 2 * len(ROWS)
    assert main(["bench", "demo", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["who"] for each in found["speeds"]] == ["generate()", "hf_paged Engine"]
    assert found["load"]["prompts"] == 4
    with pytest.raises(SystemExit):
        main(["bench", "demo", "--num-prompts", "0"])


def test_answers_that_the_model_has_no_room_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are refused by the flags' names, before anything is measured."""
    monkeypatch.setattr("hf_paged.cli.bench.measure", lambda *given: pytest.fail("it measures"))
    assert main(["bench", "demo", "--input-len", "5000"]) == 1
    assert "--input-len 5000 and answers of up to 150 % of --output-len" in capsys.readouterr().err
