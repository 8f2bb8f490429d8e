// The children of a node as bars of their items, with what is below the first of them. The item's child and live leaves come first.

import { html, useEffect, useMemo, useState } from "../../core/preact.js";
import { count, percent, plural } from "../../core/format.js";
import { Badge, Bar, Button, Empty } from "../../core/ui.js";

const FEW = 24;
const STEP = 200; // so many more at a click
const LOOKED_INTO = 64; // children whose content is read, one after the other
const TELLING = 1.2; // a value says something of a child from this lift on,
const COMMON = 0.05; // and this share
const VALUES = 3;

// line: the nodes to an item that is looked for, if any. read(node, signal): a node's description.
export function Children({ shown, line, link, read }) {
  const [limit, setLimit] = useState(FEW);
  const own = line?.[shown.level] === shown.node ? line[shown.level + 1] : undefined;
  const rows = useMemo(() => ordered(shown, own), [shown, own]);
  const listed = rows.slice(0, limit);
  const contents = useContents(listed, read);
  const most = Math.max(1, ...shown.children_items);
  const least = Math.min(...shown.children_items);
  const known = shown.children.length; // of more the service lists the first
  const cut = known < shown.child_count;
  const each = least === most ? plural(most, "item") : `${count(least)} to ${count(most)} items`;
  const sizes = cut ? `The first ${count(known)} have ${each} each. ` : least === most ? `Each has ${each}. ` : `They have ${each} each. `;

  if (shown.level === shown.height) return html`<section class="panel"><h2>Children</h2><${Empty}>A leaf has none: it is the place of one item.</${Empty}></section>`;
  return html`<section class="panel"><h2>Children</h2>
    <p class="hint">${shown.child_count > 1 && sizes}↑ ↓ move, → goes into one, ← to the parent.</p>
    <div class="scroll"><ul class="tree-children">
      ${listed.map(({ node, items, live }) => html`<li key=${node}><a href=${link({ node })} data-node=${node}>
        <span class="tree-number">${node === own && html`<span class="tree-line" title="The item is below">◆</span> `}${node}${live && html` <${Badge} kind="info">live</${Badge}>`}</span>
        <${Bar} value=${items / most} />
        <span class="numeric">${items !== null && count(items)}</span>
        <span class="tree-content ellipsis dim">${contents.get(node)}</span></a></li>`)}
    </ul></div>
    ${limit < rows.length && html`<div class="toolbar"><${Button} onClick=${() => setLimit(limit + STEP)}>Show ${count(Math.min(STEP, rows.length - limit))} more children</${Button}>
      <span class="hint">The largest ${count(limit)} of ${cut && `the first ${count(known)} of `}${count(shown.child_count)} are listed.</span></div>`}
    ${limit >= rows.length && cut && html`<p class="hint">The first ${count(known)} of ${count(shown.child_count)} are listed.</p>`}
  </section>`;
}

function ordered({ children, children_items, trained_nodes }, own) {
  const rows = children.map((node, at) => ({ node, items: children_items[at], live: node >= trained_nodes }));
  if (own && !children.includes(own)) rows.push({ node: own, items: null, live: own >= trained_nodes });
  const first = (row) => (row.node === own ? 2 : row.live ? 1 : 0);
  return rows.sort((one, other) => first(other) - first(one) || other.items - one.items || one.node - other.node);
}

// What is below the listed children, as it comes: node -> a line of text.
function useContents(rows, read) {
  const [contents, setContents] = useState(new Map());
  const nodes = rows.slice(0, LOOKED_INTO).map(({ node }) => node);
  useEffect(() => {
    const controller = new AbortController();
    lookInto();
    return () => controller.abort();

    async function lookInto() {
      for (const node of nodes.filter((one) => !contents.has(one))) {
        const child = await read(node, controller.signal).catch(() => null); // a comfort; what is wrong shows where it matters
        if (!child || controller.signal.aborted) return;
        setContents((former) => new Map(former).set(node, content(child)));
      }
    }
  }, [nodes.join()]);
  return contents;
}

// One item by name; of more, the values that tell them from the catalogue, the most telling first. Where there are none, some of the items.
function content({ item_count, items, values }) {
  if (item_count === 1 && items.length) return html`<bdi class="mono">${items[0].id}</bdi> <bdi>${items[0].title}</bdi>`;
  const telling = Object.values(values).flat().filter(({ lift, share }) => lift >= TELLING && share >= COMMON)
    .sort((one, other) => other.share * Math.log(other.lift) - one.share * Math.log(one.lift)).slice(0, VALUES);
  if (!telling.length) return items.map(({ id }, at) => html`${at > 0 && ", "}<bdi class="mono">${id}</bdi>`);
  return telling.map(({ value, share }, at) => html`${at > 0 && " · "}<bdi>${String(value)}</bdi> ${percent(share)}`);
}
