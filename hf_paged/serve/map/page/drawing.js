"use strict";
// Canvases of the blocks. What a block is can be read from its form alone: held blocks are filled, cached ones are
// hollow, those on the host are triangles, an eviction is a cross. Colour is the request, strength how many hold it.
// DRAWING, the content of signs.json, has the forms, colours and words: static pictures are drawn by it, too.

let theme = {};

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  theme = { dark: document.documentElement.classList.contains("dark"), colours: new Map() };
  for (const name of ["page", "panel", "line", "ink", "quiet", "free", "cached", "other", "accent", "warn"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

function levelOf(count) {
  let level = 0;
  while (level + 1 < DRAWING.holders.length && count >= DRAWING.holders[level + 1]) level += 1;
  return level;
}

// The colour of a request: hues of neighbours in the order of arrival lie far apart.
function colourOf(number, count = 1) {
  const level = levelOf(count);
  const key = number * 8 + level;
  let colour = theme.colours.get(key);
  if (!colour) {
    const [turn, first] = DRAWING.hue;
    const lightness = DRAWING.lightness[theme.dark ? "dark" : "light"][level];
    colour = `oklch(${lightness} ${DRAWING.chroma[level]} ${((number * turn + first) % 360).toFixed(1)})`;
    theme.colours.set(key, colour);
  }
  return colour;
}

const paths = new Map();

function pathOf(text) {
  if (!paths.has(text)) paths.set(text, new Path2D(text));
  return paths.get(text);
}

// A sign in a square of `size` from (x, y). A line lies within its square.
function sign(context, name, x, y, size, own) {
  for (const [colour, path, stroke] of DRAWING.signs[name]) {
    const line = stroke ? Math.min(2, Math.max(1, stroke * size)) : 0;
    const value = colour === "own" ? own : theme[colour];
    context.save();
    context.translate(x + line / 2, y + line / 2);
    context.scale(size - line, size - line);
    if (stroke) {
      context.strokeStyle = value;
      context.lineWidth = line / (size - line);
      context.stroke(pathOf(path));
    } else {
      context.fillStyle = value;
      context.fill(pathOf(path));
    }
    context.restore();
  }
}

// A held block: a mark says that several requests hold it, in the corner if a number is in the middle.
function held(context, x, y, size, holders, numbered = false) {
  sign(context, "held", x, y, size, colourOf(holders[0].number, holders.length));
  if (!holders.some((each) => each.number !== holders[0].number)) return;
  sign(context, numbered ? "corner" : "several", x, y, size);
}

// How many blocks a map shows if none from number `top` on is in use: whole rows with a margin, or all of a pool
// that has little more. As shown_blocks() of picture.py.
function shownBlocks(top, total) {
  const { row, least, margin } = DRAWING.shown;
  const shown = Math.max(least, Math.ceil((top + margin) / row) * row);
  return shown + row > total ? total : shown;
}

// The grid of one pool, or of its part in the host's memory.
class Grid {
  constructor(canvas, onHost, callbacks) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.onHost = onHost;
    this.callbacks = callbacks;
    this.cursor = -1;
    this.cell = 0;
    this.plane = newPlane(0);
    this.flashing = new Set();
    canvas.tabIndex = 0;
    canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    canvas.addEventListener("click", (event) => callbacks.pick(this, this.at(event)));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.cell);
    const row = Math.floor((event.clientY - box.top) / this.cell);
    const block = row * this.columns + column;
    return column >= 0 && column < this.columns && block < this.plane.total ? block : -1;
  }

  point(block) {
    if (block === this.cursor) return;
    this.plane.dirty.add(this.cursor).add(block);
    this.cursor = block;
    this.callbacks.point(this, block);
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const last = this.plane.total - 1;
    if (last < 0) return;
    let next = null;
    if (event.key in steps) next = Math.max(0, this.cursor) + (this.cursor < 0 ? 0 : steps[event.key]);
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = last;
    else if (event.key === "Enter" || event.key === " ") this.callbacks.pick(this, this.cursor);
    else return;
    event.preventDefault();
    if (next !== null) this.point(Math.min(last, Math.max(0, next)));
  }

  // The largest cells with which all blocks fit into the width and a bounded height.
  layout(plane) {
    const width = this.canvas.clientWidth;
    const ratio = window.devicePixelRatio || 1;
    const most = this.onHost ? 120 : Math.max(260, Math.min(560, window.innerHeight * 0.55));
    let cell = this.onHost ? 18 : 30;
    while (cell > 3 && Math.ceil(plane.total / Math.floor(width / cell)) * cell > most) cell -= 1;
    if (plane === this.plane && width === this.width && cell === this.cell && ratio === this.ratio) return;
    Object.assign(this, { plane, width, cell, ratio });
    this.columns = Math.max(1, Math.floor(width / cell));
    this.gap = cell >= 10 ? 2 : cell >= 5 ? 1 : 0.5;
    const height = Math.ceil(plane.total / this.columns) * cell;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    plane.redraw = true;
  }

  // Draw what has changed. lit: the number of the request that is selected, or null.
  draw(plane, now, lit) {
    if (!this.canvas.clientWidth) return;
    this.layout(plane);
    const context = this.context;
    if (lit !== this.lit) plane.redraw = true;
    this.lit = lit;
    for (const block of this.flashing) plane.dirty.add(block);
    if (plane.redraw) {
      context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      context.fillStyle = theme.panel;
      context.fillRect(0, 0, this.width, this.canvas.height);
      for (let block = 0; block < plane.total; block += 1) this.block(plane, block, now);
    } else {
      for (const block of plane.dirty) if (block >= 0 && block < plane.total) this.block(plane, block, now);
    }
    plane.redraw = false;
    plane.dirty.clear();
  }

  block(plane, block, now) {
    const { context, cell, gap } = this;
    const x = (block % this.columns) * cell;
    const y = Math.floor(block / this.columns) * cell;
    const size = cell - gap;
    const holders = plane.holders[block];
    const mine = this.lit !== null && holders && holders.find((each) => each.number === this.lit);
    context.fillStyle = theme.panel;
    context.fillRect(x, y, cell, cell);
    context.globalAlpha = this.lit === null || mine ? 1 : theme.dark ? 0.32 : 0.4;
    if (holders && this.onHost) sign(context, "host", x, y, size, colourOf(holders[0].number, 3));
    else if (holders) held(context, x, y, size, mine ? front(holders, mine) : holders, mine && size >= 15);
    else if (plane.others[block] && this.onHost) sign(context, "host", x, y, size, theme.other);
    else if (plane.others[block]) sign(context, "others", x, y, size);
    else if (plane.cached[block]) sign(context, "cached", x, y, size);
    else sign(context, "free", x, y, size);
    context.globalAlpha = 1;
    if (mine && size >= 15) this.number(x, y, size, mine.place, levelOf(holders.length));
    this.marks(plane, block, x, y, size, now, this.lit === null || mine ? 1 : 0.3);
  }

  number(x, y, size, place, level) {
    const { context } = this;
    context.fillStyle = !theme.dark && level > 1 ? "#ffffff" : "#0d1117";
    context.font = `600 ${Math.min(11, size * 0.52)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(String(place), x + size / 2, y + size / 2 + 0.5, size - 1);
  }

  marks(plane, block, x, y, size, now, strength) {
    const since = plane.flashes.get(block);
    if (since !== undefined && now - since < FLASH && now >= since) {
      const copy = plane.copies.get(block);
      this.context.globalAlpha = strength * (1 - (now - since) / FLASH);
      sign(this.context, copy && copy.at === since ? "copied" : "evicted", x, y, size);
      this.context.globalAlpha = 1;
      this.flashing.add(block);
    } else if (this.flashing.delete(block) || since !== undefined) {
      plane.flashes.delete(block);
    }
    if (block === this.cursor) {
      this.context.strokeStyle = theme.accent;
      this.context.lineWidth = 2;
      this.context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
    }
  }
}

function front(holders, mine) {
  return [mine, ...holders.filter((each) => each !== mine)];
}

// The signs of the legend, drawn by what draws the blocks.
function drawSign(canvas, name) {
  const ratio = window.devicePixelRatio || 1;
  const counts = name === "shared" ? DRAWING.holders : [1];
  const width = 15 * counts.length;
  canvas.width = width * ratio;
  canvas.height = 14 * ratio;
  canvas.style.width = `${width}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const below = { shared: null, held: null, several: "held", evicted: "cached", copied: "held" }[name];
  counts.forEach((count, i) => {
    if (below) sign(context, below, 15 * i, 1, 12, colourOf(0, count));
    sign(context, name === "shared" ? "held" : name, 15 * i, 1, 12, colourOf(0, name === "host" ? 3 : count));
  });
}

// Tokens a second of the last minute, a bar each second.
function drawSpark(canvas, state, now) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [160, 36];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const bins = new Array(HISTORY).fill(0);
  for (const each of state.history) {
    const bin = HISTORY - 1 - Math.floor(now - each.at);
    if (bin >= 0 && bin < HISTORY) bins[bin] += each.sampled;
  }
  const most = Math.max(1, ...bins);
  const step = width / HISTORY;
  context.fillStyle = theme.accent;
  bins.forEach((value, i) => {
    const tall = value ? Math.max(1, (value / most) * (height - 2)) : 0;
    context.fillRect(i * step, height - tall - 1, step - 0.7, tall);
  });
  context.fillStyle = theme.line;
  context.fillRect(0, height - 1, width, 1);
}
