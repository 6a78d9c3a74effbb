"""The map of the blocks: what a viewer is sent adds up to the books, and is nobody else's business."""

from __future__ import annotations

import asyncio
import base64
import gzip
import itertools
import json
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
import tiny
from engine_parts import block_pools
from processes import LIMIT
from releases import NEEDS_SLOTS
from serving import GUARD, Served, connected, serving, tokenizer, until

from hf_paged import Engine, demo, trace
from hf_paged.serve.http.keys import Tenant
from hf_paged.serve.http.metrics import Metrics
from hf_paged.serve.link import engine_host
from hf_paged.serve.map.html import page
from hf_paged.serve.map.live import BEHIND, LiveMap, Viewer
from hf_paged.serve.map.map_view import Owner, Owners, Sight
from hf_paged.trace import MapState, Step
from hf_paged_cli.main import main

SMALL = {"block_size": 4, "num_blocks": 90, "max_batch_sequences": 8, "preemption": "swap"}
SHARED = "The fox and the owl went to the river and looked for the moon in the water. "
ALL = Tenant("admin-0", None, sees_all=True)


class Watching:
    """A stream of the map that is read in a thread: its lines so far."""

    def __init__(self, served: Served, key: str | None = None) -> None:
        self.text = ""
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._url = served.url
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        until(lambda: len(self.lines) > 1)

    def _read(self) -> None:
        with (
            httpx.Client(base_url=self._url, timeout=GUARD, verify=False) as client,
            client.stream("GET", "/map", headers=self.headers) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            self._connection = answer.extensions["network_stream"].get_extra_info("socket")
            try:
                for text in answer.iter_text():
                    self.text += text
            except httpx.TransportError:
                if not self._stop.is_set():
                    raise

    def close(self) -> None:
        """Hang up now: the next event may be a second away."""
        self._stop.set()
        with suppress(OSError):  # the server was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self.thread.join(GUARD)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All that has come, without times and the end; of several whole maps the last one and what follows
        it.
        """
        found = [
            json.loads(line[6:])
            for line in self.text.split("\n\n")
            if line.startswith("data: ") and line.endswith("}")
        ]
        found = [line for line in found if not line.keys() & {"times", "end"}]
        begin = max((i for i, line in enumerate(found) if "hf_paged" in line), default=0)
        return found[begin:]

    def read(self, folder: Path) -> trace.Trace:
        """The lines as the trace that they are."""
        path = folder / f"{id(self)}-{time.monotonic_ns()}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return trace.read(path, partial=True)

    def state(self, folder: Path) -> MapState:
        """Their sum."""
        read = self.read(folder)
        state = MapState(read.kinds)
        for step in read.steps:
            state.apply(step)
        return state


@contextmanager
def watching(served: Served, key: str | None = None) -> Iterator[Watching]:
    made = Watching(served, key)
    try:
        yield made
    finally:
        made.close()


def traffic(served: Served, keys: list[str | None], count: int = 12) -> None:
    """Requests of every kind by several keys at once."""

    def ask(i: int) -> None:
        key = keys[i % len(keys)]
        way: dict[str, Any] = [
            {"temperature": 1},
            {"use_beam_search": True, "n": 3},
            {"temperature": 1, "n": 2},
        ][i % 3]
        body = {
            "prompt": f"{SHARED if i % 2 else ''}One {key} day {i // 4}",
            "max_tokens": 24 + 2 * i,
            "ignore_eos": True,
            **way,
        }
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert served.post("/v1/completions", body, headers=headers).status_code == 200

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD)
    until(lambda: not served.engine.stats()["running"])


def shown(state: MapState) -> tuple[Any, ...]:
    return state.tables, state.cached, state.names, state.host, state.states


def settled(served: Served, watch: Watching, folder: Path) -> MapState:
    """The state of a viewer once it has seen all."""
    held = served.engine.stats()["blocks"]["full"]["held"]
    until(lambda: watch.lines[-1]["blocks"][0][0] == held and watch.lines[-1]["requests"] == [0, 0, 0])
    return watch.state(folder)


def test_changes_add_up_to_the_whole_map(tmp_path: Path) -> None:
    """One viewer that saw all the changes and one that comes at the end have the state of the books."""
    with serving(SMALL) as served, watching(served) as first:
        traffic(served, [None], 18)
        seen = settled(served, first, tmp_path)
        with watching(served) as late:
            assert shown(late.state(tmp_path)) == shown(seen)
            assert late.lines[0]["served"] == "demo"
        pool = block_pools(served.engine)[0]
        assert seen.names[0] == {block: digest.hex()[:8] for block, digest in pool.names.digests().items()}
        assert len(seen.cached[0]) == pool.cached
        lines = first.lines
        assert any(line.get("host") for line in lines), "nothing was swapped"
        assert any(len(each) > 1 for line in lines for each in line.get("copies", []))
        assert {number for line in lines for number, _ in line.get("ended", ())} >= set(range(2, 20))
        assert all(
            late["at"] - early["at"] > 0.09
            for early, late in itertools.pairwise(lines[2:-1])
            if early["requests"][1] and late["requests"][1]
        )


def test_the_engine_records_nothing_without_viewers(tmp_path: Path) -> None:
    with serving() as served:
        logs = block_pools(served.engine)[0].names.logs
        assert not logs
        for _ in range(3):
            with watching(served), watching(served):
                until(lambda: len(logs) == 1)
            served.complete(max_tokens=2)
            until(lambda: not logs)
        with watching(served) as again:
            served.complete(max_tokens=12)
            until(lambda: any(line.get("ended") for line in again.lines))


# ---- who sees what


@pytest.mark.parametrize("share", [False, True])
def test_a_key_sees_its_own_requests_and_of_others_grey_blocks(tmp_path: Path, share: bool) -> None:
    keys = {"api_keys": ("red", "blue"), "admin_api_keys": ("boss",), "share_prefixes": share}
    with serving(SMALL, **keys) as served, watching(served, "boss") as boss, watching(served, "red") as red:
        with watching(served, "blue") as blue:
            traffic(served, ["red", "blue"], 24)
            whole = settled(served, boss, tmp_path)
            settled(served, red, tmp_path)
            settled(served, blue, tmp_path)
        arrived = {
            each: [a for line in watch.lines for a in line.get("arrived", ())]
            for each, watch in (("boss", boss), ("red", red), ("blue", blue))
        }
        numbers = {each: {a[0] for a in some} for each, some in arrived.items()}
        assert len(numbers["red"]) == len(numbers["blue"]) == 12
        assert not numbers["red"] & numbers["blue"]
        assert numbers["red"] | numbers["blue"] <= numbers["boss"]
        for name, watch in (("red", red), ("blue", blue)):
            check_sight(boss.lines, watch.lines, numbers[name])
        names = {
            each: {
                digest for line in watch.lines for some in line.get("names", ()) for digest in some.values()
            }
            for each, watch in (("red", red), ("blue", blue))
        }
        assert names["red"]
        if not share:
            assert names["red"] & names["blue"] <= {None}
        with watching(served, "red") as late:
            state = late.state(tmp_path)
            assert state.cached == whole.cached
            assert set(state.names[0].items()) <= set(whole.names[0].items())
            assert not {*late.lines[1].get("ids", {})} & numbers["blue"]


def check_sight(all_lines: list[dict[str, Any]], lines: list[dict[str, Any]], own: set[int]) -> None:
    """At every moment: what is shown as others' is what others hold, and nothing else names their requests."""
    at = {line["at"]: line for line in all_lines[1:]}
    tables: dict[str, list[int]] = {}
    others: set[int] = set()
    mine: dict[str, list[int]] = {}

    def enter(into: dict[str, list[int]], line: dict[str, Any]) -> None:
        for name, changes in line.get("tables", {}).items():
            if changes is None:
                into.pop(name, None)
            else:
                _, same, new = changes[0]
                into[name] = into.get(name, [])[:same] + new

    times = [line["at"] for line in lines[1:]]
    for time_, line in at.items():
        enter(tables, line)
        if time_ not in times:
            continue
        seen = lines[1 + times.index(time_)]
        enter(mine, seen)
        came, left = seen.get("others", [[[], []]])[0]
        others = (others | set(came)) - set(left)
        for part in ("rows", "arrived", "ended"):
            assert {each[0] for each in seen.get(part, ())} <= own
        for part in ("admitted", "preempted"):
            assert set(seen.get(part, ())) <= own
        for part in ("tables", "host", "states", "ids"):
            assert {int(name.split(".")[0]) for name in seen.get(part, {})} <= own
        own_blocks = {
            block for name, blocks in tables.items() if int(name.split(".")[0]) in own for block in blocks
        }
        all_blocks = {block for blocks in tables.values() for block in blocks}
        assert {block for blocks in mine.values() for block in blocks} == own_blocks
        assert others == all_blocks - own_blocks


def test_texts_of_prompts(tmp_path: Path) -> None:
    with serving(SMALL, api_keys=("red", "blue"), admin_api_keys=("boss",)) as served:
        with watching(served, "red") as red:
            headers = {"authorization": "Bearer red", "x-request-id": "of-red"}
            assert (
                served.post(
                    "/v1/completions", {"prompt": SHARED, "max_tokens": 3}, headers=headers
                ).status_code
                == 200
            )
            until(lambda: any("of-red" in line.get("ids", {}).values() for line in red.lines))
            number = next(
                key for line in red.lines for key, value in line.get("ids", {}).items() if value == "of-red"
            )
        path = f"/map/requests/{number}"
        for key in ("red", "boss"):
            found = served.client.get(path, headers={"authorization": f"Bearer {key}"}).json()
            assert "".join(found["blocks"]) == tokenizer().decode(tokenizer()(SHARED)["input_ids"])
            assert len(found["blocks"]) == -(-len(tokenizer()(SHARED)["input_ids"]) // 4)
        for key in ("blue", "nobody", None):
            headers = {"authorization": "" if key is None else f"Bearer {key}"}
            answer = served.client.get(path, headers=headers)
            assert answer.status_code == (404 if key == "blue" else 401)
            assert "fox" not in answer.text
        assert (
            served.client.get("/map/requests/99999", headers={"authorization": "Bearer boss"}).status_code
            == 404
        )


def test_the_page_needs_no_key_and_holds_no_data() -> None:
    with serving(api_keys=("red",)) as served, httpx.Client(base_url=served.url) as client:
        found = client.get("/")
        assert found.status_code == 200
        assert found.text == page(needs_key=True)
        assert "default-src 'none'" in found.text.replace("&#x27;", "'")
        assert found.headers["x-frame-options"] == "DENY"
        assert "http://" not in re.sub(r"http://www\.w3\.org/\d+/svg", "", found.text)
        for path in ("/map", "/map/requests/0", "/index.html", "/page/map.js"):
            assert client.get(path).status_code == 401
        assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert 'data-key=""' in page()


def test_an_admin_key_is_a_key() -> None:
    with serving(admin_api_keys=("boss",)) as served:
        assert served.client.get("/v1/models").status_code == 401
        served.client.headers["authorization"] = "Bearer boss"
        served.complete(max_tokens=2)
    with (
        pytest.raises(ValueError, match="two different ones"),
        serving(api_keys=("a",), admin_api_keys=("a",)),
    ):
        pass


# ---- slow viewers, many viewers, the end


def test_a_slow_viewer_gets_the_whole_map_when_it_reads() -> None:
    viewer = Viewer(Sight(ALL, Owners(), MapState(())))
    viewer.behind = False
    for _ in range(BEHIND):
        viewer.add(b"x")
    assert (len(viewer.waiting), viewer.behind) == (BEHIND, False)
    for _ in range(1000):
        viewer.add(b"x")
    assert (len(viewer.waiting), viewer.behind) == (0, True)


def test_a_viewer_that_stops_reading_holds_up_nothing() -> None:
    """The engine goes on and the other viewer has every change; when it reads again it begins anew."""

    async def run() -> None:
        engine = Engine(demo.model(), block_size=4, num_blocks=200).start()
        client = connected(engine, demo.tokenizer())
        await client.open()
        live = LiveMap(client, Metrics("demo"), 2, "demo")
        slow = live.enter(ALL)
        slow_events = live.events(slow)
        assert (await anext(slow_events)).startswith(b":")
        assert b'"hf_paged"' in await anext(slow_events)
        fast = live.enter(ALL)
        fast_chunks: list[bytes] = []

        async def read() -> None:
            async for chunk in live.events(fast):
                fast_chunks.append(chunk)

        reading = asyncio.create_task(read())
        end = time.monotonic() + LIMIT
        while not slow.behind or sum(chunk.count(b'"at"') for chunk in fast_chunks) <= BEHIND:
            assert time.monotonic() < end
            await engine.submit([1, 2, 3], max_new_tokens=30, do_sample=False)
        assert len(slow.waiting) <= BEHIND
        assert slow.behind
        again = (await anext(slow_events)).decode()
        assert again.startswith('data: {"hf_paged"')
        assert sum(chunk.count(b'"hf_paged"') for chunk in fast_chunks) == 1
        assert sum(chunk.count(b'"at"') for chunk in fast_chunks) > BEHIND
        live.end()
        assert b'"end"' in [chunk async for chunk in slow_events][-1]
        await asyncio.wait_for(reading, LIMIT)
        await live.stop()
        assert not block_pools(engine)[0].names.logs
        client.close()

    asyncio.run(run())


def test_a_socket_that_is_not_read_is_closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is bounded, and answers go on meanwhile. The map is sent after every step, so that the socket
    is soon full.
    """
    monkeypatch.setattr(engine_host, "EVERY", 0.0)
    path = Path(tempfile.gettempdir()) / f"map-{time.monotonic_ns()}.sock"
    with serving(SMALL, uds=str(path), limits={"write_seconds": 1.0}) as served:
        connection = socket.socket(socket.AF_UNIX)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(str(path))
        connection.sendall(b"GET /map HTTP/1.1\r\nhost: localhost\r\n\r\n")
        live = served.service.live
        until(lambda: live.viewers)
        end = time.monotonic() + GUARD
        while live.viewers and time.monotonic() < end:
            served.complete(SHARED, max_tokens=60, n=4, temperature=1, ignore_eos=True)
            assert sum(len(chunk) for each in list(live.viewers) for chunk in list(each.waiting)) < 2_000_000
        assert not live.viewers
        connection.close()
        until(lambda: not block_pools(served.engine)[0].names.logs)


def test_too_many_viewers_are_refused() -> None:
    with serving(limits={"viewers": 2}) as served, watching(served), watching(served):
        answer = served.client.get("/map")
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
        assert "--limit-viewers" in answer.json()["error"]["message"]


def test_streams_of_the_map_end_at_once_on_sigterm() -> None:
    """The drain waits for answers, not for them."""
    with serving(limits={"drain_seconds": 20.0}) as served:
        answer: list[int] = []

        def ask() -> None:
            body = {"prompt": "The fox", "max_tokens": 700, "ignore_eos": True, "n": 4, "temperature": 1}
            with suppress(httpx.HTTPError):
                answer.append(served.post("/v1/completions", body).status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        watch = Watching(served)
        until(lambda: any(line["requests"][1] for line in watch.lines[1:]))
        served.server.handle_exit(signal.SIGTERM, None)
        watch.thread.join(GUARD)
        assert asking.is_alive()  # seconds away from its end, however busy the machine is
        assert watch.text.endswith('data: {"end":true}\n\n')
        assert served.client.get("/map").text == ': map\n\ndata: {"end":true}\n\n'
        asking.join(GUARD)
        assert answer == [200]


def test_a_map_costs_little_of_the_event_loop() -> None:
    """For 200 sequences in a pool of 20,000 blocks, ten times a second, seen whole and by a key."""
    owners = Owners()
    state = MapState((trace.Kind("full", None, 20_000),))
    red = Sight(Tenant("red", None), owners, state)
    boss = Sight(ALL, owners, state)
    live = LiveMap.__new__(LiveMap)
    live._state = state
    live._sights = {"red": red, "boss": boss}
    live.viewers = set()
    live._last = None
    for number in range(200):
        owners.add(number, Owner("red" if number % 2 else "blue", f"{number}", ()))
    first = {trace.Name(i, 0): (trace.Change(0, 0, tuple(range(100 * i, 100 * i + 60))),) for i in range(200)}
    live._take(Step(0, 0.0, blocks=(trace.Blocks(12_000, 0, 0, 8_000),), tables=first, cached=(((), ()),)))
    times = []
    for step in range(20):
        tables = {trace.Name(i, 0): (trace.Change(0, 60 + step, (100 * i + 60 + step,)),) for i in range(200)}
        names = ({100 * i + 59 + step: "0a1b2c3d" for i in range(200)},)
        rows = tuple(trace.Row(i, 0, 1000 + 16 * step, 1) for i in range(200))
        made = Step(
            step,
            0.1 * step,
            rows,
            blocks=(trace.Blocks(12_000, 0, 0, 8_000),),
            tables=tables,
            cached=(((), ()),),
            names=names,
        )
        begin = time.thread_time()
        live._take(made)
        times.append(time.thread_time() - begin)
    assert sorted(times)[10] < 0.02, times


# ---- the same page from a file


def records(path: Path) -> Path:
    made = Engine(demo.model(), demo.tokenizer(), block_size=8, num_blocks=80, preemption="swap")
    with made as engine, engine.trace(path):
        engine.generate([SHARED, SHARED + "The owl", "The moon"], max_new_tokens=40, num_beams=3)
        engine.generate(demo.prompts()[:6], max_new_tokens=60)
    return path


@pytest.mark.parametrize("name", ["steps.jsonl", "steps.jsonl.gz"])
def test_a_trace_becomes_one_file(name: str, tmp_path: Path) -> None:
    path = records(tmp_path / name)
    assert main(["trace", str(path), "--html", str(tmp_path / "out.html")]) == 0
    text = (tmp_path / "out.html").read_text()
    packed = re.search(r'<script type="application/json" id="trace">(.*?)</script>', text)
    assert packed is not None
    lines = gzip.decompress(base64.b64decode(packed[1])).decode().splitlines()
    (tmp_path / "again.jsonl").write_text("".join(line + "\n" for line in lines))
    assert trace.read(tmp_path / "again.jsonl", partial=True).steps == trace.read(path).steps
    assert not re.search(r'(?:src|href)="(?!data:)', text)


def test_a_file_that_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    assert main(["trace", str(tmp_path / "a.txt"), "--html", str(tmp_path / "out.html")]) == 1
    assert "is not a trace" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nope.jsonl")]) == 1
    path = records(tmp_path / "steps.jsonl")
    path.write_text("".join(path.read_text().splitlines(True)[:-1]))
    assert main(["trace", str(path), "--html", str(tmp_path / "out.html")]) == 1
    assert "is cut off" in capsys.readouterr().err
    assert main(["trace", str(path), "--partial", "--html", str(tmp_path / "out.html")]) == 0


def test_a_trace_is_opened_in_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    answer: Callable[[str], bool] = lambda url: bool(opened.append(url)) or len(opened) == 1  # noqa: E731
    monkeypatch.setattr("webbrowser.open", answer)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = records(tmp_path / "steps.jsonl")
    assert main(["trace", str(path)]) == 0
    assert main(["trace", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == opened
    assert "no browser was found" in printed.err
    assert Path(opened[0].removeprefix("file://")).read_text() == page(path)


@NEEDS_SLOTS
def test_slots_are_drawn_beside_blocks(tmp_path: Path) -> None:
    """Of a hybrid each sequence has one slot while it runs. Snapshots stay there with their names."""
    model = tiny.build("causal", tiny.config_class("causal", "qwen3_5_text"))
    options = {**SMALL, "state_slots": 4, "state_snapshots": 3, "state_every": 8}
    with serving(options, model=model) as served, watching(served) as watch:
        begin = list(range(5, 25))
        for own in ([30, 31], [40, 41, 42]):
            body = {"prompt": begin + own, "max_tokens": 60, "n": 2, "temperature": 1, "ignore_eos": True}
            assert served.post("/v1/completions", body).status_code == 200
        until(lambda: {number for line in watch.lines for number, _ in line.get("ended", ())} >= {2, 3})
        seen = settled(served, watch, tmp_path)
        place = [kind.name for kind in watch.read(tmp_path).kinds].index("state")
        pool = block_pools(served.engine)[place]
        names = {block: digest.hex()[:8] for block, digest in pool.names.digests().items()}
        assert len(seen.cached[place]) == pool.cached == len(names) > 1
        assert seen.names[place] == names
        state = MapState(watch.read(tmp_path).kinds)
        most = 0
        for step in watch.read(tmp_path).steps:
            state.apply(step)
            held = [tables[place] for tables in state.tables.values()]
            most = max(most, len(held))
            assert all(len(table.blocks) <= 1 for table in held)
        assert most == 2
        assert served.engine.stats()["states"]["slots"] == 7
