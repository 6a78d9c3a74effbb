"use strict";
// What stands beside the grids: figures, the queue, the selected request's table, events, and the map as a table.

const $ = (id) => document.getElementById(id);
const ORDER = ["decoding", "prefilling", "swapped", "preempted", "waiting", "finished"];
const MOST_ROWS = 48; // of one state in the queue
const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && name !== "style") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function drawn(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const whole = (value) => Math.round(value).toLocaleString("en");

function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 9.95 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

// Blocks in order as runs: 3-7, 12, 40-41
function runs(blocks, join = ", ") {
  const found = [];
  for (let i = 0; i < blocks.length; ) {
    let end = i;
    while (end + 1 < blocks.length && blocks[end + 1] === blocks[end] + 1) end += 1;
    found.push(end === i ? `${blocks[i]}` : `${blocks[i]}\u2013${blocks[end]}`);
    i = end + 1;
  }
  return found.join(join);
}

// ---- figures

function showFigures(state, now) {
  const recent = figuresOf(state, now, 3);
  const minute = figuresOf(state, now, HISTORY);
  const ten = figuresOf(state, now, 10);
  const span = Math.min(3, Math.max(0.2, now));
  $("rate").textContent = whole(recent.sampled / span);
  const prompts = Math.max(0, recent.tokens - recent.sampled) / span;
  $("rate-more").textContent = prompts >= 1 ? `+ ${whole(prompts)} of prompts` : "";
  const given = state.times || {};
  const first = given.first ?? (ten.firsts ? ten.first / ten.firsts : null);
  // The server times streams; answers without a stream are timed by the engine's steps.
  const between = given.between ?? (ten.betweens ? ten.between / ten.betweens : null);
  $("first").textContent = seconds(first);
  $("between").textContent = seconds(between);
  const looked = minute.hits + minute.misses;
  $("hits").textContent = looked ? `${Math.round((100 * minute.hits) / looked)} %` : "\u2013";
  const total = state.pools.reduce((sum, pool) => sum + pool.device.total, 0);
  const [held, shared, cached, free, swapped] = [0, 1, 2, 3, 4].map((i) =>
    state.pools.reduce((sum, pool) => sum + pool.counts[i], 0));
  $("held").textContent = `${total ? Math.round((100 * held) / total) : 0} % held`;
  $("held-more").textContent = [`${whole(held)} blocks`, `${whole(shared)} shared`,
    `${whole(cached)} cached`, `${whole(free)} free`, ...(swapped ? [`${whole(swapped)} on the host`] : [])].join(" \u00b7 ");
  $("bar").children[0].style.width = `${(100 * held) / total}%`;
  $("bar").children[1].style.width = `${(100 * cached) / total}%`;
  drawSpark($("spark"), state, now);
}

// ---- the queue

const rows = new Map();

function queueRow(number, select) {
  let row = rows.get(number);
  if (!row) {
    const button = element("button", { type: "button" });
    const swatch = element("i", { className: "swatch" });
    const name = element("span");
    const bar = element("span", { className: "progress" }, element("i"), element("u"));
    const facts = element("small");
    button.append(swatch, name, bar, facts);
    button.addEventListener("click", () => select(number));
    row = { item: element("li", {}, button), button, swatch, name, bar, facts };
    rows.set(number, row);
  }
  return row;
}

function fillRow(state, request, status, selected) {
  const row = queueRow(request.number, view.select);
  const tokens = status === "finished" ? 0 : tokensOf(state, request);
  const most = Math.max(1, request.most);
  row.swatch.style.background = colourOf(request.number, 3);
  row.name.textContent = `#${request.number}${request.width > 1 ? ` \u00d7${request.width}` : ""}`;
  row.bar.style.visibility = status === "finished" ? "hidden" : "visible";
  row.bar.firstChild.style.width = `${Math.min(100, (100 * tokens) / most)}%`;
  row.bar.firstChild.style.background = colourOf(request.number, 2);
  row.bar.lastChild.style.left = `${Math.min(100, (100 * request.prompt) / most)}%`;
  row.facts.textContent = status === "finished" ? request.reason : `${whole(tokens)} / ${whole(most)}`;
  row.button.setAttribute("aria-pressed", String(request.number === selected));
  row.button.title = `prompt of ${request.prompt} tokens, at most ${request.most}` +
    (request.id ? `; ${request.id}` : "");
  return row.item;
}

function showQueue(state, selected) {
  const byStatus = new Map(ORDER.map((status) => [status, []]));
  for (const request of state.requests.values()) byStatus.get(statusOf(state, request)).push(request);
  byStatus.set("finished", state.finished.map((number) => state.requests.get(number)).filter(Boolean));
  const list = [];
  const seen = new Set();
  for (const [status, requests] of byStatus) {
    if (!requests.length) continue;
    if (status !== "finished") requests.sort((one, other) => one.number - other.number);
    const more = requests.length > MOST_ROWS ? `, the first ${MOST_ROWS}` : "";
    list.push(heading(`${status} (${requests.length}${more})`));
    for (const request of requests.slice(0, status === "finished" ? 8 : MOST_ROWS)) {
      seen.add(request.number);
      list.push(fillRow(state, request, status, selected));
    }
  }
  const [waiting, running, preempted] = countsOf(state).map((count, i) => count + state.others[i]);
  if (state.others[1]) list.push(heading(`of others: ${state.others[1]} running`));
  $("queue-counts").textContent = `${running} running, ${waiting} waiting` +
    (preempted ? `, ${preempted} preempted` : "");
  for (const number of rows.keys()) if (!seen.has(number)) rows.delete(number);
  replaceIfOther($("queue"), list);
}

const headings = new Map();

function heading(text) {
  if (headings.size > 200) headings.clear();
  if (!headings.has(text)) headings.set(text, element("li", {}, element("h3", { textContent: text })));
  return headings.get(text);
}

function replaceIfOther(list, items) {
  const same = list.childElementCount === items.length && items.every((item, i) => list.children[i] === item);
  if (!same) {
    const focused = document.activeElement;
    list.replaceChildren(...items);
    if (focused && list.contains(focused)) focused.focus({ preventScroll: true });
  }
}

// ---- a block, in words

// The pool whose blocks are slots: each holds what all tokens of a sequence have come to.
const STATES = "state";

function describe(state, pool, onHost, block) {
  const plane = onHost ? pool.host : pool.device;
  const name = pool.names.get(block);
  const digest = name && !onHost ? `, digest ${name}\u2026` : "";
  const where = `${pool.name === STATES ? "Slot" : "Block"} ${block}${onHost ? " on the host" : ""}`;
  const holders = plane.holders[block];
  if (holders) {
    const by = new Map();
    for (const each of holders) by.set(each.number, [...(by.get(each.number) || []), each.index]);
    const names = [...by].map(([number, indices]) => {
      const request = state.requests.get(number);
      return `request ${number}` + (request && request.width > 1 ? ` (sequences ${runs(indices.sort((a, b) => a - b))})` : "");
    });
    const size = state.header.block_size;
    const place = holders[0].place;
    const copy = !onHost && plane.copies.get(block);
    const tokens = pool.name === STATES ? "" : `, place ${place} (tokens ${place * size}\u2013${place * size + size - 1})`;
    return [where, `held by ${names.join(", ")}${tokens}` +
      digest + (copy ? `, copied from block ${copy.source} on write` : "")];
  }
  if (plane.others[block]) return [where, "held by requests of others"];
  if (plane.cached[block]) return [where, `cached: no request holds it, a prompt may find it${digest}`];
  return [where, "free"];
}

function showHover(state, grid, block) {
  if (block < 0) {
    $("hover").textContent = "Point at a block, or focus a grid and use the arrow keys.";
    return;
  }
  const [where, facts] = describe(state, state.pools[grid.index], grid.onHost, block);
  $("hover").replaceChildren(element("b", { textContent: where }), ` ${facts}`);
}

// ---- the selected request

// The places of a group's tables, and at each the blocks and which sequences have them.
function columnsOf(state, request, kind) {
  const sequences = [...request.sequences.values()].sort((one, other) => one.index - other.index);
  const onHost = sequences.some((each) => each.host);
  const blocksOf = (sequence) => (sequence.host ? sequence.host[kind] || [] : sequence.tables[kind].blocks);
  const firstOf = (sequence) => (sequence.host ? 0 : sequence.tables[kind].released);
  const begin = Math.min(...sequences.map(firstOf));
  const end = Math.max(...sequences.map((each) => firstOf(each) + blocksOf(each).length));
  const columns = [];
  for (let place = begin; place < end; place += 1) {
    const blocks = sequences.map((each) => blocksOf(each)[place - firstOf(each)]);
    columns.push({ place, blocks });
  }
  return { sequences, columns, onHost };
}

// Sequences so that those with the longest common beginning are neighbours: their common blocks are one box.
function lanesOf(columns, count) {
  const order = [...Array(count).keys()];
  const split = (lanes, i) => {
    if (lanes.length < 2 || i >= columns.length) return lanes;
    const parts = new Map();
    for (const lane of lanes) {
      const block = columns[i].blocks[lane];
      parts.set(block, [...(parts.get(block) || []), lane]);
    }
    return [...parts.values()].flatMap((part) => split(part, i + 1));
  };
  return columns.length > 4000 ? order : split(order, 0);
}

const shape = (column, lanes) => lanes.map((lane, i) =>
  (i && column.blocks[lane] === column.blocks[lanes[i - 1]] ? "=" : "|")).join("");

// Columns as they are drawn: of a long run in which nothing forks only the ends.
function visible(columns, lanes, room) {
  const found = [];
  const ends = columns.length <= room ? columns.length : 3;
  for (let i = 0; i < columns.length; ) {
    let end = i;
    while (end + 1 < columns.length && shape(columns[end + 1], lanes) === shape(columns[i], lanes)) end += 1;
    const run = columns.slice(i, end + 1);
    if (run.length <= 2 * ends + 1) found.push(...run);
    else found.push(...run.slice(0, ends), { skipped: run.length - 2 * ends, like: run[ends] }, ...run.slice(-ends));
    i = end + 1;
  }
  return found;
}

function showDetail(state, selected) {
  const request = state.requests.get(selected);
  const panel = $("detail");
  if (!request) {
    $("tree").replaceChildren();
    panel.dataset.number = "";
    if (selected !== null) $("detail-facts").textContent = `Request ${selected} has ended, and its blocks are given back.`;
    return;
  }
  const status = statusOf(state, request);
  $("detail-title").textContent = `Request ${request.number}`;
  const facts = [status === "finished" ? `finished: ${request.reason}` : status, `prompt of ${whole(request.prompt)} tokens`];
  if (status !== "finished") facts.push(`${whole(tokensOf(state, request))} of at most ${whole(request.most)} so far`);
  if (request.width > 1) facts.push(`${request.sequences.size} of ${request.width} sequences`);
  if (request.width > 1) facts.push("a corner: copied on write");
  if (request.id) facts.push(`id ${request.id}`);
  $("detail-facts").textContent = facts.join(" \u00b7 ");
  if (!request.sequences.size) {
    $("tree").replaceChildren();
    return;
  }
  $("tree").replaceChildren(...state.pools.map((pool, kind) => drawTree(state, request, pool, kind)).filter(Boolean));
}

function drawTree(state, request, pool, kind) {
  const { sequences, columns, onHost } = columnsOf(state, request, kind);
  if (!columns.length) return null;
  const width = Math.max(300, $("tree").clientWidth - 4);
  if (sequences.length === 1) return drawStrip(state, request, pool, columns, onHost, width);
  const lanes = lanesOf(columns, sequences.length);
  const left = 78;
  const cell = 22;
  const shown = visible(columns, lanes, Math.floor((width - left) / cell));
  const tall = Math.max(12, Math.min(20, Math.floor(320 / lanes.length)));
  const plane = onHost ? pool.host : pool.device;
  const total = left + shown.reduce((sum, column) => sum + (column.skipped ? 2 * cell : cell), 0) + 4;
  const svg = drawn("svg", { width: Math.max(width, total), height: lanes.length * tall + 18, role: "img" });
  svg.append(drawn("title", {}, `the blocks of the ${sequences.length} sequences of request ${request.number}, ${pool.name}`));
  lanes.forEach((lane, i) => {
    svg.append(drawn("text", { x: 0, y: i * tall + tall / 2 + 4, class: "lane" }, `sequence ${sequences[lane].index}`));
  });
  let x = left;
  let before = null;
  for (const column of shown) {
    const real = column.skipped ? column.like : column;
    const span = column.skipped ? 2 * cell : cell;
    for (let i = 0; i < lanes.length; ) {
      let end = i;
      while (end + 1 < lanes.length && real.blocks[lanes[end + 1]] === real.blocks[lanes[i]]) end += 1;
      const block = real.blocks[lanes[i]];
      if (block !== undefined) {
        const box = { x, y: i * tall + 1, width: span - 4, height: (end - i + 1) * tall - 3 };
        svg.append(nodeOf(state, request, pool, plane, onHost, real, block, end - i + 1, box, column.skipped));
        if (before) svg.append(drawn("path", { d: `M${x - 4} ${(i + end + 1) * tall / 2}h4`, stroke: theme.quiet, fill: "none" }));
      }
      i = end + 1;
    }
    svg.append(drawn("text", { x: x + (span - 4) / 2, y: lanes.length * tall + 12, "text-anchor": "middle" },
      column.skipped ? "" : String(column.place)));
    before = column;
    x += span;
  }
  return svg;
}

// One block of a tree: as tall as the sequences that share it.
function nodeOf(state, request, pool, plane, onHost, column, block, count, box, skipped) {
  const group = drawn("g", {});
  const holders = plane.holders[block] || [];
  if (skipped) {
    group.append(drawn("rect", { ...box, rx: 3, fill: colourOf(request.number, count), opacity: 0.45 }));
    group.append(drawn("text", { x: box.x + box.width / 2, y: box.y + box.height / 2 + 3.5, "text-anchor": "middle",
                                 class: "more" }, `+${skipped}`));
    group.append(drawn("title", {}, `${skipped} more blocks, held by ${count} of its sequences`));
    return group;
  }
  group.append(drawn("rect", { ...box, rx: 3, fill: colourOf(request.number, Math.max(count, holders.length)) }));
  const copy = onHost ? null : plane.copies.get(block);
  if (copy) {
    group.append(drawn("path", { d: `M${box.x} ${box.y}h9l-9 9z`, fill: theme.ink }));
  }
  const [where, facts] = describe(state, pool, onHost, block);
  group.append(drawn("title", {}, `${where} ${facts}`));
  return group;
}

// A single sequence: its blocks in logical order, in lines.
function drawStrip(state, request, pool, columns, onHost, width) {
  const cell = 30;
  const perLine = Math.max(1, Math.floor(width / cell));
  const shown = columns.slice(0, 20 * perLine);
  const plane = onHost ? pool.host : pool.device;
  const svg = drawn("svg", { width, height: Math.ceil(shown.length / perLine) * 24, role: "img" });
  svg.append(drawn("title", {}, `the blocks of request ${request.number} in logical order, ${pool.name}`));
  shown.forEach((column, i) => {
    const block = column.blocks[0];
    const box = { x: (i % perLine) * cell, y: Math.floor(i / perLine) * 24, width: cell - 3, height: 20 };
    const group = nodeOf(state, request, pool, plane, onHost, column, block, 1, box, 0);
    group.append(drawn("text", { x: box.x + box.width / 2, y: box.y + 14, "text-anchor": "middle", class: "box" },
      String(block)));
    svg.append(group);
  });
  return svg;
}

function showText(blocks, place) {
  if (!blocks) {
    $("detail-text").textContent = "";
    return;
  }
  $("detail-text").replaceChildren(...blocks.map((text, i) =>
    element(i === place ? "mark" : "span", { textContent: text })));
}

// ---- events, and the map as a table

let lastEvent = null;

function showEvents(state) {
  const last = state.events[state.events.length - 1] || null;
  if (last === lastEvent) return;
  lastEvent = last;
  const list = $("events");
  const below = list.scrollTop > 0 ? list.scrollHeight - list.scrollTop : 0; // who has scrolled reads on
  list.replaceChildren(...state.events.slice(-60).reverse().map((each) =>
    element("li", {}, element("time", { textContent: `${each.at.toFixed(1)} s` }),
      element("span", { textContent: each.number === undefined ? each.text : `#${each.number} ${each.text}` }))));
  if (below) list.scrollTop = list.scrollHeight - below;
}

function showMirror(state) {
  if (!$("mirror").open) return;
  const tables = state.pools.map((pool, kind) => {
    const body = element("tbody");
    for (const request of state.requests.values()) {
      for (const sequence of request.sequences.values()) {
        const { blocks, released } = sequence.tables[kind];
        const host = (sequence.host || [])[kind] || [];
        if (!blocks.length && !host.length) continue;
        const shared = blocks.filter((block) => (pool.device.holders[block] || []).length > 1);
        body.append(tableRow(request.number, sequence.index, statusOf(state, request), blocks.length || host.length,
          (host.length ? "on the host: " : "") + (released ? `${released} released, ` : "") + runs(host.length ? host : blocks),
          runs(shared)));
      }
    }
    const cached = [...pool.device.cached.keys()].filter((block) => pool.device.cached[block]);
    const others = [...pool.device.others.keys()].filter((block) => pool.device.others[block]);
    if (others.length) body.append(tableRow("others", "", "", others.length, runs(others), ""));
    body.append(tableRow("none", "", "cached", cached.length, runs(cached), ""));
    const head = element("tr", {}, ...["request", "sequence", "state", "blocks", "in logical order", "shared"].map((text) =>
      element("th", { scope: "col", textContent: text })));
    return element("table", {}, element("caption", { textContent: titleOf(state, pool) }), element("thead", {}, head), body);
  });
  $("mirror-body").replaceChildren(...tables);
}

function tableRow(...cells) {
  return element("tr", {}, ...cells.map((text) => element("td", { textContent: String(text) })));
}

function titleOf(state, pool) {
  if (pool.name === STATES) return `recurrent states: ${whole(pool.device.total)} slots, one for each sequence`;
  const kind = pool.window === null ? `${pool.name} attention` : `attention to the last ${pool.window} tokens`;
  return `${kind}: ${whole(pool.device.total)} blocks of ${state.header.block_size} tokens`;
}
