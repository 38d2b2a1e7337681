// Text of a run, shown as text: characters that cannot be seen, or that change how other characters are shown, become
// readable marks.

const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e007f}\p{Cs}]/gu;
const NAMES = new Map([
  [0xad, "soft hyphen"],
  [0x200b, "zero-width space"],
  [0x200c, "zero-width non-joiner"],
  [0x200d, "zero-width joiner"],
  [0x200e, "left-to-right mark"],
  [0x200f, "right-to-left mark"],
  [0x202a, "left-to-right embedding"],
  [0x202b, "right-to-left embedding"],
  [0x202c, "end of direction"],
  [0x202d, "left-to-right override"],
  [0x202e, "right-to-left override"],
  [0x2066, "left-to-right isolate"],
  [0x2067, "right-to-left isolate"],
  [0x2068, "first strong isolate"],
  [0x2069, "end of isolate"],
  [0xfeff, "byte order mark"],
]);

// Names of the control characters from 0 on. Few fonts have their symbols.
const CONTROLS =
  "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");

function codeName(code) {
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

// The readable mark of a character that cannot be seen.
export function markOf(character) {
  const code = character.codePointAt(0);
  return `\u27e8${code === 0x7f ? "DEL" : (CONTROLS[code] ?? codeName(code))}\u27e9`;
}

// The text with marks, as nodes: marks are elements of the class "unseen".
export function nodesOf(text) {
  const nodes = [];
  let position = 0;
  for (const match of text.matchAll(UNSEEN)) {
    if (match.index > position) nodes.push(document.createTextNode(text.slice(position, match.index)));
    const mark = document.createElement("span");
    const code = match[0].codePointAt(0);
    mark.className = "unseen";
    mark.textContent = markOf(match[0]);
    mark.title = [codeName(code), NAMES.get(code)].filter(Boolean).join(" ");
    nodes.push(mark);
    position = match.index + match[0].length;
  }
  if (position < text.length) nodes.push(document.createTextNode(text.slice(position)));
  return nodes;
}

// The text with marks, for places that take no elements: titles and labels.
export function readable(text) {
  return text.replace(UNSEEN, markOf);
}

// A number as people read it; texts, such as "nan", stay.
export function number(value, digits = 4) {
  if (value === null || value === undefined) return "\u2013";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return (value || 0).toLocaleString("en").replace("-", "\u2212");
  return Number(value.toPrecision(digits)).toString().replace(/^-/, "\u2212");
}

export function count(value, one, many = `${one}s`) {
  return `${value.toLocaleString("en")} ${value === 1 ? one : many}`;
}
