"""Files of traces: what was written comes back, and what is no whole trace says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_paged.trace import (
    Arrival,
    Blocks,
    Change,
    Ended,
    Kind,
    MapState,
    Name,
    Row,
    Step,
    Table,
    Trace,
    TraceError,
    Writer,
    read,
)

KINDS = (Kind("full", None, 12), Kind("window6", 6, 12))
HEADER = Trace("TinyForCausalLM", 4, KINDS, 24, 8, (), host=(6, 5))
NOTHING = ((), ())
STEPS = (
    Step(
        0, 0.0, waiting=2, blocks=(Blocks(0, 0, 0, 12), Blocks(0, 0, 0, 12)), cached=(NOTHING, NOTHING),
        arrived=(Arrival(0, 9, 20, 1), Arrival(1, 6, 9, 2)), states={0: "waiting", 1: "waiting"},
    ),
    Step(
        1, 0.25, (Row(0, 0, 0, 9), Row(1, 0, 0, 6)), (0, 1), (), (), 0, 2, 0, (Blocks(5, 0, 0, 7), Blocks(5, 0, 0, 7)),
        {Name(0, 0): (Change(0, 0, (0, 1, 2)), Change(0, 0, (0, 1, 2))), Name(1, 0): (Change(0, 0, (3, 4)), Change(0, 0, (3, 4)))},
        (NOTHING, NOTHING),
    ),
    Step(
        2, 0.5, (Row(0, 0, 9, 4),), (), (1,), (Ended(0, "stop"),), 0, 1, 1, (Blocks(4, 0, 1, 7), Blocks(3, 0, 0, 9, 2)),
        {Name(1, 0): None, Name(0, 0): (Change(0, 3, (5,)), Change(1, 2, (3,)))}, (((3,), ()), NOTHING),
        states={1: "preempted"}, names=({3: "00ff10ab", 5: None}, {}), copies=(((2, 5),), ()), evicted=((), (4,)),
        host={Name(1, 0): ((0, 4), (1,))}, counted={"steps": 1, "tokens": 4}, sampled=1,
    ),
    Step(
        3, 0.75, (Row(1, 0, 0, 6), Row(1, 1, 6, 1)), (1,), (), (), 0, 1, 0, (Blocks(4, 2, 0, 8), Blocks(3, 1, 0, 9)),
        {
            Name(0, 0): None,
            Name(1, 0): (Change(0, 0, (3, 0, 1)), Change(0, 0, (0, 1))),
            Name(1, 1): (Change(0, 0, (3, 0, 2)), Change(0, 0, (0, 2))),
        },
        (((), (3,)), NOTHING), host={Name(1, 0): None},
    ),
)  # fmt: skip


def write(path: Path, close: bool = True) -> None:
    writer = Writer(path, HEADER)
    for step in STEPS:
        writer.write(step)
    if close:
        writer.close()
    else:
        writer.abandon()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_what_was_written_comes_back(name: str, tmp_path: Path) -> None:
    write(tmp_path / name)
    trace = read(tmp_path / name)
    assert (trace.model, trace.block_size, trace.kinds, trace.max_batch_tokens, trace.max_batch_sequences) == (
        "TinyForCausalLM", 4, KINDS, 24, 8,
    )  # fmt: skip
    assert trace.steps == STEPS
    assert trace.host == (6, 5)
    assert trace.whole


def test_a_trace_of_an_earlier_release(tmp_path: Path) -> None:
    """It has no queue, names or copies."""
    write(tmp_path / "a.jsonl")
    later = ("arrived", "states", "names", "copies", "evicted", "host", "counted", "sampled")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    plain = [{name: value for name, value in line.items() if name not in later} for line in lines]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in plain))
    trace = read(tmp_path / "b.jsonl")
    assert [step.tables for step in trace.steps] == [step.tables for step in STEPS]
    assert (trace.host, trace.steps[2].names, dict(trace.steps[2].states)) == ((), (), {})


@pytest.mark.parametrize("steps", range(1, len(STEPS) + 1))
def test_a_whole_state_is_one_step(steps: int) -> None:
    """A reader that comes late and gets the state as one step has the same state."""
    state = MapState(KINDS)
    for step in STEPS[:steps]:
        state.apply(step)
    late = MapState(KINDS)
    late.apply(state.whole(STEPS[steps - 1]))
    assert vars(late) == vars(state)


def test_maps(tmp_path: Path) -> None:
    """The changes, put together: whose every block is, behind windows too."""
    write(tmp_path / "a.jsonl")
    trace = read(tmp_path / "a.jsonl")
    second = trace.map(2)
    assert second.tables == {Name(0, 0): (Table(0, (0, 1, 2, 5)), Table(1, (1, 2, 3)))}
    assert second.cached == (frozenset({3}), frozenset())
    assert second.draw() == "000:.0......"
    assert second.draw(1, width=6) == ".000..\n......"
    last = trace.map()
    assert last == trace.map(3) == trace.map(-1)
    assert last.owners() == {0: ((1, 0), (1, 1)), 1: ((1, 0),), 2: ((1, 1),), 3: ((1, 0), (1, 1))}
    assert str(last) == "step 3, full\n1111........\nstep 3, window6\n111........."
    for number in (4, -5):
        with pytest.raises(IndexError, match="steps 0 to 3"):
            trace.map(number)


def test_a_block_of_several_requests_has_its_own_sign() -> None:
    change = (Change(0, 0, (0, 1)),)
    blocks = (Blocks(2, 2, 0, 2),)
    trace = Trace(
        "M",
        4,
        (Kind("full", None, 4),),
        8,
        8,
        (Step(0, 0.0, blocks=blocks, tables={Name(0, 0): change, Name(37, 0): change}, cached=(NOTHING,)),),
    )
    assert trace.map(0).draw() == "**.."


def test_a_summary(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    assert str(read(tmp_path / "a.jsonl")).split("\n") == [
        "TinyForCausalLM: 3 steps in 0.75 s, 26 tokens",
        "requests   2 admitted, 1 times one was preempted, 1 ended, 1 stop",
        "full       12 blocks of 4 tokens: at most 5 held, 2 shared, 1 cached",
        "window6    12 blocks of 4 tokens: at most 5 held, 1 shared, 0 cached, 2 swapped",
    ]


def test_values_are_frozen(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    trace = read(tmp_path / "a.jsonl")
    with pytest.raises(AttributeError):
        trace.steps = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        trace.steps[1].tables[Name(0, 0)] = None  # type: ignore[index]
    with pytest.raises(TypeError):
        trace.map(1).tables[Name(0, 0)] = None  # type: ignore[index]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_trace_that_breaks_off(name: str, tmp_path: Path) -> None:
    """Wherever: an error that says how far it goes, or the steps that are there if one asks for them."""
    path = tmp_path / name
    write(path)
    data = path.read_bytes()
    for keep in range(len(data) - (2 if name == "a.jsonl" else 30), 0, -7):
        path.write_bytes(data[:keep])
        with pytest.raises(TraceError, match=r"is cut off after \d records|is not a trace|is empty"):
            read(path)
        try:
            trace = read(path, partial=True)
        except TraceError:
            continue
        assert trace.steps == STEPS[: len(trace.steps)]
        assert not trace.whole
        assert "the trace breaks off" in str(trace)
        len(list(trace.maps()))
    path.write_bytes(b"")
    with pytest.raises(TraceError, match=r"is empty|is not a trace"):
        read(path, partial=True)


def test_a_writer_that_was_stopped(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", close=False)
    with pytest.raises(TraceError, match="is cut off after 4 records"):
        read(tmp_path / "a.jsonl")
    assert read(tmp_path / "a.jsonl", partial=True).steps == STEPS


@pytest.mark.parametrize(
    ("line", "text", "error"),
    [
        (0, "hello\n", "is not a trace of hf_paged"),
        (0, "[1]\n", "is not a trace of hf_paged"),
        (
            0,
            json.dumps({"hf_paged": "trace", "version": 9}) + "\n",
            "version 9 and this hf_paged reads version 1",
        ),
        (
            0,
            json.dumps({"hf_paged": "trace", "version": 1, "model": "M"}) + "\n",
            "the header of .* is broken",
        ),
        (2, "{half\n", "line 3 of .* is broken"),
        (2, "[]\n", "line 3 of .* expected an object"),
        (2, '{"at":1}\n', "line 3 of .* is not a step"),
        (2, '{"at":1,"requests":[0,0,0],"blocks":[[1,0,0,1],[0,0,0,12]]}\n', "do not add up to"),
        (
            3,
            '{"at":1,"requests":[0,0,0],"blocks":[[0,0,0,12],[0,0,0,12]],"tables":{"a":null}}\n',
            "line 4 of .* is not a step",
        ),
    ],
)
def test_broken_lines(line: int, text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path)
    lines = path.read_text().splitlines(keepends=True)
    lines[line] = text
    path.write_text("".join(lines))
    with pytest.raises(TraceError, match=error):
        read(path, partial=True)


@pytest.mark.parametrize("at", [0, 2])
def test_lines_of_deep_lists(at: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path)
    lines = path.read_text().splitlines(keepends=True)
    lines[at] = "[" * 200_000 + "\n"
    path.write_text("".join(lines))
    with pytest.raises(TraceError, match="line 3 of .* is broken" if at else "is not a trace"):
        read(path, partial=True)


def test_a_packed_trace_that_is_damaged(tmp_path: Path) -> None:
    """Wherever: an error, or all steps where the byte says nothing, as in padding."""
    found = 0
    path = tmp_path / "a.jsonl.gz"
    write(path)
    data = bytearray(path.read_bytes())
    for i in range(20, len(data) - 8):
        path.write_bytes(data[:i] + bytes([data[i] ^ 0xFF]) + data[i + 1 :])
        try:
            assert read(path).steps == STEPS
        except TraceError:
            found += 1
    assert found > (len(data) - 28) * 0.9


def test_a_change_that_fits_nothing() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Change(0, 2, (5,)).apply(Table(0, (1,)))
    with pytest.raises(ValueError, match="does not fit"):
        Change(0, 1, (5,)).apply(Table(2, (1,)))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.jsonl")


def test_slots_of_states_are_named() -> None:
    """One holds a sequence of any length, so no tokens are told."""
    kind = Kind("state", None, 24)
    assert (kind.title, kind.unit, kind.counted(16)) == ("recurrent states", "slots", "24 slots")
    assert Kind("full", None, 24).counted(16) == "24 blocks of 16 tokens"
