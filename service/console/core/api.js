// All requests to the service. Paths are relative to the page, so that the console works behind a path prefix. Keys are kept in memory
// alone. A failure of any kind is thrown as a Problem; an aborted request throws the signal's AbortError.

const keys = {}; // role -> key
let ask = null; // (role, problem) -> promise of whether a key was given
const asking = {}; // role -> such a promise under way
const declined = new Set(); // roles for which no key was given: asked again by askKey alone

// What the service, or the way to it, answered instead. status 0: nothing answered.
export class Problem extends Error {
  constructor({ status, title, detail, errors = [], role = null, retry_after_s = null }) {
    super(detail || title);
    Object.assign(this, { name: "Problem", status, title, detail, errors, role, retry_after_s });
  }

  // Whether the same may be answered in a moment: the service is away, starts, or has no room.
  get passes() {
    return [0, 429, 502, 503, 504].includes(this.status);
  }

  // Whether another key would help.
  get wantsKey() {
    return this.status === 401 || (this.status === 403 && /^This key may/.test(this.detail));
  }
}

// Options of all: key, the role that the route needs ("retrieve", "write", "admin"); quiet: throw where a key is missing, never ask for one.

export async function get(path, params = {}, signal = undefined, options = {}) {
  return (await send("GET", path, { params, signal, ...options })).json();
}

export async function post(path, body, signal = undefined, options = {}) {
  return (await send("POST", path, { body, signal, ...options })).json();
}

export async function put(path, body, signal = undefined, options = {}) {
  return (await send("PUT", path, { body, signal, ...options })).json();
}

export async function remove(path, params = {}, signal = undefined, options = {}) {
  return (await send("DELETE", path, { params, signal, ...options })).json();
}

// The objects of an NDJSON answer as they come. body: an object, sent as JSON, or a list, sent as NDJSON.
export async function* lines(path, body, signal = undefined, options = {}) {
  const response = await send("POST", path, { body, signal, ...options });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += done ? "\n" : value;
      const complete = rest.split("\n");
      rest = complete.pop();
      for (const line of complete) if (line.trim()) yield JSON.parse(line);
      if (done) return;
    }
  } catch (error) {
    throw signal?.aborted || error.name === "AbortError" ? error : unanswered();
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The address of a route as others may use it: absolute, for a copied command.
export function absolute(path) {
  return new URL(path.replace(/^\//, ""), document.baseURI).href.replace(/#.*$/, "");
}

export function setKey(role, key) {
  if (key) keys[role] = key;
  else delete keys[role];
  declined.delete(role);
}

export function hasKey(role) {
  return keyOf(role) !== undefined;
}

// Who asks the user for a key: (role, problem) -> promise of whether one was given.
export function setAsker(asker) {
  ask = asker;
}

// Ask for a key now, even if the user has declined before. Requests of one role share one question.
export function askKey(role, problem) {
  asking[role] ??= ask(role, problem).then((given) => {
    delete asking[role];
    if (!given) declined.add(role);
    return given;
  });
  return asking[role];
}

function keyOf(role) {
  return keys[role] ?? keys.admin;
}

async function send(method, path, { params = {}, body, signal, headers = {}, key = "retrieve", quiet = false }) {
  const url = new URL(path.replace(/^\//, ""), document.baseURI);
  url.hash = "";
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined) url.searchParams.set(name, typeof value === "object" ? JSON.stringify(value) : value);
  }
  const stream = Array.isArray(body);
  for (;;) {
    const sent = keyOf(key);
    const response = await fetch(url, {
      method,
      signal,
      cache: "no-store",
      credentials: "same-origin",
      body: body === undefined ? undefined : stream ? body.map((line) => JSON.stringify(line)).join("\n") : JSON.stringify(body),
      headers: {
        ...(body === undefined ? {} : { "Content-Type": stream ? "application/x-ndjson" : "application/json" }),
        ...(sent === undefined ? {} : { Authorization: `Bearer ${sent}` }),
        "Espalier-Priority": "background",
        ...headers,
      },
    }).catch((error) => {
      throw signal?.aborted ? error : unanswered();
    });
    if (response.ok) return response;
    const problem = await read(response, key);
    const again = problem.wantsKey && !quiet && ask && (sent !== keyOf(key) || (!declined.has(key) && (await askKey(key, problem))));
    signal?.throwIfAborted();
    if (!again) throw problem;
  }
}

async function read(response, role) {
  const document = await response.json().catch(() => ({}));
  const retry = Number(response.headers.get("Retry-After"));
  return new Problem({
    status: response.status,
    title: document.title ?? response.statusText,
    detail: document.detail ?? `The answer was ${response.status} without an explanation.`,
    errors: document.errors ?? [],
    retry_after_s: retry > 0 ? retry : null,
    role,
  });
}

function unanswered() {
  return new Problem({ status: 0, title: "No answer", detail: "The service does not answer. Is it running?" });
}
