"""The map's page in a real Chromium: it loads, streams, changes, answers to pointer and keys, and logs no error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from browser import CHROMIUM, Browser
from processes import LIMIT
from serving import serving

from hf_paged import Engine, demo, trace
from hf_paged.serve.map.html import page
from hf_paged.trace.picture import shown_blocks

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: apt-get install chromium")
LONG = {"prompt": "The fox and the owl", "max_tokens": 400, "ignore_eos": True}
STATE = "hfPagedMap.state"
HELD = f"({STATE} ? {STATE}.pools[0].counts[0] : -1)"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as made:
        yield made
        assert made.errors == []
        assert made.value("hfPagedMap.errors") == []


def pixels(browser: Browser) -> str:
    """The picture of the first pool's grid."""
    return browser.value("document.querySelector('#pools canvas').toDataURL()")


def where(browser: Browser, block: int) -> tuple[float, float]:
    """The middle of a block on the page."""
    found = browser.value(
        "(() => { const grid = hfPagedMap.grids[0]; const box = grid.canvas.getBoundingClientRect();"
        f" return [box.left + ({block} % grid.columns + 0.4) * grid.cell, box.top + (Math.floor({block} / grid.columns) + 0.4) * grid.cell]; }})()"
    )
    return found[0], found[1]


def test_a_live_map(browser: Browser) -> None:
    """Idle, then with beams and samples: blocks, queue, tree, events and figures are those of the engine."""
    with serving({"num_blocks": 500}) as served:
        browser.open(served.url)
        browser.until("document.querySelector('#status').textContent === 'live'")
        browser.until(f"{HELD} === 0")
        before = pixels(browser)
        answers: list[int] = []

        def ask(**body: Any) -> None:
            answers.append(served.post("/v1/completions", {**LONG, **body}).status_code)

        threads = [
            threading.Thread(target=ask, kwargs=body)
            for body in ({"use_beam_search": True, "n": 4}, {"temperature": 1, "n": 2})
        ]
        for thread in threads:
            thread.start()
        browser.until(f"{HELD} > 20")
        browser.until("document.querySelectorAll('#queue button').length >= 2")
        assert pixels(browser) != before
        number = browser.value(f"[...{STATE}.requests.values()].find((each) => each.width === 4).number")
        browser.value(f"hfPagedMap.select({number})")
        browser.until("document.querySelectorAll('#tree rect').length > 6")
        assert "sequence 3" in browser.value("document.querySelector('#tree').textContent")
        browser.until("document.querySelector('#detail-text').textContent.includes('fox')")
        browser.until("document.querySelector('#events').textContent.includes('copied on write')")
        block = browser.value(
            f"[...{STATE}.requests.get({number}).sequences.values()][0].tables[0].blocks[0]"
        )
        browser.move(*where(browser, block))
        browser.until("document.querySelector('#hover').textContent.startsWith('Block')")
        assert f"Block {block} held by" in browser.value("document.querySelector('#hover').textContent")
        for thread in threads:
            thread.join(LIMIT)
        assert answers == [200, 200]
        browser.until(f"{HELD} === 0")
        browser.until("document.querySelector('#queue').textContent.includes('finished')")
        counts = browser.value(f"{STATE}.pools[0].counts")
        usage = served.engine.stats()["blocks"]["full"]
        assert counts[:4] == [usage["held"], 0, usage["cached"], usage["free"]]
        assert browser.value(f"{STATE}.pools[0].device.cached.reduce((a, b) => a + b)") == usage["cached"]
        browser.until("document.querySelector('#first').textContent.endsWith('s')")


def test_a_prompt_streams_and_lights_up(browser: Browser) -> None:
    with serving() as served:
        browser.open(served.url)
        browser.until("document.querySelector('#status').textContent === 'live'")
        browser.value("document.querySelector('#how').value = 'sample'")
        browser.value("document.querySelector('#send').click()")
        browser.until("document.querySelectorAll('#answer p').length === 4")
        browser.until("document.querySelector('#send').textContent === 'Send'")
        browser.until("hfPagedMap.selected !== null")
        texts = browser.value("[...document.querySelectorAll('#answer p')].map((each) => each.textContent)")
        assert all(len(text) > 20 for text in texts)


def test_keys_and_the_table_mirror_the_canvas(browser: Browser) -> None:
    with serving() as served:
        served.complete("The fox and the owl went to the river", max_tokens=30)
        browser.open(served.url)
        browser.until("document.querySelector('#status').textContent === 'live'")
        browser.until("hfPagedMap.grids.length && hfPagedMap.grids[0].columns")
        browser.value("document.querySelector('#pools canvas').focus()")
        browser.key("Home")
        browser.until("document.querySelector('#hover').textContent.startsWith('Block 0 cached')")
        assert "digest" in browser.value("document.querySelector('#hover').textContent")
        browser.key("ArrowRight")
        browser.until("document.querySelector('#hover').textContent.startsWith('Block 1 ')")
        browser.key("End")
        browser.until("document.querySelector('#hover').textContent.startsWith('Block 127 free')")
        assert browser.value("document.querySelector('.rest').innerText").startswith("+472 free")
        browser.value("document.querySelector('.rest button').click()")
        browser.key("End")
        browser.until("document.querySelector('#hover').textContent.startsWith('Block 599 free')")
        browser.value("document.querySelector('#mirror').open = true")
        browser.until("document.querySelectorAll('#mirror-body td').length > 0")
        cached = served.engine.stats()["blocks"]["full"]["cached"]
        assert f"cached{cached}0\u2013" in browser.value("document.querySelector('#mirror-body').textContent")


def test_the_key_is_typed_once(browser: Browser) -> None:
    with serving(api_keys=("red", "blue")) as served:
        browser.open(served.url)
        assert browser.value("!document.querySelector('#key').hidden && !hfPagedMap.state")
        browser.value("document.querySelector('#key-input').value = 'red'")
        browser.value("document.querySelector('#key').requestSubmit()")
        browser.until("document.querySelector('#status').textContent === 'live'")
        served.post("/v1/completions", {**LONG, "max_tokens": 200}, headers={"authorization": "Bearer blue"})
        browser.until("hfPagedMap.lines > 3")
        assert browser.value(f"{STATE}.requests.size") == 0
        browser.open(served.url)
        browser.until("document.querySelector('#status').textContent === 'live'")
        assert "red" not in browser.value(
            "document.documentElement.outerHTML.replace(/<script[^]*<.script>/, '').replace(/<style[^]*<.style>/, '').match(/value=.?red|Bearer red/)?.join() ?? ''"
        )


def test_twenty_thousand_blocks_are_smooth(browser: Browser) -> None:
    """The work of a frame, on a machine without a GPU, while others use its cores."""
    with serving({"num_blocks": 20_000}) as served:
        browser.open(served.url)
        browser.until("document.querySelector('#status').textContent === 'live'")
        thread = threading.Thread(
            target=lambda: served.post("/v1/completions", {**LONG, "n": 8, "temperature": 1})
        )
        thread.start()
        browser.until(f"{HELD} > 100")
        assert browser.value("hfPagedMap.grids[0].plane.total") < 1000
        browser.value("document.querySelector('.rest button').click()")
        browser.until("hfPagedMap.grids[0].plane.total === 20000")
        browser.value("hfPagedMap.work = []; hfPagedMap.measure = true")
        browser.until("hfPagedMap.work.length > 60")
        work = sorted(browser.value("hfPagedMap.work"))
        thread.join(LIMIT)
        assert work[len(work) // 2] < 16, work
        assert browser.value("document.querySelector('#pools canvas').clientHeight") < 700


def test_on_a_phone(tmp_path: Path) -> None:
    """No wider than 390 points; it says what it shows, large squares of the blocks in use; events scroll by keys."""
    with (
        Browser(tmp_path / "profile", 390, 800) as browser,
        serving({"num_blocks": 20_000}, names=("my-model",)) as served,
    ):
        browser.open(served.url)
        browser.until("document.querySelector('#status').textContent === 'live'")
        while browser.value("document.querySelectorAll('#events li').length") < 14:
            served.complete("The fox " * 9, max_tokens=30, n=6, temperature=1, ignore_eos=True)
        assert browser.value("document.querySelector('#model').textContent") == "my-model (LlamaForCausalLM)"
        said = browser.value("document.querySelector('#block').textContent")
        assert said == "A square is a block: the keys and values of 8 tokens."
        assert browser.value("document.documentElement.scrollWidth") == 390
        browser.until(f"{HELD} === 0")
        used = browser.value(f"{STATE}.pools[0].device.cached.lastIndexOf(1)")
        browser.until(f"hfPagedMap.grids[0].plane.total === {shown_blocks(used + 1, 20_000)}")
        assert browser.value("hfPagedMap.grids[0].cell") >= 10
        browser.value("document.querySelector('#events').focus()")
        browser.key("ArrowDown")
        browser.until("document.querySelector('#events').scrollTop > 0")
        assert browser.value("document.querySelector('#events').ariaLabel")
        assert browser.errors == []
        assert browser.value("hfPagedMap.errors") == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_trace_in_a_file(browser: Browser, tmp_path: Path, theme: str) -> None:
    """Without a server: it plays, pauses, steps and goes back, and every step is what the trace says."""
    made = Engine(demo.model(), demo.tokenizer(), block_size=8, num_blocks=60, preemption="swap")
    with made as engine, engine.trace(tmp_path / "steps.jsonl"):
        handles = [
            engine.submit(prompt, max_new_tokens=40 + i, num_beams=3 if i % 2 else 1, do_sample=False)
            for i, prompt in enumerate(demo.prompts()[:6] * 2)
        ]
        for handle in handles:
            handle.result()
    read = trace.read(tmp_path / "steps.jsonl")
    (tmp_path / "out.html").write_text(page(tmp_path / "steps.jsonl"))
    browser.theme(theme)
    browser.open((tmp_path / "out.html").as_uri())
    browser.until("hfPagedMap.trace && hfPagedMap.trace.step > 3")
    assert browser.value("document.documentElement.classList.contains('dark')") == (theme == "dark")
    browser.value("document.querySelector('#play').click()")
    assert not browser.value("hfPagedMap.trace.playing")
    maps = list(read.maps())
    last = len(maps) - 1
    swapped = next(i for i, each in enumerate(maps) if each.step.blocks[0].swapped)
    for step in (last, swapped, 7, last // 2, 1, last):
        browser.value(
            f"(() => {{ const slider = document.querySelector('#slider'); slider.value = {step};"
            " slider.dispatchEvent(new Event('input')); })()"
        )
        tables = browser.value(
            f"Object.fromEntries([...{STATE}.requests.values()].flatMap((request) => [...request.sequences.values()])"
            ".filter((each) => each.tables[0].blocks.length)"
            ".map((each) => [`${each.number}.${each.index}`, each.tables[0].blocks]))"
        )
        assert tables == {str(name): list(each[0].blocks) for name, each in maps[step].tables.items()}
        cached = browser.value(
            f"[...{STATE}.pools[0].device.cached.keys()].filter((i) => {STATE}.pools[0].device.cached[i])"
        )
        assert set(cached) == maps[step].cached[0]
        holders = browser.value(f"{STATE}.pools[0].device.holders.map((each) => each ? each.length : 0)")
        owners = maps[step].owners()
        assert holders == [len(owners.get(block, ())) for block in range(60)]
    browser.value("document.querySelector('#back').click()")
    assert browser.value("hfPagedMap.trace.step") == last - 1
    browser.value("document.querySelector('#forward').click()")
    assert browser.value("hfPagedMap.trace.step") == last
    assert browser.value("document.querySelector('#first').textContent") not in ("", "\u2013")


AGREE = """(() => {
  const state = hfPagedMap.state;
  if (!state) return "no state";
  const numbers = (text) => (text.match(/\\d[\\d,]*/g) || []).map((each) => +each.replaceAll(",", ""));
  const text = (selector) => document.querySelector(selector).textContent;
  const wrong = [];
  for (const pool of state.pools) {
    const squares = pool.device.holders.filter((each, i) => each || pool.device.others[i]).length;
    if (squares !== pool.counts[0]) wrong.push(`${squares} squares, ${pool.counts[0]} held`);
  }
  const [held, shared, cached, free] = numbers(text("#held-more"));
  const grids = [...document.querySelectorAll("#pools > section > header:first-child small, #pools header:first-child small")];
  const sums = [0, 0, 0, 0];
  for (const each of new Set(grids)) numbers(each.textContent).slice(0, 4).forEach((value, i) => (sums[i] += value));
  if (String(sums) !== String([held, shared, cached, free])) wrong.push(`tile ${[held, shared, cached, free]}, grids ${sums}`);
  const [running, waiting, preempted = 0] = numbers(text("#queue-counts"));
  const listed = {};
  for (const each of document.querySelectorAll("#queue h3")) {
    const [count] = numbers(each.textContent);
    listed[each.textContent.split(" ")[0]] = count;
  }
  const of = (...names) => names.reduce((sum, name) => sum + (listed[name] || 0), 0);
  if (running !== of("decoding", "prefilling", "of")) wrong.push(`${running} running, listed ${JSON.stringify(listed)}`);
  if (waiting !== of("waiting")) wrong.push(`${waiting} waiting, listed ${JSON.stringify(listed)}`);
  if (preempted !== of("preempted", "swapped")) wrong.push(`${preempted} preempted, listed ${JSON.stringify(listed)}`);
  for (const request of state.requests.values()) {
    const tokens = tokensOf(state, request);
    if (request.most && tokens > request.most) wrong.push(`${tokens} of at most ${request.most} tokens`);
  }
  if (text("#detail-facts").includes("finished") && text("#detail-facts").includes("so far")) wrong.push(text("#detail-facts"));
  return wrong.join("; ");
})()"""


def test_the_numbers_of_a_frame_agree(browser: Browser) -> None:
    """Tile, grid, squares, queue and list come from one state, while requests without streams come, wait and end;
    the time between tokens is there without a stream, too.
    """
    with serving({"num_blocks": 120, "max_batch_sequences": 8}) as served:
        browser.open(served.url)
        browser.until("document.querySelector('#status').textContent === 'live'")
        threads = [
            threading.Thread(
                target=served.post,
                args=(
                    "/v1/completions",
                    {
                        "prompt": "The fox " * (1 + i % 5),
                        "max_tokens": 40 + 13 * (i % 7),
                        "n": 1 + i % 2,
                        "temperature": 1,
                    },
                ),
            )
            for i in range(24)
        ]
        for thread in threads:
            thread.start()
        browser.until(f"{HELD} > 10")
        browser.value(f"hfPagedMap.select([...{STATE}.requests.keys()][0])")
        frames = 0
        while any(thread.is_alive() for thread in threads) or frames < 20:
            assert browser.value(AGREE) == ""
            frames += 1
        browser.until("document.querySelector('#between').textContent.includes('ms')")
        for thread in threads:
            thread.join(LIMIT)


def test_the_numbers_of_a_traces_frames_agree(browser: Browser, tmp_path: Path) -> None:
    """The last step of a file notes the requests that end behind it."""
    path = tmp_path / "run.jsonl"
    with (
        Engine(demo.model(), num_blocks=64, block_size=4, max_batch_sequences=6) as engine,
        engine.trace(path),
    ):
        engine.generate([[5 + i] * (3 + i) for i in range(12)], max_new_tokens=9)
    file = tmp_path / "run.html"
    file.write_text(page(path))
    browser.open(file.as_uri())
    browser.until("document.querySelector('#status').textContent === 'a trace'")
    last = browser.value("hfPagedMap.trace.lines.length - 1")
    for step in range(last + 1):
        browser.value(f"hfPagedMap.trace.play(false) || hfPagedMap.trace.show({step})")
        browser.until(f"{AGREE} === ''")
    assert browser.value("document.querySelector('#queue-counts').textContent").startswith("0 running")
