"use strict";
// The state of a map, and how a line of a trace changes it. A live stream and a file have the same lines.
// A state is plain data: structuredClone copies it, which is what the time slider goes back to.

const HISTORY = 60; // seconds of figures that are kept
const FLASH = 0.8; // seconds for which an eviction or a copy is shown

function newState(header) {
  return {
    header,
    at: 0,
    step: -1,
    pools: header.kinds.map(([name, window, total], i) => ({
      name,
      window,
      device: newPlane(total),
      host: newPlane((header.host || [])[i] || 0),
      names: new Map(),
      counts: [0, 0, 0, total, 0],
    })),
    requests: new Map(),
    finished: [],
    others: [0, 0, 0],
    history: [],
    times: null,
    awaited: [],
    events: [],
  };
}

// One grid: who holds each block, which are cached, which are held by requests of others.
function newPlane(total) {
  return {
    total,
    holders: new Array(total).fill(null),
    cached: new Uint8Array(total),
    others: new Uint8Array(total),
    flashes: new Map(),
    copies: new Map(),
    dirty: new Set(),
    redraw: true,
  };
}

function requestOf(state, number) {
  let request = state.requests.get(number);
  if (!request) {
    request = { number, prompt: 0, most: 0, width: 1, state: "waiting", sequences: new Map(), id: "", came: state.at,
                first: null };
    state.requests.set(number, request);
  }
  return request;
}

function sequenceOf(state, name) {
  const [number, index] = name.split(".").map(Number);
  const request = requestOf(state, number);
  let sequence = request.sequences.get(index);
  if (!sequence) {
    const tables = state.pools.map(() => ({ released: 0, blocks: [] }));
    sequence = { number, index, tables, host: null, computed: 0, last: null };
    request.sequences.set(index, sequence);
  }
  return sequence;
}

function hold(plane, block, sequence, place) {
  const holders = plane.holders[block];
  const entry = { number: sequence.number, index: sequence.index, place };
  const copy = plane.copies.get(block);
  if (copy && copy.number !== sequence.number) plane.copies.delete(block);
  if (holders) holders.push(entry);
  else plane.holders[block] = [entry];
  plane.dirty.add(block);
}

function release(plane, block, sequence) {
  const holders = plane.holders[block];
  if (!holders) return;
  const i = holders.findIndex((each) => each.number === sequence.number && each.index === sequence.index);
  if (i >= 0) holders.splice(i, 1);
  if (!holders.length) plane.holders[block] = null;
  plane.dirty.add(block);
}

// A table as it is from now on: blocks that stay where they are keep their holders' entries.
function setTable(plane, table, sequence, released, same, added) {
  const passed = Math.max(0, released - table.released);
  const kept = released >= table.released ? table.blocks.slice(passed, passed + same) : [];
  const gone = released >= table.released
    ? table.blocks.slice(0, passed).concat(table.blocks.slice(passed + same)) : table.blocks;
  for (const block of gone) release(plane, block, sequence);
  added.forEach((block, i) => hold(plane, block, sequence, released + kept.length + i));
  table.released = released;
  table.blocks = kept.concat(added);
}

function note(state, text, number) {
  state.events.push({ at: state.at, text, number });
  if (state.events.length > 200) state.events.splice(0, 100);
}

// Enter a line. exact: every step has its line, so times can be read off them.
function apply(state, line, exact) {
  state.at = line.at;
  state.step += 1;
  const begun = state.step > 0;
  for (const [number, prompt, most, width] of line.arrived || []) {
    Object.assign(requestOf(state, number), { prompt, most, width });
  }
  for (const [number, id] of Object.entries(line.ids || {})) requestOf(state, +number).id = id;
  applyHost(state, line);
  applyTables(state, line);
  applyPools(state, line, begun);
  for (const [number, status] of Object.entries(line.states || {})) requestOf(state, +number).state = status;
  applyEvents(state, line, begun);
  applyRows(state, line, exact, begun);
  // A file notes with a step what ends behind it, a live line what has ended before it.
  if (exact) state.others = othersIn(state, line);
  for (const [number, reason] of line.ended || []) finish(state, number, reason);
  if (!exact) state.others = othersIn(state, line);
}

// How many requests wait, run and are preempted: the one count from which the list and its sums come.
function countsOf(state) {
  const counts = { waiting: 0, running: 0, preempted: 0 };
  for (const request of state.requests.values()) if (request.state in counts) counts[request.state] += 1;
  return [counts.waiting, counts.running, counts.preempted];
}

// Those of others, which are in no list of this viewer's.
function othersIn(state, line) {
  const own = countsOf(state);
  return line.requests.map((count, i) => Math.max(0, count - own[i]));
}

function applyTables(state, line) {
  const entries = Object.entries(line.tables || {});
  for (const [name, changes] of entries) {
    if (changes !== null) continue;
    const sequence = sequenceOf(state, name);
    state.pools.forEach((pool, i) => setTable(pool.device, sequence.tables[i], sequence, 0, 0, []));
    if (!sequence.host) dropSequence(state, sequence);
  }
  for (const [name, changes] of entries) {
    if (changes === null) continue;
    const sequence = sequenceOf(state, name);
    state.pools.forEach((pool, i) => setTable(pool.device, sequence.tables[i], sequence, ...changes[i]));
  }
}

function dropSequence(state, sequence) {
  const request = state.requests.get(sequence.number);
  if (request) request.sequences.delete(sequence.index);
}

function applyHost(state, line) {
  for (const [name, blocks] of Object.entries(line.host || {})) {
    const sequence = sequenceOf(state, name);
    state.pools.forEach((pool, i) => {
      for (const block of (sequence.host || [])[i] || []) release(pool.host, block, sequence);
      ((blocks || [])[i] || []).forEach((block, place) => hold(pool.host, block, sequence, place));
    });
    sequence.host = blocks;
    if (!blocks && !sequence.tables.some((table) => table.blocks.length)) dropSequence(state, sequence);
  }
}

function mark(plane, blocks, values, value) {
  for (const block of blocks) {
    values[block] = value;
    plane.dirty.add(block);
  }
}

function applyPools(state, line, begun) {
  state.pools.forEach((pool, i) => {
    const plane = pool.device;
    const [came, left] = (line.cached || [])[i] || [[], []];
    mark(plane, left, plane.cached, 0);
    mark(plane, came, plane.cached, 1);
    for (const [others, target] of [[line.others, plane], [line.others_host, pool.host]]) {
      const [theirs, free] = (others || [])[i] || [[], []];
      mark(target, free, target.others, 0);
      mark(target, theirs, target.others, 1);
      if (target === plane) for (const block of theirs) pool.names.delete(block);
    }
    for (const [block, name] of Object.entries((line.names || [])[i] || {})) {
      if (name === null) pool.names.delete(+block);
      else pool.names.set(+block, name);
    }
    if (begun) for (const block of (line.evicted || [])[i] || []) flash(plane, block, state.at);
    for (const [source, target] of (line.copies || [])[i] || []) {
      const number = (plane.holders[target] || [{}])[0].number;
      plane.copies.set(target, { source, at: state.at, number });
      flash(plane, target, state.at);
    }
    pool.counts = [...line.blocks[i], 0].slice(0, 5);
  });
}

function flash(plane, block, at) {
  plane.flashes.set(block, at);
  plane.dirty.add(block);
}

function applyEvents(state, line, begun) {
  if (!begun) return;
  const evicted = (line.evicted || []).reduce((sum, each) => sum + each.length, 0);
  const copies = new Map();
  (line.copies || []).forEach((pairs, i) => {
    for (const [, target] of pairs) {
      for (const { number } of (state.pools[i].device.holders[target] || []).slice(0, 1)) {
        copies.set(number, (copies.get(number) || 0) + 1);
      }
    }
  });
  const counted = line.counted || {};
  for (const number of line.preempted || []) {
    const there = [...requestOf(state, number).sequences.values()].some((each) => each.host);
    note(state, there ? "preempted: its blocks wait on the host" : "preempted: to be computed again", number);
  }
  for (const number of line.admitted || []) {
    note(state, counted.swapped_in ? "runs again, or begins" : "begins", number);
  }
  for (const [number, count] of copies) {
    note(state, `forks: ${count} ${count === 1 ? "block" : "blocks"} copied on write`, number);
  }
  if (evicted) note(state, `${evicted} cached ${evicted === 1 ? "block" : "blocks"} evicted`);
}

function applyRows(state, line, exact, begun) {
  const since = state.history.length ? state.at - state.history[state.history.length - 1].at : 0;
  const figures = { at: state.at, sampled: line.sampled || 0, tokens: (line.counted || {}).tokens || 0,
                    hits: (line.counted || {}).hits || 0, misses: (line.counted || {}).misses || 0,
                    first: 0, firsts: 0, between: 0, betweens: 0 };
  if (exact) {
    for (const number of state.awaited) {
      const request = state.requests.get(number);
      if (!request || request.first !== null) continue;
      request.first = state.at - request.came;
      figures.first += request.first;
      figures.firsts += 1;
    }
    state.awaited = [];
  }
  for (const [number, index, start, tokens] of line.rows || []) {
    const request = requestOf(state, number);
    const sequence = sequenceOf(state, `${number}.${index}`);
    sequence.computed = start + tokens;
    if (!exact || start + tokens < request.prompt) continue;
    if (request.first === null) state.awaited.push(number);
    if (sequence.last !== null && tokens === 1) {
      figures.between += state.at - sequence.last;
      figures.betweens += 1;
    }
    sequence.last = state.at;
  }
  const steps = (line.counted || {}).steps || 0;
  if (!exact && begun && steps && figures.sampled) {
    // A live line stands for several steps, each of which gave a token to whatever decodes.
    figures.between = since;
    figures.betweens = steps;
  }
  state.history.push(figures);
  while (state.history.length && state.history[0].at < state.at - HISTORY) state.history.shift();
}

function finish(state, number, reason) {
  const request = state.requests.get(number);
  if (!request) return;
  for (const sequence of request.sequences.values()) {
    // A file has the end of a request before its tables' end: what is gone is removed with the next line.
    if (!sequence.host && !sequence.tables.some((table) => table.blocks.length)) {
      request.sequences.delete(sequence.index);
    }
  }
  request.state = "finished";
  request.reason = reason;
  note(state, `ends: ${reason}`, number);
  state.finished.unshift(number);
  for (const old of state.finished.splice(12)) {
    const gone = state.requests.get(old);
    if (gone && !gone.sequences.size) state.requests.delete(old);
    else if (gone) state.finished.push(old);
  }
}

// What a request is doing, as the queue names it.
function statusOf(state, request) {
  if (request.state === "preempted") {
    return [...request.sequences.values()].some((each) => each.host) ? "swapped" : "preempted";
  }
  if (request.state !== "running") return request.state;
  return tokensOf(state, request) < request.prompt ? "prefilling" : "decoding";
}

// The tokens of a request's longest sequence: by its last row, or at least by its blocks.
function tokensOf(state, request) {
  const size = state.header.block_size;
  let most = 0;
  for (const sequence of request.sequences.values()) {
    const table = sequence.tables[0];
    const least = table.blocks.length ? (table.released + table.blocks.length - 1) * size + 1 : 0;
    most = Math.max(most, sequence.computed, sequence.computed ? 0 : least);
  }
  return most;
}

// Means and sums over the last seconds of a state's history.
function figuresOf(state, now, seconds) {
  const sums = { sampled: 0, tokens: 0, hits: 0, misses: 0, first: 0, firsts: 0, between: 0, betweens: 0 };
  for (const each of state.history) {
    if (each.at <= now - seconds) continue;
    for (const name of Object.keys(sums)) sums[name] += each[name];
  }
  return sums;
}
