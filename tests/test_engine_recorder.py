"""A trace says what the books said, at every step (C6, C7, C10)."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine_answers import PROMPTS, alone, answers
from engine_parts import block_pools, layer_groups, running, scheduler_of
from engine_steps import executor_of, watch_plans
from families import BY_NAME, build

import hf_paged
from hf_paged.blocks.pool import CACHED
from hf_paged.engine import Engine
from hf_paged.trace import Blocks, MapState, Name, Step, Table

GREEDY = {"max_new_tokens": 9, "do_sample": False}
WAYS: list[dict[str, Any]] = [
    GREEDY,
    {"max_new_tokens": 7, "num_beams": 3},
    {"max_new_tokens": 7, "do_sample": True, "num_return_sequences": 2},
]


def engine_of(name: str, blocks: int, **options: Any) -> Engine:
    return Engine(
        build(BY_NAME[name]),
        block_size=2,
        num_blocks=blocks,
        max_batch_tokens=12,
        max_batch_sequences=6,
        **options,
    )


def books(engine: Engine) -> tuple[Any, ...]:
    """The tables of all that run, the cached blocks, and the counts, straight from the pools."""
    tables = {
        Name(group.request.number, sequence.index): tuple(
            Table(table.released, tuple(table.blocks)) for table in sequence.tables
        )
        for group in running(engine)
        for sequence in group.sequences
        if any(table.blocks for table in sequence.tables)
    }
    groups = layer_groups(engine)
    pools = [group.pool for group in groups]
    cached = tuple(frozenset(i for i, state in enumerate(pool._state) if state == CACHED) for pool in pools)
    counts = tuple(
        Blocks(
            pool.held,
            sum(count > 1 for count in pool._references),
            pool.cached,
            pool.free,
            group.host.pool.held if group.host else 0,
        )
        for pool, group in zip(pools, groups, strict=True)
    )
    return tables, cached, counts


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note the books of every step while its forward runs."""
    seen: list[Any] = []
    watch_plans(engine, lambda plan: seen.append((books(engine), [row[1:3] for row in plan.rows])))
    return seen


@pytest.mark.parametrize(
    ("name", "blocks", "ahead"),
    [("llama", 40, False), ("qwen2-window", 40, False), ("llama", 200, False), ("llama", 40, True)],
)
def test_every_step_is_as_the_books_were(
    name: str, blocks: int, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, forks, copies on write, beams, windows, preemptions, aborts, hits: the map drawn from the file
    is the one of then.
    """
    rng, ways = random.Random(blocks), WAYS[::2] if ahead else WAYS  # beams let nobody run ahead
    with engine_of(name, blocks, run_ahead=ahead) as engine:
        seen = watch(engine, monkeypatch)
        with engine.trace(tmp_path / "steps.jsonl"):
            handles = []
            while len(handles) < 14 or not all(handle.done for handle in handles):
                if len(handles) < 14:
                    handles.append(engine.submit(rng.choice(PROMPTS), seed=1, **rng.choice(ways)))
                    if rng.random() < 0.2:
                        handles[rng.randrange(len(handles))].cancel()
                for _ in range(rng.randrange(4)):
                    engine.step()
                if rng.random() < 0.1:
                    engine.pause()
                    engine.resume()
        stats = engine.stats()
    trace = hf_paged.trace.read(tmp_path / "steps.jsonl")
    assert (trace.model, trace.block_size, trace.max_batch_tokens, trace.max_batch_sequences) == (
        type(engine.model).__name__,
        2,
        12,
        6,
    )
    assert [(kind.name, kind.total) for kind in trace.kinds] == [(each, blocks) for each in stats["blocks"]]
    for block_map, ((tables, cached, counts), rows) in zip(list(trace.maps())[1:], seen, strict=True):
        assert dict(block_map.tables) == tables
        assert block_map.cached == cached
        assert block_map.step.blocks == counts
        assert [(row.start, row.tokens) for row in block_map.step.rows] == rows
    assert sum(step.tokens for step in trace.steps) == stats["tokens"]
    assert sum(len(step.preempted) for step in trace.steps) == stats["preemptions"]
    assert sum(len(step.admitted) for step in trace.steps) == stats["admissions"]
    assert Counter(reason for step in trace.steps for _, reason in step.ended) == Counter(
        handle.result().finish_reason for handle in handles
    )
    assert {number for step in trace.steps for number, _ in step.ended} == {
        handle.number for handle in handles
    }
    assert stats["preemptions"] > 2
    assert any(len(names) > 1 for block_map in trace.maps() for names in block_map.owners().values())


def test_a_trace_that_begins_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first record is how things stand; whoever ended before is nobody's news."""
    with engine_of("llama", 100) as engine:
        engine.generate(PROMPTS[:2], **GREEDY)
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[2:5]]
        for _ in range(5):
            engine.step()
        before = books(engine)
        recorder = engine.trace(tmp_path / "a.jsonl.gz")
        seen = watch(engine, monkeypatch)
        handles[1].cancel()
        handles[0].result()
        recorder.close()
        recorder.close()
        handles[2].result()
    trace = hf_paged.trace.read(tmp_path / "a.jsonl.gz")
    first, *others = trace.maps()
    assert (dict(first.tables), first.cached, first.step.blocks) == before
    assert first.step.rows == ()
    assert (first.step.ended, first.step.running) == (((3, "abort"),), 3)
    assert [(dict(each.tables), each.cached, each.step.blocks) for each in others] == [
        each for each, _ in seen[: len(others)]
    ]
    assert trace.steps[-1].ended == ((2, "length"),)
    assert "1 abort, 1 length" in str(trace)


def test_forgotten_blocks_leave_the_cache(tmp_path: Path) -> None:
    with engine_of("llama", 100) as engine, engine.trace(tmp_path / "a.jsonl"):
        engine.generate(PROMPTS[:2], **GREEDY)
        engine.step()
        assert engine.stats()["blocks"]["full"]["cached"] > 5
        engine.weights_changed()
        engine.generate(PROMPTS[:1], **GREEDY)
    *_, last = hf_paged.trace.read(tmp_path / "a.jsonl").maps()
    assert len(last.cached[0]) == last.step.blocks[0].cached == 0


def test_an_interrupt_is_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever held something is preempted, and comes back."""

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with engine_of("llama", 100) as engine, engine.trace(tmp_path / "a.jsonl"):
        handle = engine.submit(PROMPTS[1], **GREEDY)
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(executor_of(engine), "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert answers(handle.result()) == alone(engine.model, PROMPTS[1], **GREEDY)
    steps = hf_paged.trace.read(tmp_path / "a.jsonl").steps
    assert [step.preempted for step in steps if step.preempted] == [(0,)]
    assert [step.admitted for step in steps if step.admitted] == [(0,), (0,)]


def test_one_trace_at_a_time(tmp_path: Path) -> None:
    with engine_of("llama", 60) as engine:
        with engine.trace(tmp_path / "a.jsonl") as recorder:
            assert "1 records" not in repr(recorder)
            with pytest.raises(RuntimeError, match=r"a\.jsonl.*close it first"):
                engine.trace(tmp_path / "b.jsonl")
        assert "closed" in repr(recorder)
        engine.trace(tmp_path / "b.jsonl")
        engine.generate(PROMPTS[:1], **GREEDY)
    assert hf_paged.trace.read(tmp_path / "b.jsonl").whole  # closing the engine ends it
    with pytest.raises(RuntimeError, match="closed"):
        engine.trace(tmp_path / "c.jsonl")


def test_a_full_disk_ends_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trace ends, which is logged once and raised when it is closed; the requests go on."""

    def full(*arguments: Any) -> None:
        raise OSError("no space left")

    with engine_of("llama", 100) as engine:
        recorder = engine.trace(tmp_path / "a.jsonl")
        monkeypatch.setattr(recorder._writer, "_line", full)
        assert answers(engine.generate(PROMPTS[:1], **GREEDY)[0]) == alone(engine.model, PROMPTS[0], **GREEDY)
        with pytest.raises(OSError, match="no space left"):
            recorder.close()
        recorder.close()
    assert [record.message for record in caplog.records if "can no longer be written" in record.message] == [
        f"the trace {tmp_path / 'a.jsonl'} can no longer be written: no space left"
    ]


@pytest.mark.parametrize("broken", ["in a step", "at the end"])
@pytest.mark.parametrize("leave", ["close", "with"])
def test_closing_an_engine_whose_trace_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leave: str, broken: str
) -> None:
    """The requests have their answers: the engine closes, and the log has the reason once."""

    def full(*arguments: Any) -> None:
        raise OSError("no space left")

    engine = engine_of("llama", 100)
    recorder = engine.trace(tmp_path / "a.jsonl")
    monkeypatch.setattr(recorder._writer, "write" if broken == "in a step" else "close", full)
    output = engine.generate(PROMPTS[:1], **GREEDY)[0]
    if leave == "close":
        engine.close()
    else:
        with engine:
            pass
    assert answers(output) == alone(engine.model, PROMPTS[0], **GREEDY)
    assert recorder.closed
    assert [record.message for record in caplog.records if "can no longer be written" in record.message] == [
        f"the trace {tmp_path / 'a.jsonl'} can no longer be written: no space left"
    ]
    engine.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full is Linux's")
def test_a_device_that_is_full(caplog: pytest.LogCaptureFixture) -> None:
    """Writes wait in Python's buffer, so the end of the trace is where the disk says no."""
    with engine_of("llama", 100) as engine:
        engine.trace("/dev/full")
        engine.generate(PROMPTS[:1], **GREEDY)
    assert "can no longer be written" in caplog.text
    with engine_of("llama", 100) as engine, pytest.raises(OSError, match="space"):
        engine.trace("/dev/full").close()


# ---- names, the queue, the host: what a map shows beside tables


def more_books(engine: Engine) -> tuple[Any, ...]:
    """The names of all blocks, what waits on the host, and the state of each request."""
    names = [
        {block: digest.hex()[:8] for block, digest in pool.names.digests().items()}
        for pool in block_pools(engine)
    ]
    scheduler = scheduler_of(engine)
    host = {
        Name(group.request.number, sequence.index): tuple(tuple(table.blocks) for table in sequence.parked)
        for group in scheduler.preempted
        for sequence in group.sequences
        if sequence.parked
    }
    groups = scheduler.running + scheduler.preempted + scheduler.waiting
    return names, host, {group.request.number: group.status.value for group in groups}


def map_state(state: MapState) -> tuple[Any, ...]:
    return state.names, state.host, state.states


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live record may take all of the time."""
    monkeypatch.setattr("hf_paged.engine.recorder.SHARE", 1e9)


@pytest.mark.parametrize(("preemption", "ahead"), [("swap", False), ("recompute", False), ("swap", True)])
def test_names_hosts_and_states_are_those_of_the_books(
    preemption: str, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, ways = random.Random(3), WAYS[::2] if ahead else WAYS
    seen: list[Any] = []
    copies: list[Any] = []
    with engine_of("qwen2-window", 34, run_ahead=ahead, preemption=preemption) as engine:

        def see(plan: Any) -> None:
            seen.append(more_books(engine))
            copies.append([sorted(map(tuple, each)) for each in plan.copies])

        watch_plans(engine, see)
        with engine.trace(tmp_path / "a.jsonl"):
            handles = [engine.submit(rng.choice(PROMPTS), seed=1, **rng.choice(ways)) for _ in range(16)]
            while not all(handle.done for handle in handles):
                engine.step()
        stats = engine.stats()
        evictions = sum(pool.counts["evictions"] for pool in block_pools(engine))
    trace = hf_paged.trace.read(tmp_path / "a.jsonl")
    state = MapState(trace.kinds)
    found = []
    for step in trace.steps:
        state.apply(step)
        ended = {
            each.request: "running" for each in step.ended
        }  # in this step: it had not when it was planned
        found.append(([dict(each) for each in state.names], dict(state.host), {**state.states, **ended}))
    assert found[1:] == seen
    assert any(host for _, host, _ in found) == (preemption == "swap")
    recorded = [[sorted(each) for each in step.copies] for step in trace.steps[1:]]
    assert [each for each in recorded if each] == [each for each in copies if any(each)]
    assert any(recorded)
    counted: Counter[str] = Counter()
    for step in trace.steps:
        counted.update(step.counted)
    assert {name: counted[name] for name in ("steps", "tokens", "hits", "preemptions", "swapped_in")} == {
        name: stats[name] for name in ("steps", "tokens", "hits", "preemptions", "swapped_in")
    }
    assert stats["preemptions"]
    assert {each.request for step in trace.steps for each in step.arrived} == set(range(16))
    assert sum(len(blocks) for step in trace.steps for blocks in step.evicted) == evictions > 0


def test_watching_shows_all_there_is_then_what_changes(always: None) -> None:
    """Few records, that begin in the middle and stand for many steps each, and the state of an idle engine."""
    with engine_of("llama", 60) as engine:
        engine.generate(PROMPTS[:2], **GREEDY)
        handles = [engine.submit(prompt, **way) for prompt in PROMPTS[2:6] for way in WAYS]
        for _ in range(3):
            engine.step()
        steps: list[Step] = []
        state = MapState(engine.watch(steps.append, 0.0).header.kinds)
        state.apply(steps[0])
        assert (dict(state.tables), tuple(map(frozenset, state.cached))) == books(engine)[:2]
        assert map_state(state) == more_books(engine)
        rare: list[Step] = []
        recorder = engine.watch(rare.append, 3600.0)
        for handle in handles:
            handle.result()
        for step in steps[1:]:
            state.apply(step)
        assert (dict(state.tables), tuple(map(frozenset, state.cached))) == books(engine)[:2]
        assert not state.tables
        assert map_state(state) == more_books(engine)
        assert len(steps) > 20
        assert len(rare) <= 1 + len(handles)
        assert any(any(step.copies) for step in steps)
        assert not any(any(step.copies) for step in rare), "a copy whose target was given back is nobody's"
        late = MapState(recorder.header.kinds)
        for step in rare:
            late.apply(step)
        assert (late.tables, late.cached, late.names) == (state.tables, state.cached, state.names)
        for records in (steps, rare):
            assert {each.request for step in records for each in step.ended} == {
                each.number for each in handles
            }
        assert sum(step.sampled for step in rare) == sum(step.sampled for step in steps)
        recorder.close()
        count = len(rare)
        engine.generate(PROMPTS[:1], **GREEDY)
        assert len(rare) == count


def test_watching_leaves_no_log_behind() -> None:
    with engine_of("llama", 60) as engine:
        recorders = [engine.watch(lambda step: None) for _ in range(3)]
        assert all(len(pool.names.logs) == 3 for pool in block_pools(engine))
        for recorder in recorders:
            recorder.close()
            recorder.close()
        assert not any(pool.names.logs for pool in block_pools(engine))


def test_a_trace_and_watchers_at_once(always: None, tmp_path: Path) -> None:
    with engine_of("llama", 100) as engine, engine.trace(tmp_path / "a.jsonl"):
        steps: list[Step] = []
        with engine.watch(steps.append, 0.0) as recorder:
            assert "live" in repr(recorder)
            engine.generate(PROMPTS[:3], **GREEDY)
    written = hf_paged.trace.read(tmp_path / "a.jsonl").steps
    assert [step.rows for step in written] == [step.rows for step in steps[: len(written)]]


def test_a_watcher_takes_a_small_share_of_the_time() -> None:
    """However long a record takes: the next one is so much later."""

    def slow(step: Step) -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    with engine_of("llama", 100) as engine:
        begin = time.monotonic()
        recorder = engine.watch(slow, 0.0)
        first = recorder.seconds
        while time.monotonic() < begin + 1.0:
            handle = engine.submit(PROMPTS[0], **GREEDY)
            while not handle.done and engine.stats()["running"] < 2:
                engine.step()
                if engine.stats()["steps"] % 5 == 0 and not handle.done:
                    engine.submit(PROMPTS[1], **GREEDY)
        assert recorder.seconds < first + 0.03
        assert recorder.seconds >= 0.02


def test_a_watcher_that_fails_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def broken(step: Step) -> None:
        raise ValueError("no map today")

    with engine_of("llama", 100) as engine:
        engine.watch(broken, 0.0)
        assert answers(engine.generate(PROMPTS[:1], **GREEDY)[0]) == alone(engine.model, PROMPTS[0], **GREEDY)
    assert [record.message for record in caplog.records if "no map today" in record.message] == [
        "the trace live can no longer be written: no map today"
    ]
