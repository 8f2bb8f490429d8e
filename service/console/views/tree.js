// Tree: a node, the way to it, its children, its items and what is typical of them. An item is found by its id or title.

import { html, useLayoutEffect, useRef, useState } from "../core/preact.js";
import { go, href } from "../core/address.js";
import { get } from "../core/api.js";
import { count, number, percent, plural } from "../core/format.js";
import { useAnswer } from "../core/latest.js";
import { Badge, Bar, Busy, Button, Empty, ItemBox, ProblemView, Select, Table } from "../core/ui.js";
import { Children } from "./tree/children.js";

export const title = "Tree";
export const about = "a node, its children and its items";

const NEIGHBOURS = 8; // items that the node above an item should have
const CLIMB = 4; // levels that are gone up for them, at most; not to the root, which has all items
const EXAMPLES = 3; // items of a child, where no value is typical of them
const LIMITS = [50, 1000]; // items that are listed: at first, and all that the service gives

export default function View({ params, model }) {
  const [item, node, version] = ["item", "node", "version"].map((name) => params.get(name));
  const tree = Number(params.get("tree")) || null; // of a forest; the first has no name in the address
  const [wide, setWide] = useState(null); // the node of which all items are listed
  const limit = wide !== null && wide === node ? LIMITS[1] : LIMITS[0];
  const route = `models/${encodeURIComponent(model.name)}/tree`;
  const ask = async (signal) => {
    const found = item ? await get(route, { item, version, tree }, signal).catch(notThere) : {};
    const read = (own) => get(`${route}/${encodeURIComponent(own)}`, { limit, version, tree }, signal);
    let shown = await read(node ?? found.nodes?.at(-2) ?? 0); // of an item a node above its leaf, where it has neighbours
    for (let climbed = 0; node === null && found.nodes && climbed < CLIMB && shown.level > 1 && shown.item_count < NEIGHBOURS; climbed++) {
      shown = await read(shown.parent);
    }
    return { item, found, shown };
  };
  const { value, problem, busy, again } = useAnswer(ask, [route, version, tree, item, node, limit]);
  const address = (to) => ({ model: model.name, version, tree, item, ...to });
  const link = (to) => href("tree", address(to));
  const keys = useKeys(value?.shown, (to) => go("tree", address({ node: to })));

  return html`
    <section class="panel tree-ask">
      <${ItemBox} key=${item} model=${model} label="Find an item" placeholder="id or title of an item" value=${item ?? ""} keep
        onChoose=${({ id }) => go("tree", address({ item: id, node: null }))} />
      <label class="field"><span>Node</span><input type="number" min="0" value=${value?.shown.node ?? node}
        onChange=${(event) => event.target.value && go("tree", address({ node: event.target.value }))} /></label>
      ${model.trees > 1 && html`<${Select} label="Tree" value=${tree ?? 0} options=${Array.from({ length: model.trees }, (_, place) => [place, `${place + 1} of ${model.trees}`])}
        onChange=${(place) => go("tree", address({ tree: Number(place) || null, node: null }))} />`}
    </section>
    ${problem && html`<${ProblemView} problem=${problem} again=${again} /><p><a href=${link({ node: 0 })}>Begin at the root</a></p>`}
    ${!value && !problem && html`<${Busy} busy=${busy} />`}
    ${value && html`<div class="tree" ...${keys}>
      <${Place} value=${value} link=${link} />
      <div class="columns">
        <${Children} key=${`${value.shown.node} ${version} ${tree}`} shown=${value.shown} line=${value.found.nodes} link=${link}
          read=${(child, signal) => get(`${route}/${child}`, { limit: EXAMPLES, version, tree }, signal, { quiet: true })} />
        <${Typical} shown=${value.shown} />
      </div>
      <${Items} model=${model} version=${version} shown=${value.shown} link=${link} onMore=${limit === LIMITS[0] && (() => setWide(moreOf(value, address)))} />
    </div>`}`;

  // All items of a node: it is named in the address, where an item may have led to it.
  function moreOf({ shown }) {
    if (node === null) go("tree", address({ node: shown.node }), { replace: true });
    return String(shown.node);
  }
}

// What a node is, and the nodes from the root to it; below it those that lead on to the item.
function Place({ value: { item, found, shown }, link }) {
  const { path, level, height } = shown;
  const own = item && found.nodes?.[level] === shown.node; // whether the item is below
  const line = own ? found.nodes : path;
  return html`<section class="panel">
    <div class="toolbar"><h2 id="tree-node" tabindex="-1">${level === height ? "Leaf" : level ? "Node" : "Root,"} ${level ? shown.node : "node 0"}</h2>
      ${shown.node >= shown.trained_nodes && html`<${Badge} kind="info">live</${Badge}>`}
      <span class="dim" role="status">level ${level} of ${height} · ${plural(shown.item_count, "item")} below${level < height && ` · ${plural(shown.child_count, "child", "children")}`}</span></div>
    <nav aria-label="Path from the root"><ol class="tree-path">
      ${line.map((node, at) => html`<li key=${node} class=${at > level ? "below" : ""}><a href=${link({ node })} title=${`level ${at}`} aria-current=${at === level ? "location" : undefined}>${at ? node : "root"}</a></li>`)}
    </ol></nav>
    ${level === 0 && !item && html`<p class="hint">A search goes down from here, level by level, and keeps the best nodes of each. Leaves are items.</p>`}
    ${own && html`<p class="hint"><span class="tree-line" aria-hidden="true">◆</span> <bdi class="mono">${item}</bdi> is below${level < height && `, at leaf ${line.at(-1)}`}.</p>`}
    ${item && found.nodes && !own && html`<p class="hint"><bdi class="mono">${item}</bdi> is not below this node. <a href=${link({ node: null })}>Go to it</a></p>`}
    ${found.problem && html`<p class="hint warn"><bdi>${found.problem.detail}</bdi></p>`}
  </section>`;
}

// Arrows: up and down through the children, right into one, left to the parent. The focus goes along.
function useKeys(shown, goTo) {
  const area = useRef(null);
  const came = useRef(null); // the node that the keyboard left
  useLayoutEffect(() => {
    if (came.current === null || !shown) return;
    const links = childLinks(area.current);
    (links.find((link) => Number(link.dataset.node) === came.current) ?? links[0] ?? area.current.querySelector("h2")).focus();
    came.current = null;
  }, [shown?.node]);
  const move = (node) => {
    came.current = shown.node;
    goTo(node);
  };
  const onKeyDown = (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const links = childLinks(area.current);
    const at = links.indexOf(document.activeElement);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: links.length - 1 }[event.key];
    if (next !== undefined && at >= 0) links[Math.min(Math.max(next, 0), links.length - 1)].focus();
    else if (event.key === "ArrowRight" && at >= 0) move(Number(links[at].dataset.node));
    else if (event.key === "ArrowLeft" && shown.parent !== null) move(shown.parent);
    else return;
    event.preventDefault();
  };
  const onClick = (event) => {
    if (event.detail === 0 && event.target.closest(".tree-children a, .tree-path a")) came.current = shown.node; // Enter on a link
  };
  return { ref: area, onKeyDown, onClick };
}

function childLinks(area) {
  return [...area.querySelectorAll(".tree-children a")];
}

function notThere(problem) {
  if (problem.status !== 404) throw problem;
  return { problem };
}

// Values that are typical of the items below a node.
function Typical({ shown }) {
  const columns = Object.entries(shown.values).filter(([, values]) => values.length);
  return html`<section class="panel"><h2>${shown.level ? "Typical of its items" : "Most frequent values"}</h2>
    ${columns.length === 0 && html`<${Empty}>${shown.item_count ? "The item table has no column whose values items share." : "Nothing is below."}</${Empty}>`}
    ${columns.map(([name, values]) => html`<section key=${name}><h3><bdi>${name}</bdi></h3><${Table} caption=${`Typical values of ${name}`} rows=${values} columns=${[
      { label: "Value", cell: (row) => html`<bdi>${String(row.value).trim() || "(empty)"}</bdi>` },
      { label: "", cell: (row) => html`<${Bar} value=${row.share} />` },
      { label: "Share", numeric: true, cell: (row) => percent(row.share, 1) },
      ...(shown.level ? [{ label: "Lift", numeric: true, cell: (row) => `× ${number(row.lift, 2)}` }] : []),
    ]} /></section>`)}
    ${columns.length > 0 && shown.level > 0 && html`<p class="hint">Lift: how many times the value's share in the catalogue.</p>`}
    ${columns.length > 0 && shown.looked_at < shown.item_count && html`<p class="hint">Counted from ${count(shown.looked_at)} of ${count(shown.item_count)} items.</p>`}
  </section>`;
}

// Some of the items below a node. onMore: lists more of them; false where it did.
function Items({ model, version, shown, link, onMore }) {
  const { items, item_count } = shown;
  const goesWith = (id) => href("lab", { model: model.name, version, q: JSON.stringify({ history: [id], exclude_seen: true }) });
  return html`<section class="panel"><h2>Items</h2>
    ${items.length === 0 && html`<${Empty}>No item is below this node now.</${Empty}>`}
    ${items.length > 0 && html`<${Table} caption="Items below the node" rows=${items} rowKey=${(row) => row.id} columns=${[
      { label: "Id", cell: (row) => html`<a href=${link({ item: row.id, node: null })}><bdi class="mono">${row.id}</bdi></a>` },
      { label: "Title", cell: (row) => html`<bdi class="dim">${row.title}</bdi>` },
      { label: "", cell: (row) => html`${row.live && html`<${Badge} kind="info">live</${Badge}>`} ${!row.eligible && html`<${Badge} kind="warn">removed</${Badge}>`}` },
      ...(model.query.kind === "history" ? [{ label: "", cell: (row) => html`<a href=${goesWith(row.id)}>what goes with it</a>` }] : []),
    ]} />`}
    ${items.length < item_count && html`<div class="toolbar">${onMore && html`<${Button} onClick=${onMore}>Show more items</${Button}>`}
      <span class="hint">${count(items.length)} of ${count(item_count)}: live ones first, the others at even distances.</span></div>`}
  </section>`;
}
