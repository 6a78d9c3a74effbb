"""Grammars that take too much are refused within bounded time and memory, and hold up no others."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")

from processes import LIMIT

from hf_paged import Engine, demo
from hf_paged.engine.sampling import grammar
from hf_paged.engine.sampling.grammar import Grammars, json_grammar, regex_grammar
from hf_paged.engine.sampling.grammar_trials import CPU_SECONDS, MEMORY, GrammarError

HOSTILE = {
    "one number": {"type": "integer", "multipleOf": 99999989},
    "many numbers": {"allOf": [{"type": "integer", "multipleOf": each} for each in (7, 11, 13, 17, 19, 23)]},
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(demo.tokenizer(), 848, [1])


def children() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(each) for file in tasks for each in file.read_text().split()]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_others_do_not_wait(grammars: Grammars, name: str) -> None:
    """This process takes no memory for it; a second refusal takes no time."""
    grammars.compiled(regex_grammar("fox"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused: list[str] = []

    def ask() -> None:
        with pytest.raises(GrammarError) as error:
            grammars.compiled(json_grammar(HOSTILE[name]))
        refused.append(str(error.value))

    thread = threading.Thread(target=ask)
    thread.start()
    for i in range(5):
        grammars.compiled(regex_grammar(f"{name} fox {i}"))
    assert not refused
    thread.join(LIMIT)
    assert f"more than {CPU_SECONDS} s" in refused[0]
    assert "multipleOf" in refused[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY >> 12
    begun = time.process_time()
    ask()
    assert time.process_time() - begun < 0.5
    assert refused[1] == refused[0]


def test_few_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests bring one of their own, refused ones among them; the last ones used stay."""
    monkeypatch.setattr(grammar, "KEPT", 3)
    made = Grammars(demo.tokenizer(), 848, [1])
    patterns = [regex_grammar(f"fox {i}") for i in range(4)]
    for each in (*patterns[:3], patterns[0], patterns[3]):
        made.compiled(each)
    assert [made.kept(each) is not None for each in patterns] == [True, False, True, True]
    with pytest.raises(GrammarError):
        made.compiled(regex_grammar("[^\\s\\S]"))
    assert [made.kept(each) is not None for each in patterns] == [False, False, True, True]
    monkeypatch.setattr(grammar, "KEPT_BYTES", 1)
    made.compiled(regex_grammar("owl"))
    assert [made.kept(each) is not None for each in patterns] == [False] * 4


def test_an_engine_computes_meanwhile(grammars: Grammars) -> None:
    """Compiling a grammar takes no lock of the engine's."""
    grammar = json_grammar({"type": "integer", "multipleOf": 99999971})
    found: list[Any] = []

    def ask() -> None:
        with pytest.raises(GrammarError) as error:
            grammars.compiled(grammar)
        found.append(error.value)

    thread = threading.Thread(target=ask)
    with Engine(demo.model(), demo.tokenizer(), block_size=8, num_blocks=100) as engine:
        thread.start()
        processor = grammars.compiled(regex_grammar("[a-z]{4}")).processor(1)
        output = engine.submit([5], max_new_tokens=9, do_sample=False, logits_processor=[processor]).result()
        assert output.sequences[0].finish_reason == "stop"
        assert not found
        thread.join(LIMIT)
        engine.check()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_the_process_is_replaced_if_it_is_killed_and_ends_with_its_owner() -> None:
    before = set(children())
    made = Grammars(demo.tokenizer(), 848, [1])
    made.compiled(regex_grammar("a"))
    [process] = set(children()) - before
    os.kill(process, signal.SIGKILL)
    while Path(f"/proc/{process}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    assert made.compiled(regex_grammar("b")).size > 0
    del made
    assert set(children()) <= before


def test_a_slow_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="needs a fast tokenizer, got object"):
        Grammars(object(), 848, [1]).compiled(regex_grammar("a"))
