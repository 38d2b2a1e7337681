// Elements made from plain values. Text of a run becomes text of the page and nothing else: there is no innerHTML.

import { readable } from "./text.js";

/** A new element. `attributes`: `class`, `aria-label` and so on; one that begins with "on" is a listener; `false` and
 * null leave it out. Children are nodes, or anything else as its text. */
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

/** Text of a run: a name, a reason. Its direction is its own, so that it cannot reorder what stands around it; characters
 * that cannot be seen become marks. */
export function foreign(text, tag = "span") {
  return element(tag, { class: "foreign" }, readable(String(text)));
}

/** Puts `children` in the place of what `node` has. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
