// What a newcomer's Lab asks: a held-out query where they may be read, else some items of the catalogue.

import { useEffect, useState } from "../../core/preact.js";
import { get } from "../../core/api.js";
import { isOpen } from "../../core/models.js";

const QUERIES = 20;
const SOME_ITEMS = 3;

const heldout = new Map(); // model and version -> promise of held-out queries; [] where they may not be read

// {relevant: Set or null, at: [place, number] or null, next: function or null}: what is known of the query that the address has. Where it has
// none, use(query) is called with the first one.
export function useFirstQuestion(model, params, use) {
  const version = params.get("version") ?? model.version;
  const [queries, setQueries] = useState([]);
  const asked = params.get("q");
  useEffect(() => {
    let gone = false;
    questions(model, version).then(async (found) => {
      if (gone) return;
      setQueries(found);
      if (asked === null) use(found[0]?.query ?? (await someItems(model)));
    });
    return () => (gone = true);
  }, [model.name, version, asked === null]);

  const place = queries.findIndex((one) => JSON.stringify(one.query) === asked);
  return {
    relevant: place < 0 ? null : new Set(queries[place].relevant),
    at: place < 0 ? null : [place + 1, queries.length],
    next: queries.length > (place < 0 ? 0 : 1) ? () => use(queries[(place + 1) % queries.length].query) : null,
  };
}

function questions(model, version) {
  if (!isOpen()) return Promise.resolve([]);
  const key = `${model.name} ${version}`;
  if (!heldout.has(key)) {
    const path = `models/${encodeURIComponent(model.name)}/heldout`;
    const asked = get(path, { limit: QUERIES, version }, undefined, { key: "admin", quiet: true });
    heldout.set(key, asked.then((answer) => answer.queries, () => []));
  }
  return heldout.get(key);
}

async function someItems(model) {
  const kind = model.query.kind;
  if (kind !== "history" && kind !== "text") return {};
  const { items } = await get(`models/${encodeURIComponent(model.name)}/items`, { prefix: "", limit: SOME_ITEMS }).catch(() => ({ items: [] }));
  if (kind === "text") return { text: items.find((item) => item.title)?.title ?? "" };
  return { history: items.map((item) => item.id) };
}
