// A query and how it is searched, as the address has them, and the body of POST /retrieve that they make. Views that hand a query to
// each other (Lab, Why not, Replays) use these parameters:
//
//   model, version      version: absent for the default one
//   q                   the query as JSON, in the form of /retrieve: {"history": […], "exclude_seen": true, …}
//   filter, without     `filter` and `exclude_filter` as JSON
//   beam, m, min        beam_size, m, min_score; absent: the model's defaults
//   live=0              without live items
//   rerank=1, rerank=N  re-ranked, to the depth N
//   side=b              of two that are compared, with b.version, b.beam, b.live, b.rerank in place of those above

const SIDE_B = ["version", "beam", "live", "rerank"];

const QUERY_NAMES = ["model", "version", "q", "filter", "without", "beam", "m", "min", "live", "rerank"];

// The query of an address; null where it has none, or none that can be read.
export function queryOf(params) {
  return json(params.get("q"));
}

// The conditions in a parameter, `filter` or `without`, by column.
export function conditionsOf(params, name) {
  return json(params.get(name)) ?? {};
}

// The parameters of side B: its own in place of those of A.
export function sideB(params) {
  const own = new URLSearchParams(params);
  for (const name of SIDE_B) {
    own.delete(name);
    if (params.has(`b.${name}`)) own.set(name, params.get(`b.${name}`));
  }
  return own;
}

// The parameters of an address that say query and search, and nothing of a view's own: to follow a link with.
export function queryParams(params) {
  const kept = new URLSearchParams();
  for (const name of QUERY_NAMES) if (params.has(name)) kept.set(name, params.get(name));
  return kept;
}

// The body of POST /retrieve. model: its description; more: further members of the body, as {explain_items: ["x"]}.
export function retrieveBody(model, params, more = {}) {
  const body = { model: model.name, queries: [queryOf(params) ?? {}] };
  setNumber(body, "version", params.get("version"));
  setNumber(body, "m", params.get("m"));
  setNumber(body, "beam_size", params.get("beam"));
  setNumber(body, "min_score", params.get("min"));
  const filter = json(params.get("filter"));
  const without = json(params.get("without"));
  if (filter) body.filter = filter;
  if (without) body.exclude_filter = without;
  if (params.get("live") === "0") body.live = false;
  const rerank = params.get("rerank");
  if (rerank) body.rerank = rerank === "1" ? true : { depth: Number(rerank) };
  return { ...body, ...more };
}

// Columns that a list of results shows: the title, and one more that tells items apart.
export function shownFields(model) {
  const fields = model.fields ?? [];
  return fields.filter((name) => name === "title").concat(fields.filter((name) => !["id", "title"].includes(name)).slice(0, 1));
}

function setNumber(body, name, text) {
  if (text !== null && text !== "" && Number.isFinite(Number(text))) body[name] = Number(text);
}

function json(text) {
  try {
    const value = text ? JSON.parse(text) : null;
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}
