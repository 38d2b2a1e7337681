// The filters of the table of kept episodes: fields that show the state of the page and change it.

import { element, fill } from "./dom.js";
import { change } from "./state.js";
import { nodesOf, number } from "./text.js";

const RANGES = [
  ["step", "step"],
  ["reward", "reward"],
  ["sampled", "sampled tokens"],
  ["turns", "turns"],
  ["lag", "lag"],
];
const CHOICES = [
  ["source", "source"],
  ["tool", "tool"],
  ["finish", "finish"],
  ["flag", "flag"],
];
// The keys of the state that filter.
export const FILTERS = ["text", ...RANGES.map(([name]) => name), ...CHOICES.map(([name]) => name)];

// Fields with choices, which the server counts.
export function drawFilters(form, found, now) {
  const later = delayed((name, value) => change({ [name]: value, offset: null }, true));
  const texts = [
    field("text, id or task", element("input", { type: "search", name: "text", placeholder: "task or answer", oninput: (event) => later("text", event.target.value) })),
    ...RANGES.map(([name, label]) =>
      field(label, element("input", { type: "text", name, class: "range", placeholder: "3..9", title: "3, 3..9, 3.. or ..9", oninput: (event) => later(name, event.target.value) })),
    ),
  ];
  const selects = CHOICES.filter(([name]) => Object.keys(found[name]).length > 0 || now[name]).map(([name, label]) => {
    const options = Object.entries(found[name]).sort(([left], [right]) => left.localeCompare(right));
    if (now[name] && !(now[name] in found[name])) options.push([now[name], 0]);
    return field(
      label,
      element(
        "select",
        { name, onchange: (event) => change({ [name]: event.target.value, offset: null }) },
        element("option", { value: "" }, "any"),
        options.map(([value, episodes]) => element("option", { value }, ...nodesOf(value || "(none)"), ` (${number(episodes)})`)),
      ),
    );
  });
  const clear = element(
    "button",
    { type: "button", class: "clear", onclick: () => change(Object.fromEntries([...FILTERS, "offset"].map((name) => [name, null]))) },
    "Clear",
  );
  fill(form, texts, selects, clear);
  syncFilters(form, now);
}

// Show the state in the fields, except in the field that the user is writing in.
export function syncFilters(form, now) {
  for (const input of form.elements) {
    if (input.name && input !== document.activeElement) input.value = now[input.name] ?? "";
  }
  const clear = form.querySelector(".clear");
  if (clear) clear.disabled = !FILTERS.some((name) => now[name]);
}

function field(label, input) {
  return element("label", { class: "field" }, element("span", {}, label), input);
}

function delayed(call, ms = 250) {
  let timer = null;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), ms);
  };
}
