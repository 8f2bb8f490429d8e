// Asks both sides for many queries, some at a time and in the background, and compares what comes.

import { get, post } from "../../core/api.js";
import { retrieveBody, sideB } from "../../core/query.js";

const MOST = 1000; // queries of one replay
const AT_ONCE = 16; // queries of one request

// [{query, relevant}] of the bundle, at even distances among all.
export async function heldOut(model, version, limit, signal) {
  const { queries } = await get(`models/${encodeURIComponent(model.name)}/heldout`, { limit, version }, signal, { key: "admin" });
  if (queries.length === 0) throw { title: "No held-out queries", detail: "This version's bundle holds none. Paste some instead." };
  return queries.map(({ query, relevant }) => ({ query, relevant }));
}

// [{query, relevant: null}] of text: a line is ids of a history, a search, or a query as JSON. Throws a problem that names the line.
export function pasted(text, model) {
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  if (lines.length === 0) throw { title: "Nothing to replay", detail: "Paste a query a line." };
  if (lines.length > MOST) throw { title: "Too many queries", detail: `${lines.length} lines; at most ${MOST} are replayed.` };
  return lines.map((line, place) => ({ query: queryOf(line, place, model.query.kind), relevant: null }));
}

function queryOf(line, place, kind) {
  if (!/^[[{]/.test(line)) {
    if (kind === "history") return { history: line.split(/[\s,]+/).filter(Boolean) };
    if (kind === "text") return { text: line };
  }
  try {
    const value = JSON.parse(line);
    if (!Array.isArray(value)) return value;
    return kind === "vector" ? { vector: value } : { history: value };
  } catch (error) {
    throw { title: "A query cannot be read", detail: `Line ${place + 1}: ${error.message}` };
  }
}

// take(rows): [{query, overlap, recallA, recallB}], recall null where nothing is known to be relevant.
export async function replay(model, params, queries, signal, take) {
  const most = Math.max(1, Math.min(AT_ONCE, model.max_queries));
  for (let begin = 0; begin < queries.length; begin += most) {
    const block = queries.slice(begin, begin + most);
    const more = { queries: block.map(({ query }) => query), fields: [] };
    const [a, b] = await Promise.all([params, sideB(params)].map((own) => post("retrieve", retrieveBody(model, own, more), signal)));
    signal.throwIfAborted();
    take(block.map(({ query, relevant }, place) => compared(query, relevant, idsOf(a.results[place]), idsOf(b.results[place]))));
  }
}

function compared(query, relevant, a, b) {
  const ofA = new Set(a);
  const common = b.filter((id) => ofA.has(id)).length;
  const longest = Math.max(a.length, b.length);
  return { query, overlap: longest ? common / longest : 1, recallA: recall(a, relevant), recallB: recall(b, relevant) };
}

function idsOf(result) {
  return result.items.map(({ id }) => id);
}

function recall(found, relevant) {
  if (!relevant?.length) return null;
  const have = new Set(found);
  return relevant.filter((id) => have.has(id)).length / relevant.length;
}
