// A figure on the page: its title, its plot of the chosen runs, and what the plot leaves out.

import { Chart, colourOf, shadeOf } from "./chart.js";
import { AXES } from "./clock.js";
import { element, fill, foreign } from "./dom.js";
import { number } from "./format.js";
import { linesOf, namesOf, smoothed } from "./lines.js";
import { change, state } from "./state.js";
import { readable } from "./text.js";

const NEAR = "400px";
const ALL = "all";
const MOST_CHANGES = 3;

/** The name of a line in the address: the place of its spec in the figure, and its metric. */
function nameOf(line, place) {
  return `${place}.${encodeURIComponent(line.name)}`;
}

export class Panel {
  #chart;
  #note = element("p", { class: "note" });
  #choice = element("select", { class: "choice", hidden: true, onchange: (event) => this.#choose(event.target.value) });
  #changes = element("p", { class: "about" });
  #detail = new Map();
  #detailOf = "";
  #pending = null;
  #near = false;
  #observer;

  /** `run`: the only run of a figure that stacks its lines. `kind`: the kind of the runs that it shows. `tools` are
   * elements next to the title. `tellsChanges`: the changes of the configuration are named, and not only marked. */
  constructor(figure, { run = null, kind = "rl", tools = [], chart = {}, tellsChanges = true } = {}) {
    Object.assign(this, { figure, run, kind, tellsChanges });
    this.#chart = new Chart({ ...chart, title: figure.title });
    this.#observer = new IntersectionObserver((seen) => this.#seen(seen.at(-1).isIntersecting), { rootMargin: NEAR });
    const title = element("h3", {}, foreign(figure.title), figure.unit && figure.unit !== "share" ? element("small", {}, ` ${figure.unit}`) : null,
      run ? element("small", {}, " \u00b7 ", foreign(run.name)) : null);
    this.#choice.setAttribute("aria-label", `Line of ${figure.title}`);
    const head = element("div", { class: "head" }, title, element("div", { class: "tools" }, this.#choice, tools));
    const about = figure.about ? element("p", { class: "about" }, figure.about) : null;
    this.element = element("article", { class: "card figure", id: `figure-${kind === "sft" ? "sft-" : ""}${figure.id}` }, head, about, this.#chart.element, this.#changes, this.#note);
    this.#observer.observe(this.element);
  }

  /** Draws the figure if it is in the window or near it, or once it comes near. */
  #seen(near) {
    this.#near = near;
    if (near && this.#pending) this.#chart.draw(this.#pending);
    if (near) this.#pending = null;
  }

  close() {
    this.#observer.disconnect();
    this.#chart.close();
  }

  recolour() {
    this.#chart.recolour();
  }

  /** Draws the figure of `runs` (or of the constructor's run): all lines of one run, or one line of each of several runs,
   * which a person can choose. `view`: `axis`, `smooth`, `range`, `lines`. `data` has `series(run, file, names)` and
   * `clock(run)` and `changes(run)`. Returns whether there is anything to see. */
  draw(runs, view, data) {
    const shown = this.run ? runs.filter((run) => run.key === this.run.key) : runs;
    const several = shown.length > 1;
    const used = [];
    const drawn = shown.map((run) => {
      const clock = data.clock(run);
      return this.figure.lines.map((spec) => {
        const wanted = data.series(run, spec.file, namesOf(spec));
        used.push(...wanted);
        const all = wanted.map((series) => this.#detail.get(series) ?? series);
        return linesOf(spec, clock, view.axis, all).map((line) => ({ ...line, marks: spec.marks }));
      });
    });
    const only = several ? this.#offer(drawn, view) : ALL;
    if (!several) this.#choice.hidden = true;
    const lines = shown.flatMap((run, index) => {
      const found = drawn[index].flatMap((of, place) => of.filter((line) => only === ALL || nameOf(line, place) === only));
      return found.map((line, index) => ({
        ...line,
        run,
        label: !several ? line.label : only !== ALL && found.length === 1 ? run.name : `${run.name} \u00b7 ${line.label}`,
        colour: several ? data.colour(run) : this.figure.ramp ? shadeOf(index, found.length) : colourOf(index),
        dash: several ? index % 4 : 0,
      }));
    });
    this.element.hidden = lines.length === 0;
    if (lines.length === 0) return false;
    const smooth = this.figure.stack ? 0 : view.smooth;
    this.#pending = {
      ...this.figure,
      axis: AXES[view.axis],
      range: view.range,
      changes: shown.flatMap((run) => data.changes(run).map(({ step }) => data.clock(run).placeOf(view.axis, step))).filter((place) => place !== null),
      lines: lines.map((line) => (smooth && !line.marks ? { ...line, raw: line.y, y: smoothed(line.y, smooth) } : line)),
    };
    this.#seen(this.#near);
    this.#tell(used);
    if (this.tellsChanges) this.#tellChanges(shown, data);
    return true;
  }

  /** Offers the lines of the runs. Returns the name of the chosen one with its place in the figure, or ALL. */
  #offer(drawn, { lines = {} }) {
    const known = new Map();
    this.figure.lines.forEach((spec, place) => {
      const one = typeof spec.label === "string" && spec.label.trim() ? spec.label.trim() : spec.file;
      for (const line of drawn.flatMap((of) => of[place])) known.set(nameOf(line, place), [spec.name.endsWith("*") ? line.label : one, spec]);
    });
    const names = [...known.keys()];
    const given = lines[this.figure.id];
    const chosen = given === ALL || known.has(given) ? given : names.find((name) => known.get(name)[1].main) ?? names[0] ?? ALL;
    const options = [...names.map((name) => [name, known.get(name)[0]]), [ALL, "all lines"]];
    const wanted = JSON.stringify([options, chosen]);
    this.#choice.hidden = names.length < 2;
    if (this.#choice.dataset.drawn !== wanted) {
      this.#choice.dataset.drawn = wanted;
      fill(this.#choice, options.map(([name, title]) => element("option", { value: name, selected: name === chosen }, readable(title))));
    }
    return chosen;
  }

  #choose(line) {
    const others = (state().lines ?? "").split(",").filter((each) => each && !each.startsWith(`${this.figure.id}:`));
    change({ lines: [...others, `${this.figure.id}:${line}`].join(",") });
  }

  /** Names the changes of the configuration that the vertical lines show. */
  #tellChanges(shown, data) {
    const told = shown.flatMap((run) => data.changes(run).map((each) => `${shown.length > 1 ? `${run.name}: ` : ""}${each.key} ${each.old} \u2192 ${each.new} from step ${each.step}`));
    const more = told.length > MOST_CHANGES ? `; ${told.length - MOST_CHANGES} more` : "";
    fill(this.#changes, told.length ? foreign(`${told.slice(-MOST_CHANGES).join("; ")}${more}`) : null);
  }

  /** Says which share of the rows is drawn, because short peaks may be missing. */
  #tell(used) {
    const parts = [...new Set(used)].filter((series) => !series.all && !this.#detail.has(series));
    const rows = parts.reduce((sum, series) => sum + series.rows, 0);
    const points = parts.reduce((sum, series) => sum + series.time.length, 0);
    const every = Math.round(rows / Math.max(1, points));
    fill(this.#note, parts.length && every > 1
      ? `Drawn from 1 of ${number(every)} rows, so short peaks may be missing. A smaller range shows more.`
      : null);
  }

  /** Reads more rows of a range if the whole file was too long to read. */
  async sharpen(runs, view, data) {
    const of = JSON.stringify([view.range, view.axis, runs.map((run) => run.key)]);
    if (of === this.#detailOf) return false;
    this.#detailOf = of;
    this.#detail = new Map();
    if (!view.range) return true;
    const wanted = [];
    for (const run of this.run ? [this.run] : runs) {
      const [first, last] = view.range.map((place) => data.clock(run).timeAt(view.axis, place));
      for (const spec of this.figure.lines) {
        for (const series of data.series(run, spec.file, namesOf(spec))) if (!series.all) wanted.push({ series, first, last });
      }
    }
    const detail = new Map();
    for (const { series, first, last } of wanted) {
      if (!detail.has(series)) detail.set(series, await data.detail(series, first, last));
    }
    if (this.#detailOf === of) this.#detail = detail;
    return wanted.length > 0;
  }
}
