// What a run does now.

import * as api from "./api.js";
import { element, fill, foreign } from "./dom.js";

export function open(main, page) {
  let closed = false;
  async function draw() {
    const parts = await Promise.all(page.chosen().map(async (run) => {
      const found = await api.ofRun(run.key, "overview");
      return element("section", {}, element("h2", {}, foreign(run.name)), foreign(JSON.stringify(found, null, 2), "pre"));
    }));
    if (!closed) fill(main, parts);
  }
  return { update: draw, close: () => { closed = true; } };
}
