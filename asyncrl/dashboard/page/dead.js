// The dead letters of a run: attempts that were given up, with the reasons.

import * as api from "./api.js";
import { element, fill } from "./dom.js";
import { count, nodesOf, number } from "./text.js";

const REFRESH_MS = 5000;

export function openDeadLetters(body, run) {
  const shown = element("div", { class: "dead-letters" });
  fill(body, shown);
  let closed = false;
  let drawn = "";

  async function load() {
    let parts;
    try {
      const found = await api.ofRun(run.key, "dead-letters");
      if (JSON.stringify(found) === drawn) return;
      drawn = JSON.stringify(found);
      parts = draw(found, run);
    } catch (error) {
      drawn = "";
      parts = [element("p", { class: "hint" }, ...nodesOf(error.message))];
    }
    if (!closed) fill(shown, parts);
  }

  const timer = setInterval(() => document.hidden || load(), REFRESH_MS);
  load();
  return {
    update() {},
    close() {
      closed = true;
      clearInterval(timer);
    },
  };
}

function draw({ total, letters, reasons }, run) {
  if (!total) return [element("p", { class: "hint" }, "There are no dead letters: every episode was scored.")];
  return [
    element("p", { class: "summary" }, `${count(total, "dead letter")}. Try them again with `, element("code", {}, ...nodesOf(`asyncrl inspect requeue ${run.name} --all`)), " while the run is running."),
    element("h2", {}, "Reasons"),
    table(
      ["count", "failed in", "reason"],
      reasons.map((each) => [number(each.count), failedIn(each), each.reason]),
    ),
    element("h2", {}, letters.length < total ? `The newest ${number(letters.length)}` : "All dead letters"),
    table(
      ["episode", "failed in", "attempts", "reason"],
      letters.map((each) => [each.id, failedIn(each), number(each.attempts), each.reason]),
    ),
  ];
}

function failedIn({ scoring }) {
  return scoring ? "scoring" : "episode";
}

function table(names, rows) {
  const cells = (row) => row.map((text, place) => element("td", { class: place === row.length - 1 ? "reason" : "text" }, ...nodesOf(text)));
  return element(
    "div",
    { class: "scrolling", tabindex: "0", role: "region", "aria-label": "Dead letters" },
    element("table", { class: "list" }, element("thead", {}, element("tr", {}, names.map((name) => element("th", { scope: "col" }, name)))), element("tbody", {}, rows.map((row) => element("tr", {}, cells(row))))),
  );
}
