// The address: which view is shown, and its whole state, after the hash. So an address works behind any path prefix, and no log has it.
//
//   #/lab?model=debian-depends&q={"history":["libc6"]}&beam=100
//
// What is replaced (a slider that moves) counts at once and is written to the address bar when it has been calm for a moment: browsers
// refuse to rewrite it hundreds of times in some seconds.

const CALM_MS = 150;

let current = parse();
let pending = null;
const watchers = new Set();

// {view, params}: of "#/whynot?item=x" "whynot" and its URLSearchParams. The params are a copy; the view of "#/" is "".
export function read() {
  return { view: current.view, params: new URLSearchParams(current.params) };
}

// The relative address of a view. params: URLSearchParams, or an object, of which null, undefined and "" are left out.
export function href(view, params) {
  const text = asParams(params).toString();
  return `#/${view}${text ? "?" + text : ""}`;
}

// A copy of parameters with some changed: {name: value}, null or "" for what goes. params: as for `href`.
export function changed(params, changes) {
  const next = asParams(params);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") next.delete(name);
    else next.set(name, value);
  }
  return next;
}

// Show another view or state. replace: without a step of the browser's history.
export function go(view, params, { replace = false } = {}) {
  if (!replace) flush();
  current = { view, params: asParams(params) };
  if (replace) {
    clearTimeout(pending);
    pending = setTimeout(flush, CALM_MS);
  } else if (href(view, current.params) !== location.hash) {
    history.pushState(null, "", href(view, current.params));
  }
  watchers.forEach((watcher) => watcher());
}

// Call watcher whenever the view or its state changes; returns a function that ends this.
export function watch(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

// Write what was replaced and is not yet in the address bar.
function flush() {
  if (pending === null) return;
  clearTimeout(pending);
  pending = null;
  history.replaceState(null, "", href(current.view, current.params));
}

function follow() {
  clearTimeout(pending);
  pending = null;
  current = parse();
  watchers.forEach((watcher) => watcher());
}

function parse() {
  const [path, query = ""] = splitOnce(location.hash.replace(/^#\/?/, ""), "?");
  return { view: path, params: new URLSearchParams(query) };
}

function splitOnce(text, separator) {
  const at = text.indexOf(separator);
  return at < 0 ? [text] : [text.slice(0, at), text.slice(at + 1)];
}

function asParams(params) {
  if (params instanceof URLSearchParams) return new URLSearchParams(params);
  const given = Object.entries(params ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return new URLSearchParams(given.map(([name, value]) => [name, String(value)]));
}

addEventListener("popstate", follow); // the hash's changes too
addEventListener("pagehide", flush);
addEventListener("click", flush, true); // before a link is followed
