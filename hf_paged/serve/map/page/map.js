"use strict";
// The page: where its lines come from (a server, or a trace in it), and what a user does with it.

const LEGEND = ["free", "held", "shared", "several", "cached", "host", "evicted", "copied", "others"];
const base = location.pathname.replace(/\/?$/, "/");

const view = {
  state: null,
  grids: [],
  selected: null,
  wanted: null, // the id of a request that this page has sent
  texts: new Map(),
  errors: [],
  lines: 0,
  measure: false,
  work: [], // milliseconds of each frame, while they are measured

  select(number) {
    view.selected = number === view.selected ? null : number;
    if (view.selected !== null) fetchText(view.selected);
    showText(view.texts.get(view.selected));
    if (view.state) paint(true);
  },
};
window.hfPagedMap = view;
window.addEventListener("error", (event) => view.errors.push(String(event.message)));

// ---- theme

function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  readTheme();
  for (const canvas of $("legend").querySelectorAll("canvas")) drawSign(canvas, canvas.dataset.sign);
  redraw();
}

function redraw() {
  if (view.state) for (const pool of view.state.pools) pool.device.redraw = pool.host.redraw = true;
}

function startTheme() {
  $("legend").replaceChildren(...LEGEND.map((name) => {
    const canvas = element("canvas", { "aria-hidden": "true" });
    canvas.dataset.sign = name;
    return element("li", {}, canvas, DRAWING.words[name]);
  }));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const forced = new URLSearchParams(location.search).get("theme");
  setTheme(forced ? forced === "dark" : dark.matches);
  dark.addEventListener("change", () => setTheme(dark.matches));
  $("theme").addEventListener("click", () => setTheme(!theme.dark));
}

// ---- a state on the page

function begin(state) {
  const other = !view.state || JSON.stringify(view.state.header) !== JSON.stringify(state.header);
  view.state = state;
  const { served, model, block_size: tokens } = state.header;
  $("model").textContent = served ? `${served} (${model})` : model;
  document.title = `${served || model}: the map of the blocks`;
  $("block").textContent = DRAWING.words.block.replace("{tokens}", tokens);
  redraw();
  if (other) buildPools(state);
}

function buildPools(state) {
  const callbacks = {
    point(grid, block) {
      showHover(view.state, grid, block);
      const holders = block >= 0 && grid.plane.holders[block];
      const own = holders && holders.find((each) => each.number === view.selected);
      if (view.texts.has(view.selected)) showText(view.texts.get(view.selected), own ? own.place : -1);
    },
    pick(grid, block) {
      const holders = block >= 0 && grid.plane.holders[block];
      if (!holders) view.select(view.selected);
      else if (holders[0].number !== view.selected) view.select(holders[0].number);
      else view.select(view.selected);
    },
  };
  view.grids = [];
  $("pools").replaceChildren(...state.pools.map((pool, index) => {
    const counts = element("small");
    const canvas = element("canvas", { "aria-label": `${titleOf(state, pool)}; arrow keys name each block`, role: "application" });
    const grid = new Grid(canvas, false, callbacks);
    const host = element("canvas", { "aria-label": `${pool.name} blocks on the host`, role: "application" });
    const hostGrid = new Grid(host, true, callbacks);
    const hostTitle = element("header", { hidden: true }, element("h3", { textContent: "on the host" }), element("small"));
    const rest = element("p", { className: "rest", hidden: true }, element("span"), element("button", { type: "button" }));
    rest.lastChild.addEventListener("click", () => {
      grid.whole = !grid.whole;
      drawGrids();
    });
    Object.assign(grid, { index, counts, rest });
    Object.assign(hostGrid, { index, counts: hostTitle.lastChild, title: hostTitle });
    host.hidden = true;
    view.grids.push(grid, hostGrid);
    return element("section", { className: "pool" },
      element("header", {}, element("h3", { textContent: titleOf(state, pool) }), counts), canvas, rest, hostTitle, host);
  }));
}

function drawGrids() {
  const { state } = view;
  const chosen = state.requests.get(view.selected);
  const lit = chosen && chosen.sequences.size ? view.selected : null;
  for (const grid of view.grids) {
    const pool = state.pools[grid.index];
    const [held, shared, cached, free, swapped] = pool.counts;
    if (grid.onHost) {
      if (swapped && grid.canvas.hidden) grid.canvas.hidden = grid.title.hidden = false;
      grid.counts.textContent = `${whole(swapped)} of at most ${whole(pool.host.total)} blocks`;
    } else {
      grid.counts.textContent = `${whole(held)} held, ${whole(shared)} shared, ${whole(cached)} cached, ${whole(free)} free`;
    }
    if (grid.canvas.hidden) continue;
    const plane = shownPlane(grid, grid.onHost ? pool.host : pool.device);
    grid.draw(plane, clock(), lit);
    if (grid.rest) showRest(grid, plane.total, pool.device.total);
  }
}

// What a grid leaves out, and how to see it.
function showRest(grid, shown, total) {
  const [note, button] = grid.rest.children;
  grid.rest.hidden = shown === total && !(grid.whole && shownBlocks(grid.top, total) < total);
  note.textContent = shown < total ? `+${whole(total - shown)} free` : "";
  button.textContent = grid.whole ? "Show those in use" : "Show all";
}

// Of a pool only as much is drawn as was ever in use, and a margin: there may be room for very many blocks.
function shownPlane(grid, plane) {
  const used = (block) => plane.holders[block] || plane.others[block] || plane.cached[block];
  const looked = grid.shown && grid.shown.source === plane ? plane.dirty : plane.holders.keys();
  let top = grid.top || 0;
  for (const block of looked) if (block >= top && used(block)) top = block + 1;
  grid.top = top;
  const total = grid.whole ? plane.total : shownBlocks(top, plane.total);
  if (!grid.shown || grid.shown.source !== plane || grid.shown.total !== total) {
    grid.shown = { ...plane, total, source: plane, redraw: true };
  }
  grid.shown.redraw ||= plane.redraw;
  plane.redraw = false;
  return grid.shown;
}

let refreshed = 0;
let mirrored = 0;
const painted = { state: null, step: -1, at: 0 };
const PAINTS = 100; // the least milliseconds between two states that are painted

// Squares and numbers, all of the state of now.
function paint(mirror) {
  Object.assign(painted, { state: view.state, step: view.state.step, at: performance.now() });
  drawGrids();
  refresh(mirror);
}

function refresh(mirror) {
  const time = performance.now();
  refreshed = time;
  showFigures(view.state, clock());
  showQueue(view.state, view.selected);
  showDetail(view.state, view.selected);
  showEvents(view.state);
  if (mirror || time - mirrored > 1000) {
    mirrored = time;
    showMirror(view.state);
  }
}

function frame() {
  const start = performance.now();
  if (trace) trace.advance(start);
  if (view.state) {
    // Between two states only time goes on.
    const changed = view.state !== painted.state || view.state.step !== painted.step;
    if (changed && start - painted.at >= PAINTS) paint(false);
    else if (!changed) {
      drawGrids();
      if (start - refreshed >= 250) refresh(false);
    }
  }
  if (view.measure) view.work.push(performance.now() - start);
  requestAnimationFrame(frame);
}

// The time of the map: that of a trace stands with it, that of a server goes on.
let offset = null;
const clock = () => (trace || offset === null ? view.state.at : performance.now() / 1000 - offset);

// ---- lines from a server

let key = null;
let connection = null;

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

function setStatus(text, kind = "") {
  $("status").textContent = text;
  $("status").className = `pill ${kind}`;
}

function take(line) {
  view.lines += 1;
  if (line.hf_paged) {
    offset = null;
    begin(newState(line));
  } else if (line.times) {
    if (view.state) view.state.times = line.times;
  } else if (line.end) {
    setStatus("the server is shutting down", "bad");
  } else {
    apply(view.state, line, false);
    const late = performance.now() / 1000 - line.at;
    offset = offset === null ? late : Math.min(offset, late);
    for (const [number, id] of Object.entries(line.ids || {})) {
      if (id !== view.wanted) continue;
      view.wanted = null;
      if (view.selected !== +number) view.select(+number);
    }
  }
}

async function connect() {
  connection = new AbortController();
  let wait = 2000;
  try {
    const answer = await fetch(base + "map", { headers: headers(), signal: connection.signal });
    if (answer.status === 401) return askForKey(key ? "The server does not know this key." : "");
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    if (key) sessionStorage.setItem("hf_paged key", key);
    $("key").hidden = true;
    $("ask").hidden = $("hold").hidden = false;
    setStatus("live", "live");
    await readLines(answer.body, take);
    setStatus("the stream has ended; trying again", "bad");
  } catch (error) {
    if (error.name === "AbortError") return;
    setStatus(`${error.message}; trying again`, "bad");
    wait = 3000;
  }
  setTimeout(connect, wait);
}

async function readLines(body, use) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") use(JSON.parse(line.slice(6)));
  }
}

function askForKey(message) {
  sessionStorage.removeItem("hf_paged key");
  setStatus("needs a key");
  $("key").hidden = false;
  $("key-error").textContent = message;
  $("key-input").focus();
}

async function fetchText(number) {
  if (trace || view.texts.has(number)) return;
  const answer = await fetch(`${base}map/requests/${number}`, { headers: headers() });
  if (!answer.ok) return;
  if (view.texts.size > 100) view.texts.clear();
  view.texts.set(number, (await answer.json()).blocks);
  if (number === view.selected) showText(view.texts.get(number));
}

async function startLive() {
  key = sessionStorage.getItem("hf_paged key");
  $("key").addEventListener("submit", (event) => {
    event.preventDefault();
    key = $("key-input").value.trim();
    $("key-input").value = "";
    connect();
  });
  $("hold").addEventListener("click", () => {
    const held = $("hold").textContent === "Pause";
    $("hold").textContent = held ? "Go on" : "Pause";
    if (held) {
      connection.abort();
      setStatus("paused");
    } else connect();
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  if (key || document.body.dataset.key !== "needed") connect();
  else askForKey("");
}

// ---- a prompt

let sending = null;
let model = null;

async function modelName() {
  if (model) return model;
  const found = await (await fetch(base + "v1/models", { headers: headers() })).json();
  return (model = found.data[0].id);
}

async function send() {
  if (sending) return sending.abort();
  sending = new AbortController();
  $("send").textContent = "Stop";
  $("answer").replaceChildren();
  const how = { greedy: { temperature: 0 }, sample: { temperature: 1, n: 4 }, beams: { use_beam_search: true, n: 4, temperature: 0 } };
  const id = `map-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  view.wanted = id;
  try {
    const answer = await fetch(base + "v1/completions", {
      method: "POST", signal: sending.signal,
      headers: { ...headers(), "content-type": "application/json", "x-request-id": id },
      body: JSON.stringify({ model: await modelName(), prompt: $("prompt").value, max_tokens: +$("tokens").value, stream: true,
                             ...how[$("how").value] }),
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    await readLines(answer.body, (chunk) => {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        while ($("answer").childElementCount <= choice.index) $("answer").append(element("p"));
        $("answer").children[choice.index].append(choice.text);
      }
    });
  } catch (error) {
    if (error.name !== "AbortError") $("answer").append(element("p", { textContent: error.message }));
  }
  sending = null;
  $("send").textContent = "Send";
}

// ---- lines of a trace in the page

let trace = null;

class TracePlayer {
  constructor(lines) {
    this.header = JSON.parse(lines[0]);
    this.lines = lines.slice(1);
    this.times = this.lines.map((line) => +/"at":([-\d.e]+)/.exec(line)[1]);
    this.step = -1;
    this.playing = false;
    this.frames = new Map();
    this.every = Math.max(100, Math.ceil(this.lines.length / 64));
    $("slider").max = this.lines.length - 1;
    $("slider").addEventListener("input", () => this.show(+$("slider").value));
    $("play").addEventListener("click", () => this.play(!this.playing));
    $("back").addEventListener("click", () => this.nudge(-1));
    $("forward").addEventListener("click", () => this.nudge(1));
    document.addEventListener("keydown", (event) => {
      if (["TEXTAREA", "INPUT", "SELECT", "BUTTON", "CANVAS"].includes(event.target.tagName)) return;
      if (event.key === ",") this.nudge(-1);
      else if (event.key === ".") this.nudge(1);
      else if (event.key === " ") this.play(!this.playing);
      else return;
      event.preventDefault();
    });
  }

  nudge(by) {
    this.play(false);
    this.show(Math.min(this.lines.length - 1, Math.max(0, this.step + by)));
  }

  play(on) {
    this.playing = on;
    $("play").textContent = on ? "Pause" : "Play";
    if (on && this.step === this.lines.length - 1) this.show(0);
    this.begun = performance.now();
    this.from = this.times[this.step];
  }

  advance(now) {
    if (!this.playing) return;
    const until = this.from + ((now - this.begun) / 1000) * +$("speed").value;
    let step = this.step;
    while (step + 1 < this.lines.length && this.times[step + 1] <= until) step += 1;
    if (step !== this.step) this.show(step, true);
    if (step === this.lines.length - 1) this.play(false);
  }

  // The state of a step: from the one that is shown, or from the last kept copy before it.
  show(step, playing) {
    let state = view.state;
    let at = this.step;
    if (step < at || at < 0 || step - at > this.every) {
      at = Math.max(-1, ...[...this.frames.keys()].filter((each) => each <= step));
      state = at < 0 ? newState(this.header) : structuredClone(this.frames.get(at));
    }
    while (at < step) {
      at += 1;
      apply(state, JSON.parse(this.lines[at]), true);
      if (at % this.every === 0 && !this.frames.has(at)) this.frames.set(at, structuredClone(state));
    }
    this.step = step;
    if (state !== view.state) begin(state);
    $("slider").value = step;
    $("when").textContent = `step ${step} of ${this.lines.length - 1} \u00b7 ${state.at.toFixed(3)} s`;
    if (!playing) {
      this.begun = performance.now();
      this.from = this.times[step];
      paint(true);
    }
  }
}

async function startTrace(packed) {
  const bytes = Uint8Array.from(atob(packed), (sign) => sign.charCodeAt(0));
  const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  trace = new TracePlayer(text.split("\n").filter(Boolean));
  view.trace = trace;
  $("transport").hidden = false;
  setStatus("a trace");
  for (const small of document.querySelectorAll(".tile small")) {
    if (small.textContent.startsWith("mean")) small.textContent = "mean, the 10 s before";
  }
  trace.show(0);
  trace.play(true);
}

window.addEventListener("resize", redraw);
startTheme();
const packed = $("trace").textContent.trim();
if (packed) startTrace(packed);
else startLive();
requestAnimationFrame(frame);
