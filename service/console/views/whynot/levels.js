// The search level by level: a row a level, with its nodes along their keys. All rows have the cut at the same place: what is right of it was
// kept. The item's ancestor is the diamond.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../core/preact.js";
import { href } from "../../core/address.js";
import { count, number, MISSING } from "../../core/format.js";

const HEIGHT = 20; // of a strip
const CUT = 0.5; // where the cut is, as a share of the width

export function Levels({ model, version, name, levels, path, tree, place, beam }) {
  const rows = levels.map((level) => ({ level, ancestor: path?.find((one) => one.level === level.level) ?? alone(tree, level) }));
  const reached = rows.filter((row) => row.ancestor?.key !== null && row.ancestor?.key !== undefined);
  const link = (node) => href("tree", { model: model.name, version, node, tree: place || null });
  return html`<section class="panel">
    <h2>${name}</h2>
    <p class="hint">${levels.length > 0 && `The search began on level ${levels[0].level}, the first with more nodes than the beam of ${count(beam)}. `}Right of the line: nodes that were kept. <span class="whynot-diamond" aria-hidden="true">◆</span> is the branch of the item, to the level that it reached.</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Levels of the search"><table class="whynot-levels">
      <caption class="unseen">Levels of the search</caption>
      <thead><tr><th scope="col" class="numeric">Level</th><th scope="col" class="whynot-wide">Nodes by key</th><th scope="col" class="numeric">Kept</th>
        <th scope="col" class="numeric">Its place</th><th scope="col" class="numeric">Its key</th><th scope="col" class="numeric">Cut</th><th scope="col">Branch</th></tr></thead>
      <tbody>${rows.map(({ level, ancestor }) => html`<tr key=${level.level} class=${ancestor && ancestor.key !== null && !ancestor.kept ? "whynot-out" : ""}>
        <td class="numeric">${level.level}</td>
        <td class="whynot-wide"><${Strip} level=${level} ancestor=${ancestor} /></td>
        <td class="numeric">${count(level.kept)}<span class="dim"> of ${count(level.candidates)}</span></td>
        <td class="numeric">${ancestor?.place ? html`<span class=${ancestor.kept ? "good" : "bad"}>${count(ancestor.place)}</span>` : MISSING}</td>
        <td class="numeric">${number(ancestor?.key)}</td>
        <td class="numeric">${number(level.cut)}</td>
        <td>${ancestor?.node !== undefined && ancestor.node >= 0 ? html`<a href=${link(ancestor.node)}>${level.level === levels[levels.length - 1].level ? "leaf" : "node"} ${ancestor.node}</a>` : MISSING}</td></tr>`)}
      </tbody></table></div>
    ${reached.length === 0 && path && html`<p class="hint">No branch of the item was a candidate on these levels.</p>`}
  </section>`;
}

function alone(tree, level) {
  return tree && tree.level === level.level ? { key: tree.rank ?? null, kept: tree.outcome === "scored", place: null } : null;
}

function Strip({ level, ancestor }) {
  const canvas = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const watcher = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watcher.observe(canvas.current.parentElement);
    return () => watcher.disconnect();
  }, []);
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const redraw = () => setTheme((round) => round + 1);
    const media = matchMedia("(prefers-color-scheme: dark)");
    const watcher = new MutationObserver(redraw);
    media.addEventListener("change", redraw);
    watcher.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => (media.removeEventListener("change", redraw), watcher.disconnect());
  }, []);
  useLayoutEffect(() => {
    if (width > 0) draw(canvas.current, width, level, ancestor, colours(canvas.current));
  }, [width, level, ancestor, theme]);
  return html`<div class="whynot-strip"><canvas ref=${canvas} aria-hidden="true"></canvas></div>`;
}

// The colours of now: those of a property with light-dark() are known of an element that has them.
function colours(element) {
  const of = (name) => {
    element.style.color = `var(${name})`;
    return getComputedStyle(element).color;
  };
  return { kept: of("--accent"), dropped: of("--edge"), cut: of("--text"), good: of("--good"), bad: of("--bad") };
}

// Draws the nodes of one level along their keys. Nodes that share a column of pixels are drawn once, the darker the more they are, so a
// level costs no more than its width. level: with nodes and keys where they are known, else with cut and dropped alone; ancestor: with its key, or null.
function draw(canvas, width, level, ancestor, colour) {
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${HEIGHT}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const keys = level.keys ?? [level.cut, level.dropped].filter((key) => key !== null);
  const at = scale(keys, ancestor?.key ?? null, level.cut, width);
  const columns = new Map();
  keys.forEach((key, place) => {
    const kept = place < (level.keys ? level.kept : 1);
    const column = at(key) * 2 + (kept ? 1 : 0);
    columns.set(column, (columns.get(column) ?? 0) + 1);
  });
  const most = Math.max(1, ...columns.values());
  for (const [column, nodes] of columns) {
    context.globalAlpha = 0.35 + 0.65 * Math.sqrt(nodes / most);
    context.fillStyle = column % 2 ? colour.kept : colour.dropped;
    context.fillRect(Math.floor(column / 2), 5, 1.5, HEIGHT - 10);
  }
  context.globalAlpha = 1;
  if (level.cut !== null && level.dropped !== null) {
    context.fillStyle = colour.cut;
    context.fillRect(Math.round(CUT * width), 1, 1, HEIGHT - 2);
  }
  if (ancestor?.key !== null && ancestor?.key !== undefined) diamond(context, at(ancestor.key), ancestor.kept ? colour.good : colour.bad);
}

// Key -> pixel: the cut in the middle; either side as wide as the farther key needs, by a root, so that what is near the cut is told apart.
function scale(keys, own, cut, width) {
  const middle = cut ?? keys[keys.length - 1] ?? 0;
  const all = own === null ? keys : [...keys, own];
  let reach = 0;
  for (const key of all) reach = Math.max(reach, Math.abs(key - middle));
  const room = CUT * width - 8;
  return (key) => {
    const away = reach > 0 ? Math.sqrt(Math.min(1, Math.abs(key - middle) / reach)) : 0;
    const side = key >= middle ? 2 : -2; // beside the line, not on it
    return Math.round(CUT * width + Math.sign(key - middle) * away * room + side);
  };
}

function diamond(context, x, fill) {
  context.fillStyle = fill;
  context.beginPath();
  context.moveTo(x, HEIGHT / 2 - 7);
  context.lineTo(x + 6, HEIGHT / 2);
  context.lineTo(x, HEIGHT / 2 + 7);
  context.lineTo(x - 6, HEIGHT / 2);
  context.fill();
}
