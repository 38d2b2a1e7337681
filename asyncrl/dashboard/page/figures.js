// The tab of all figures, with one toolbar: x axis, smoothing, range, which figures, and any other metric by its name.

import * as api from "./api.js";
import { FIGURES, chosenFigure } from "./catalogue.js";
import { AXES } from "./clock.js";
import { element, fill, foreign } from "./dom.js";
import { value as formatted } from "./format.js";
import { Panel } from "./panel.js";
import { change, link, state } from "./state.js";

const LONG_LIST = 60;
/** The kinds of runs, with what stands before the groups of their figures if there are several kinds. */
const KINDS = { rl: "", sft: "Fine-tunings" };

/** The part of the state that figures obey. */
export function viewOf(now) {
  const range = now.range?.split("..").map(Number);
  return {
    axis: now.x in AXES ? now.x : "step",
    smooth: Math.min(0.99, Math.max(0, Number(now.smooth) || 0)),
    range: range?.length === 2 && range.every(Number.isFinite) && range[0] < range[1] ? range : null,
    lines: Object.fromEntries((now.lines ?? "").split(",").map((each) => each.split(":"))),
  };
}

export function setRange(first, last) {
  change({ range: first === null ? null : `${Number(first.toPrecision(7))}..${Number(last.toPrecision(7))}` });
}

export function open(main, page) {
  let panels = [];
  let layout = "";
  let metrics = {};
  const bar = new Toolbar(page, () => metrics);
  const jumps = element("nav", { class: "jumps", "aria-label": "Groups of figures" });
  const body = element("div");
  fill(main, bar.element, jumps, body);

  function build(now) {
    const chosen = now.show ? now.show.split(",") : null;
    const more = now.more ? now.more.split(",").map((word) => chosenFigure(word, metrics.meanings?.[word])) : [];
    const figures = [...more, ...FIGURES].filter((figure) => !chosen || chosen.includes(figure.id));
    const runs = page.chosen();
    const wanted = JSON.stringify([figures.map((figure) => figure.id), runs.map((run) => run.key), more.map((figure) => figure.about)]);
    if (wanted === layout) return;
    layout = wanted;
    for (const panel of panels) panel.close();
    // Fine-tunings have figures of their own: their losses and steps are not those of reinforcement learning.
    const kinds = Object.keys(KINDS).filter((kind) => runs.some((run) => run.kind === kind));
    panels = kinds.flatMap((kind) => {
      const of = runs.filter((run) => run.kind === kind);
      return figures.flatMap((figure) => (figure.stack && of.length > 1 ? of : [null]).map((run) => panelOf(figure, run, kind, chosen)));
    });
    const groups = new Map(panels.map((panel) => [titleOf(panel, kinds), panel]));
    fill(body, [...groups.keys()].map((title) => element("section", { id: `group-${title}`, "aria-label": title },
      element("h2", {}, foreign(title)),
      element("div", { class: "grid" }, panels.filter((panel) => titleOf(panel, kinds) === title).map((panel) => panel.element)))));
    fill(jumps, chosen ? element("a", { href: link({ show: null }) }, "All figures") : [...groups.keys()].map((title) => jumpTo(title)));
  }

  function titleOf(panel, kinds) {
    return kinds.length > 1 && KINDS[panel.kind] ? `${KINDS[panel.kind]} \u00b7 ${panel.figure.group}` : panel.figure.group;
  }

  function jumpTo(group) {
    const go = () => document.getElementById(`group-${group}`)?.scrollIntoView({ block: "start" });
    return element("button", { type: "button", "data-to": `group-${group}`, onclick: go }, foreign(group));
  }

  function panelOf(figure, run, kind, chosen) {
    const only = chosen ? null : element("a", { href: link({ show: figure.id }), "aria-label": `Show only ${figure.title}`, title: "Show only this" }, "\u2922");
    const remove = figure.id.includes(":")
      ? element("button", { type: "button", "aria-label": `Remove ${figure.title}`, title: "Remove", onclick: () => change({ more: (state().more ?? "").split(",").filter((word) => word !== figure.id).join(",") }) }, "\u00d7")
      : null;
    const place = element("a", { class: "episodes", hidden: true }, "");
    const onPlace = (x) => {
      const of = run ?? page.chosen().find((each) => each.kind === kind);
      if (!of || kind === "sft") return;
      const step = page.data.clock(of).stepAt(viewOf(state()).axis, x);
      if (!Number.isFinite(step)) return;
      place.hidden = false;
      fill(place, `episodes of step ${step}`, page.chosen().length > 1 ? [" of ", foreign(of.name)] : null);
      place.href = link({ tab: "episodes", run: of.key, step: `${step}..${step}` });
    };
    const chart = { onRange: setRange, onPlace, height: chosen?.length === 1 ? 420 : 190 };
    return new Panel(figure, { run, kind, tools: [place, only, remove], chart });
  }

  function draw() {
    const [runs, view] = [page.chosen(), viewOf(state())];
    const drawOne = (panel) => panel.draw(runs.filter((run) => run.kind === panel.kind), view, page.data);
    for (const panel of panels) drawOne(panel);
    for (const section of body.children) {
      section.hidden = ![...section.querySelectorAll("article")].some((card) => !card.hidden);
      const jump = jumps.querySelector(`[data-to="${CSS.escape(section.id)}"]`);
      if (jump) jump.hidden = section.hidden;
    }
    bar.update(view);
    for (const panel of panels) {
      panel.sharpen(runs.filter((run) => run.kind === panel.kind), view, page.data).then((found) => found && drawOne(panel)).catch(page.fail);
    }
  }

  async function load() {
    const found = await Promise.all(page.chosen().map((run) => api.ofRun(run.key, "catalogue")));
    metrics = joined(found);
    build(state());
    page.refresh();
  }

  load().catch(page.fail);
  return {
    update(now) {
      build(now);
      draw();
    },
    recolour: () => panels.forEach((panel) => panel.recolour()),
    close: () => panels.forEach((panel) => panel.close()),
  };
}

/** The metrics of all runs: `names` as FILE:NAME, and for each its newest value and, if the metric is
 * asyncrl's, its meaning. */
function joined(catalogues) {
  const [values, meanings] = [{}, {}];
  for (const catalogue of catalogues) {
    for (const [file, metrics] of Object.entries(catalogue)) {
      for (const [name, { newest, unit, meaning }] of Object.entries(metrics)) {
        if (typeof newest === "string") continue;
        values[`${file}:${name}`] = newest;
        meanings[`${file}:${name}`] = { unit: unit ?? "", meaning: meaning ?? "" };
      }
    }
  }
  return { values, meanings };
}

/** The controls above the figures. */
class Toolbar {
  constructor(page, metrics) {
    this.page = page;
    this.metrics = metrics;
    this.axis = element("select", { id: "axis", onchange: (event) => change({ x: event.target.value, range: null }) },
      Object.entries(AXES).map(([name, { title }]) => element("option", { value: name }, title)));
    this.smooth = element("input", { id: "smooth", type: "range", min: 0, max: 0.99, step: 0.01,
      oninput: (event) => change({ smooth: event.target.value > 0 ? event.target.value : null }, true) });
    this.all = element("button", { type: "button", onclick: () => setRange(null, null) }, "Whole range");
    this.found = element("ul", { class: "found", id: "found", hidden: true });
    this.search = element("input", { id: "search", type: "search", placeholder: "any metric\u2026", autocomplete: "off", "aria-controls": "found",
      oninput: () => this.list(), onfocus: () => this.list(),
    });
    const searched = element("div", { class: "search", onkeydown: (event) => this.key(event), onfocusout: (event) => searched.contains(event.relatedTarget) || this.hide() },
      label("Add", this.search), this.found);
    this.element = element("div", { class: "toolbar", role: "group", "aria-label": "What figures show" },
      label("Against", this.axis), label("Smooth", this.smooth), this.all, searched);
  }

  update(view) {
    this.axis.value = view.axis;
    if (document.activeElement !== this.smooth) this.smooth.value = view.smooth;
    this.smooth.setAttribute("aria-valuetext", view.smooth ? `weight ${view.smooth} of the past` : "none");
    this.all.disabled = view.range === null;
  }

  hide() {
    this.found.hidden = true;
  }

  /** Arrows move through the list, Escape closes it. */
  key(event) {
    const buttons = [this.search, ...this.found.querySelectorAll("button")];
    const moves = { ArrowDown: 1, ArrowUp: -1 };
    if (event.key === "Escape") {
      this.search.focus();
      this.hide();
    } else if (event.key in moves && !this.found.hidden) {
      buttons[Math.max(0, Math.min(buttons.length - 1, buttons.indexOf(document.activeElement) + moves[event.key]))].focus();
    } else {
      return;
    }
    event.preventDefault();
  }

  list() {
    const { values = {}, meanings = {} } = this.metrics();
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (key) => words.every((word) => key.toLowerCase().includes(word) || meanings[key].meaning.toLowerCase().includes(word));
    const fitting = Object.keys(values).filter(fits);
    const rows = fitting.slice(0, LONG_LIST).map((key) => element("li", {}, element("button", { type: "button", tabindex: "-1", onclick: () => this.add(key) },
      foreign(key.replace(":", " \u00b7 ")), element("b", {}, formatted(values[key], meanings[key].unit)),
      element("small", {}, meanings[key].meaning))));
    const rest = fitting.length > LONG_LIST ? element("li", { class: "note" }, `and ${fitting.length - LONG_LIST} more`) : null;
    fill(this.found, rows.length ? [rows, rest].flat() : element("li", { class: "note" }, "no metric fits"));
    this.found.hidden = false;
  }

  add(key) {
    const more = new Set((state().more ?? "").split(",").filter(Boolean));
    change({ more: [...more.add(key)].join(","), show: null });
    this.hide();
    scrollTo({ top: 0 });
  }
}

function label(text, control) {
  return element("label", {}, element("span", {}, text), control);
}
