// The state of the page is in the fragment of its address: a link to it opens the same view.
// Keys: tab, runs (keys with a comma between), x, smooth, from, to, show (figures or metrics), and those of single tabs.

/** The state as a plain object of texts. */
export function state() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/** The address of the state with `changes`; a value of null or "" leaves a key out. */
export function link(changes, from = state()) {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries({ ...from, ...changes })) {
    if (value !== null && value !== undefined && value !== "") words.set(key, value);
  }
  return `#${words.toString().replaceAll("%2C", ",").replaceAll("%2F", "/")}`;
}

/** Changes the state. `replace`: the browser's back button leaves this change out, as for a slider that moves. */
export function change(changes, replace = false) {
  const address = link(changes);
  if (address === location.hash) return;
  if (replace) {
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = address;
  }
}

/** Calls `listener` with the state after each change of it. Returns a function that removes the listener. */
export function onChange(listener) {
  const call = () => listener(state());
  addEventListener("hashchange", call);
  return () => removeEventListener("hashchange", call);
}
