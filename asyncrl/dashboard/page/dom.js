// Elements made from plain values. Text of a run becomes text of the page and nothing else: there is no innerHTML.

import { readable } from "./text.js";

/** A new element. `attributes`: `class`, `aria-label` and so on; one that begins with "on" is a listener. An
 * attribute with the value `false` or null is left out. Children are nodes, or anything else as its text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** Text of a run: a name, a reason. It has its own direction, so that it cannot reorder the text around it. Characters
 * that cannot be seen become marks. */
export function foreign(text, tag = "span") {
  return element(tag, { class: "foreign" }, readable(String(text)));
}

/** Replaces the children of `node` by `children`. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
