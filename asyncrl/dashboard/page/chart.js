// One figure's plot: lines, bands and stacks by uPlot, with a legend that tells the values under the cursor.
//
// The mouse drags a range, a click chooses a place, and a double click shows everything again. A click on an entry of
// the legend hides its line, or shows it again. Of the keys, arrows move the cursor, + zooms in around it, and Escape
// shows everything.

import { element, fill, foreign } from "./dom.js";
import { value as formatted } from "./format.js";

const { uPlot } = globalThis;
const FAINT = 0.28;
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
// The same dashes in the legend, as CSS border styles. CSS has no style for the last one.
const STROKES = ["solid", "dashed", "dotted", "double"];

/** A colour of the style sheet in the form that the canvas needs, in the current colour scheme. */
export function resolved(colour, alpha = 1) {
  const probe = element("span");
  probe.style.color = alpha < 1 ? `color-mix(in srgb, ${colour} ${100 * alpha}%, transparent)` : colour;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** The colour of the n-th line of a figure. */
export const colourOf = (index) => `var(--series-${1 + (index % 8)})`;

/** The colour of the n-th of `count` lines that have an order. */
export const shadeOf = (index, count) => `color-mix(in oklab, var(--series-2) ${Math.round((100 * index) / Math.max(1, count - 1))}%, var(--series-1))`;

export class Chart {
  #plot = null;
  #shape = "";
  #legend = element("div", { class: "legend" });
  #host = element("div", { class: "plot", tabindex: "0", role: "img" });
  #drawn = null;
  #hidden = new Set();
  #observer;

  /** `settings`: `title`, `height`, `axes` (false: none), `legend` (false: none), `onRange(first, last)`, called with nulls for all,
   * and `onPlace(x)`, called when a click or the keys choose a place. */
  constructor(settings = {}) {
    this.settings = { height: 190, axes: true, legend: true, ...settings };
    this.element = element("div", { class: "chart" }, this.#host, this.settings.legend ? this.#legend : null);
    this.#host.setAttribute("aria-label", this.settings.title);
    this.#host.style.minHeight = `${this.settings.height}px`;
    this.#observer = new ResizeObserver(() => this.#resize());
    this.#observer.observe(this.#host);
    this.#host.addEventListener("keydown", (event) => this.#key(event));
    this.#host.addEventListener("click", () => this.#clicked());
    this.#host.addEventListener("dblclick", () => this.settings.onRange?.(null, null));
    this.#host.addEventListener("blur", () => this.#plot?.setCursor({ left: -10, top: -10 }));
  }

  close() {
    this.#observer.disconnect();
    this.#plot?.destroy();
    this.#plot = null;
  }

  /** Draws `figure`: `title`, `unit`, `axis` (of `AXES`), `range` ([first, last] or null), `stack` (whether lines are
   * summed up), `lines` (`label`, `x`, `y`, `colour`, `dash`, `raw` for the values before smoothing, `marks` for points),
   * `least` and `most` of the y axis if they are fixed, `changes`: places of vertical lines. */
  draw(whole) {
    this.#drawn = whole;
    const figure = { ...whole, lines: whole.lines.filter((line) => !this.#hidden.has(line.label)) };
    const tables = [];
    for (const line of figure.lines) {
      if (line.raw) tables.push(table(line.x, line.raw));
      tables.push(table(line.x, line.y));
    }
    const joined = tables.length ? uPlot.join(tables) : [[]];
    const data = figure.stack ? stacked(joined) : joined;
    this.values = joined;
    const range = figure.range ?? extent(joined[0]);
    const shape = JSON.stringify([figure.title, figure.unit, figure.axis.title, figure.stack, figure.least, figure.most, figure.changes,
      whole.lines.map((line) => [line.label, line.colour, line.dash, line.marks, Boolean(line.raw), this.#hidden.has(line.label)])]);
    if (!this.#plot || shape !== this.#shape) {
      this.#plot?.destroy();
      this.#shape = shape;
      fill(this.#host);
      this.#plot = new uPlot(this.#options(figure), data, this.#host);
      this.#showLegend(whole);
    } else {
      this.#plot.setData(data, false);
    }
    if (range) this.#plot.setScale("x", { min: range[0], max: range[1] });
    this.#host.setAttribute("aria-label", spoken(figure));
    this.#showValues(null);
  }

  /** Draws again in the colours of the current scheme. */
  recolour() {
    this.#shape = "";
    if (this.#drawn) this.draw(this.#drawn);
  }

  #options(figure) {
    const grid = { stroke: resolved("var(--line)"), width: 1 };
    const axis = { stroke: resolved("var(--quiet)"), grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const unit = figure.unit;
    return {
      width: Math.max(120, this.#host.clientWidth || 400),
      height: this.settings.height,
      legend: { show: false },
      padding: this.settings.axes ? [8, 22, 0, 0] : [3, 0, 3, 0],
      cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false },
      scales: { x: { time: false }, y: { range: (_, low, high) => yRange(figure, low, high) } },
      axes: this.settings.axes
        ? [
            { ...axis, size: 26, gap: 4, incrs: figure.axis.steps, values: (_, places) => places.map(figure.axis.format), space: 64 },
            { ...axis, size: 52, gap: 4, values: (_, places) => places.map((each) => formatted(each, unit)), space: 30 },
          ]
        : [{ show: false }, { show: false }],
      series: [{}, ...figure.lines.flatMap((line) => this.#series(figure, line))],
      bands: figure.stack ? figure.lines.slice(1).map((line, index) => ({ series: [index + 2, index + 1], fill: resolved(line.colour, 0.55) })) : [],
      hooks: {
        setSelect: [(plot) => this.#selected(plot)],
        setCursor: [(plot) => this.#showValues(plot.cursor.idx)],
        draw: [(plot) => this.#drawChanges(plot)],
      },
    };
  }

  #series(figure, line) {
    const shown = { stroke: resolved(line.colour), width: figure.stack ? 1 : 1.6, dash: DASHES[line.dash ?? 0], spanGaps: true };
    const first = line === figure.lines[0];
    const main = {
      ...shown,
      points: { show: line.marks ? true : undefined, size: 5 },
      fill: figure.stack && first ? resolved(line.colour, 0.55) : undefined,
    };
    return line.raw ? [{ ...shown, stroke: resolved(line.colour, FAINT), width: 1, points: { show: false } }, main] : [main];
  }

  /** Draws a vertical line where the configuration changed. */
  #drawChanges(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = resolved("var(--quiet)");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const place of this.#drawn.changes ?? []) {
      const x = Math.round(plot.valToPos(place, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  #selected(plot) {
    const { left, width } = plot.select;
    if (width > 4) this.settings.onRange?.(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
    if (width > 0) plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  /** Handles a click without a drag. uPlot does not report the click at the end of a drag. */
  #clicked() {
    const at = this.#plot?.cursor.idx ?? null;
    if (at !== null) this.settings.onPlace?.(this.#plot.data[0][at]);
  }

  #showLegend(figure) {
    const dashed = figure.lines.some((line) => line.dash);
    const items = figure.lines.map((line) => {
      const mark = element("span", { class: dashed ? "mark stroke" : "mark", "aria-hidden": "true" });
      if (dashed) mark.style.borderTop = `3px ${STROKES[line.dash ?? 0]} ${line.colour}`;
      else mark.style.background = line.colour;
      const shown = !this.#hidden.has(line.label);
      return element("button", { type: "button", class: "item", "aria-pressed": String(shown), title: shown ? "Hide this line" : "Show this line", onclick: () => this.#toggle(line.label) },
        mark, foreign(line.label), element("b", {}, ""));
    });
    fill(this.#legend, element("span", { class: "place" }), items);
  }

  #toggle(label) {
    if (!this.#hidden.delete(label)) this.#hidden.add(label);
    this.draw(this.#drawn);
    this.#legend.children[1 + this.#drawn.lines.findIndex((line) => line.label === label)]?.focus();
  }

  /** Shows the values at the row `index`; without an index, the last value of each line. */
  #showValues(index) {
    if (!this.settings.legend || !this.#drawn || this.#legend.childElementCount === 0) return;
    const { lines, unit, axis } = this.#drawn;
    const at = index ?? null;
    this.#legend.firstChild.textContent = at === null ? "" : `${axis.format(this.values[0][at])}:`;
    let column = 0;
    for (const [place, line] of lines.entries()) {
      const hidden = this.#hidden.has(line.label);
      if (!hidden) column += line.raw ? 2 : 1;
      const shown = at === null || hidden ? last(line.y) : nearest(this.values[column], at);
      this.#legend.children[place + 1].lastChild.textContent = formatted(shown, unit);
    }
  }

  #key(event) {
    const plot = this.#plot;
    if (!plot || plot.data[0].length === 0) return;
    const places = plot.data[0];
    const [first, end] = plot.scales.x.min !== null ? [plot.scales.x.min, plot.scales.x.max] : extent(places);
    const now = plot.cursor.idx ?? null;
    const step = Math.max(1, Math.round(places.length / 200));
    const moves = { ArrowLeft: -step, ArrowRight: step, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      const from = now ?? (moves[event.key] > 0 ? -1 : places.length);
      const at = Math.min(places.length - 1, Math.max(0, from + moves[event.key]));
      plot.setCursor({ left: plot.valToPos(places[at], "x"), top: 10 });
      this.settings.onPlace?.(places[at]);
    } else if (event.key === "+" && now !== null) {
      const quarter = (end - first) / 4;
      this.settings.onRange?.(places[now] - quarter, places[now] + quarter);
    } else if (event.key === "Escape") {
      this.settings.onRange?.(null, null);
    } else {
      return;
    }
    event.preventDefault();
  }

  #resize() {
    const width = this.#host.clientWidth;
    if (this.#plot && width > 0 && width !== this.#plot.width) this.#plot.setSize({ width, height: this.settings.height });
  }
}

/** Ascending places without duplicates, each with its last value. */
function table(x, y) {
  const rows = [];
  for (const [index, place] of x.entries()) {
    if (place !== null && Number.isFinite(place)) rows.push([place, y[index] ?? null]);
  }
  rows.sort((one, two) => one[0] - two[0]);
  const kept = rows.filter((row, index) => index === rows.length - 1 || row[0] !== rows[index + 1][0]);
  return [kept.map((row) => row[0]), kept.map((row) => row[1])];
}

function stacked([places, ...columns]) {
  const sums = new Array(places.length).fill(0);
  return [places, ...columns.map((values) => values.map((value, index) => (sums[index] += value ?? 0)))];
}

function extent(places) {
  if (!places || places.length === 0) return null;
  const [first, end] = [places[0], places[places.length - 1]];
  return first === end ? [first - 1, end + 1] : [first, end];
}

function yRange(figure, low, high) {
  if (low === null || high === null) return [0, 1];
  const margin = 0.06 * (high - low || Math.abs(high) || 1);
  const bottom = figure.stack || (low >= 0 && low < 0.6 * high) ? 0 : low - margin;
  return [figure.least ?? Math.min(bottom, low), figure.most ?? high + margin];
}

function last(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null) return values[index];
  return null;
}

function nearest(values, index) {
  for (let at = index; at >= 0; at -= 1) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

function spoken(figure) {
  const lines = figure.lines.map((line) => `${line.label} ${formatted(last(line.y), figure.unit)}`);
  return `${figure.title}, newest values: ${lines.slice(0, 12).join(", ") || "none yet"}. Arrow keys move the cursor.`;
}
