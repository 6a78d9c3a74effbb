"""hf-paged bench: loads in equal batches, and figures that add up."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_paged import Engine, demo
from hf_paged.cli.bench import Load, Run, engine_for, engine_run, generate_run, loads_of, measure
from hf_paged.cli.bench_report import WHO
from hf_paged_cli.loads import LOADS
from hf_paged_cli.main import main
from hf_paged_cli.parser import parser

SMALL = ["--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--runs", "1"]


def stock_run(model: Any, load: Load, requests: Any) -> Run:
    return generate_run(model, load, requests, timed=True)


def run_of_an_engine(model: Any, load: Load, requests: Any) -> Run:
    with engine_for(model, load, None) as engine:
        found = engine_run(engine, load, requests)
        engine.check()
    return found


@pytest.mark.parametrize("run", [stock_run, run_of_an_engine])
def test_every_token_has_its_time(run: Callable[..., Run]) -> None:
    """Answers have the lengths that were asked for, and times only grow."""
    model = demo.model()
    load = Load("ragged", 2, 8, 3, prompts=5)
    requests = load.requests(model.config.vocab_size, 0)
    found = run(model, load, requests)
    assert [len(times) for times in found.times] == [length for _, length in requests]
    assert sum(map(len, found.times)) == load.tokens(requests)
    assert all(times[0] > 0 and times == sorted(times) for times in found.times)
    assert max(times[-1] for times in found.times) <= found.seconds


@pytest.mark.parametrize("kind", ["samples", "beams"])
def test_sequences_of_a_prompt_count_as_the_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of eight has two prompts, and the tokens are those of the answers that come."""
    model, load = demo.model(), Load(kind, 8, 8, 3)
    requests = load.requests(model.config.vocab_size, 0)
    assert len(requests) == 4 * load.call == 8
    calls: list[Any] = []
    generate = model.generate

    def noted(ids: Any, **keywords: Any) -> Any:
        answers = generate(ids, **keywords)
        calls.append((len(ids), answers[:, ids.shape[1] :].numel()))
        return answers

    monkeypatch.setattr(model, "generate", noted)
    assert generate_run(model, load, requests).times == []
    assert [prompts for prompts, _ in calls] == [2, 2, 2, 2]
    assert sum(tokens for _, tokens in calls) == load.tokens(requests)
    with engine_for(model, load, None) as engine:
        assert engine_run(engine, load, requests).times == []
        tokens = [
            len(each.token_ids)
            for each in engine.generate(requests[0][0], max_new_tokens=3, **load.options).sequences
        ]
        assert sum(tokens) * len(requests) == load.tokens(requests)
        engine.check()
    assert Load(kind, 3, 8, 3).call == 0


def test_loads_differ_by_turns() -> None:
    """Prompts are new in each turn, and of "prefix" seven eighths stay; lengths are even, or any."""
    equal, prefix = Load("equal", 2, 16, 8), Load("prefix", 2, 16, 8)
    assert equal.requests(100, 0) == equal.requests(100, 0)
    assert equal.requests(100, 0) != equal.requests(100, 1)
    assert {length for _, length in equal.requests(100, 0)} == {8}
    prompts = [ids for turn in (0, 1) for ids, _ in prefix.requests(10_000, turn)]
    assert len({tuple(ids[:14]) for ids in prompts}) == 1
    assert len({tuple(ids[14:]) for ids in prompts}) == len(prompts)
    ragged = Load("ragged", 2, 16, 100, prompts=200)
    lengths = [length for _, length in ragged.requests(100, 0)]
    assert min(lengths) < 20
    assert 300 < max(lengths) <= 400
    assert ragged.longest == 416
    with pytest.raises(ValueError, match="batch=0"):
        Load("equal", 0, 1, 1)


def test_all_have_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs as many sequences as a call of generate() has rows, unless a number is given."""
    made: list[int] = []

    def noted(model: Any, **options: Any) -> Engine:
        made.append(options["max_batch_sequences"])
        return Engine(model, **options)

    monkeypatch.setattr("hf_paged.cli.bench.Engine", noted)
    model, load = demo.model(), Load("equal", 2, 8, 2, prompts=2)
    found = list(measure(model, load, 2))
    list(measure(model, load, 1, at_once=5, clock=time.process_time))
    assert made == [2, 5]
    assert [each.who for each in found] == [*WHO, *WHO]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "bench.svg"
    assert main(["bench", "demo", *SMALL, "--batch-size", "1", "2", "--out", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "medians of 1 turn behind one that warms up" in said
    assert "the same batch for all; 2 prompts at once" in said
    for line in ("equal, batch of 1", "equal, batch of 2", "ragged, batch of 1", "ragged, batch of 2"):
        assert said.count(line) == 5
    drawn: Any = ET.parse(picture).getroot()
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}rect")) == 3 + 3 * 4


def test_what_is_measured_by_default_ends_in_minutes() -> None:
    """Several batches, three turns, and tokens for two minutes of the demo model on two busy cores: 126,000 took
    121 seconds of one processor.
    """
    given = parser()[0].parse_args(["bench", "demo"])
    loads = loads_of(given)
    assert {load.kind for load in loads} == {"equal", "ragged"}
    assert len({load.batch for load in loads}) >= 3
    assert given.runs >= 3
    tokens = sum(load.tokens(load.requests(100, turn)) for load in loads for turn in range(given.runs + 1))
    assert tokens * len(WHO) < 140_000


def test_every_load_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Where a batch has no room for the sequences of a prompt, the line is left out and the text says so."""
    asked = ["bench", "demo", *SMALL, "--load", *LOADS, "--batch-size", "1", "4"]
    assert main([*asked, "--processor-time", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lines = {(each["kind"], each["batch"]) for each in found["speeds"]}
    assert lines == {(kind, batch) for kind in LOADS for batch in (1, 4)} - {("samples", 1), ("beams", 1)}
    assert "left out: samples and beams in batches of less than 4" in found["facts"]
    assert "seconds are those of the processor" in found["facts"]
    assert all(each["tokens_per_second"] > 0 for each in found["speeds"])
    assert main(["bench", "demo", "--load", "beams", "--batch-size", "3"]) == 1
    assert "--load beams has 4 sequences a prompt" in capsys.readouterr().err


def test_answers_that_the_model_has_no_room_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are refused by the flags' names, before anything is measured."""
    monkeypatch.setattr("hf_paged.cli.bench.measure", lambda *given: pytest.fail("it measures"))
    assert main(["bench", "demo", "--input-len", "5000"]) == 1
    assert "--input-len 5000 and answers of up to 128 tokens (by --output-len 32)" in capsys.readouterr().err
