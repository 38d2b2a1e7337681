// The server's answers, as plain values.

export class Refused extends Error {}

/** The answer at `path` under /api/. `query`: values, or lists of values. Throws Refused with the server's reason. */
export async function get(path, query = {}, signal = undefined) {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") words.append(key, each);
    }
  }
  const address = `api/${path}${words.size ? `?${words}` : ""}`;
  const answer = await fetch(address, { signal, credentials: "same-origin" });
  const values = await answer.json().catch(() => ({ error: `the server answers ${answer.status}` }));
  if (!answer.ok) throw new Refused(values.error ?? `the server answers ${answer.status}`);
  return values;
}

/** The answer at `path` for one run, by its key. */
export function ofRun(run, path, query = {}, signal = undefined) {
  return get(`runs/${encodeURIComponent(run)}/${path}`, query, signal);
}
