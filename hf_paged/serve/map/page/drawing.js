"use strict";
// Canvases of the blocks. What a block is can be read from its form alone: held blocks are filled, cached ones are
// hollow, those on the host are triangles, an eviction is a cross. Colour is the request, strength how many hold it.

const LEVELS = [1, 2, 3, 5, 9]; // holders from which on a block is drawn stronger
const DARK = [0.57, 0.66, 0.75, 0.84, 0.93];
const LIGHT = [0.77, 0.67, 0.58, 0.48, 0.38];
const CHROMA = [0.13, 0.15, 0.15, 0.14, 0.11];

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
  while (level + 1 < LEVELS.length && count >= LEVELS[level + 1]) level += 1;
  return level;
}

// The colour of a request: hues of neighbours in the order of arrival lie far apart.
function colourOf(number, count = 1) {
  const level = levelOf(count);
  const key = number * 8 + level;
  let colour = theme.colours.get(key);
  if (!colour) {
    const hue = (number * 137.508 + 255) % 360;
    colour = `oklch(${(theme.dark ? DARK : LIGHT)[level]} ${CHROMA[level]} ${hue.toFixed(1)})`;
    theme.colours.set(key, colour);
  }
  return colour;
}

// One block in a square of `size` from (x, y).
const forms = {
  free(context, x, y, size) {
    context.fillStyle = theme.free;
    context.fillRect(x, y, size, size);
  },
  held(context, x, y, size, holders, numbered = false) {
    context.fillStyle = colourOf(holders[0].number, holders.length);
    context.fillRect(x, y, size, size);
    if (holders.some((each) => each.number !== holders[0].number)) {
      const inner = Math.max(1, Math.round(size / (numbered ? 5 : 3)));
      const inset = numbered ? 1.5 : (size - inner) / 2; // in the corner, if a number is in the middle
      context.fillStyle = theme.panel;
      context.fillRect(x + inset, y + inset, inner, inner);
    }
  },
  cached(context, x, y, size) {
    const width = size >= 9 ? 1.5 : 1;
    forms.free(context, x, y, size);
    context.strokeStyle = theme.cached;
    context.lineWidth = width;
    context.strokeRect(x + width / 2, y + width / 2, size - width, size - width);
  },
  others(context, x, y, size) {
    context.fillStyle = theme.other;
    context.fillRect(x, y, size, size);
    if (size < 6) return;
    context.strokeStyle = theme.panel;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, y + size);
    context.lineTo(x + size, y);
    context.stroke();
  },
  host(context, x, y, size, colour) {
    forms.free(context, x, y, size);
    context.fillStyle = colour;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x, y + size);
    context.lineTo(x + size, y + size);
    context.fill();
  },
  evicted(context, x, y, size) {
    context.strokeStyle = theme.warn;
    context.lineWidth = size >= 9 ? 1.5 : 1;
    const inset = size >= 9 ? 3 : 0.5;
    context.beginPath();
    context.moveTo(x + inset, y + inset);
    context.lineTo(x + size - inset, y + size - inset);
    context.moveTo(x + size - inset, y + inset);
    context.lineTo(x + inset, y + size - inset);
    context.stroke();
  },
  copied(context, x, y, size) {
    context.strokeStyle = theme.ink;
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, size - 2, size - 2);
  },
};

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
    if (holders && this.onHost) forms.host(context, x, y, size, colourOf(holders[0].number, 3));
    else if (holders) forms.held(context, x, y, size, mine ? front(holders, mine) : holders, mine && size >= 15);
    else if (plane.others[block] && this.onHost) forms.host(context, x, y, size, theme.other);
    else if (plane.others[block]) forms.others(context, x, y, size);
    else if (plane.cached[block]) forms.cached(context, x, y, size);
    else forms.free(context, x, y, size);
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
      forms[copy && copy.at === since ? "copied" : "evicted"](this.context, x, y, size);
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
  const count = name === "shared" ? LEVELS.length : 1;
  const width = 15 * count;
  canvas.width = width * ratio;
  canvas.height = 14 * ratio;
  canvas.style.width = `${width}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const holder = { number: 0 };
  for (let i = 0; i < count; i += 1) {
    if (name === "held") forms.held(context, 0, 1, 12, [holder]);
    else if (name === "shared") forms.held(context, i * 15, 1, 12, new Array(LEVELS[i]).fill(holder));
    else if (name === "several") forms.held(context, 0, 1, 12, [holder, { number: 1 }]);
    else if (name === "host") forms.host(context, 0, 1, 12, colourOf(0, 3));
    else if (name === "evicted") {
      forms.cached(context, 0, 1, 12);
      forms.evicted(context, 0, 1, 12);
    } else if (name === "copied") {
      forms.held(context, 0, 1, 12, [holder]);
      forms.copied(context, 0, 1, 12);
    } else forms[name](context, 0, 1, 12);
  }
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
