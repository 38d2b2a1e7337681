// Elements made from plain values. Text of a run becomes text of the page and nothing else: there is no innerHTML.

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

/** Text of a run: a name, a reason. Its direction is its own, so that it cannot reorder what stands around it. */
export function foreign(text, tag = "span") {
  return element(tag, { class: "foreign" }, visible(String(text)));
}

/** Text with symbols in place of the control characters and direction marks, which would hide or reorder it. */
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (c) =>
    c === "\u007f" ? "\u2421" : String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\u0080-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]/gu, (c) =>
      `\u27e8${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);
}

/** Puts `children` in the place of what `node` has. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
