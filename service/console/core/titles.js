// Titles of items that were seen, so that ids in a query read like something. Bounded: the longest unused ones go.

import { useEffect, useState } from "./preact.js";
import { get } from "./api.js";

const MOST = 5000;
const MOST_ASKED = 32; // of one list of ids; others show their id alone
const titles = new Map(); // "model\nid" -> title or null

export function rememberTitles(model, items) {
  for (const { id, title, fields } of items) remember(model, id, title ?? fields?.title ?? null);
}

export function titleOf(model, id) {
  return titles.get(`${model}\n${id}`) ?? null;
}

// Look the titles of some ids up, one after the other; the component is drawn again as they come.
export function useTitles(model, ids) {
  const [, render] = useState(0);
  useEffect(() => {
    const controller = new AbortController();
    const wanted = (model.fields ?? []).includes("title") ? ids.filter((id) => !titles.has(`${model.name}\n${id}`)).slice(0, MOST_ASKED) : [];
    lookUp(model.name, wanted, controller.signal, () => render((round) => round + 1));
    return () => controller.abort();
  }, [model.name, ids.join("\n")]);
}

async function lookUp(model, ids, signal, found) {
  for (const id of ids) {
    try {
      const { items } = await get(`models/${encodeURIComponent(model)}/items`, { prefix: id.slice(0, 200), limit: 20 }, signal, { quiet: true });
      rememberTitles(model, items);
      if (!items.some((item) => item.id === id)) remember(model, id, null);
      found();
    } catch {
      return; // titles are a comfort; whatever is wrong shows where it matters
    }
  }
}

function remember(model, id, title) {
  const key = `${model}\n${id}`;
  titles.delete(key);
  titles.set(key, title);
  if (titles.size > MOST) titles.delete(titles.keys().next().value);
}
