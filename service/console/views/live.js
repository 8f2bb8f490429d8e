// Live: items that come, change and go while the service runs. An item is put, looked at and deleted here; the feed says what was done last.

import { html, useState } from "../core/preact.js";
import { go, href } from "../core/address.js";
import { get, remove } from "../core/api.js";
import { Confirm } from "../core/dialogs.js";
import { count, moment, percent, plural } from "../core/format.js";
import { useAnswer } from "../core/latest.js";
import { loadModels } from "../core/models.js";
import { Badge, Bar, Button, Empty, ItemBox, ProblemView, Table } from "../core/ui.js";
import { PutForm } from "./live/put_form.js";

export const title = "Live";
export const about = "items that come and go while the service runs";

const MOST_LISTED = 50; // changes of the feed

export default function View({ params, model }) {
  const [round, setRound] = useState(0);
  const changed = () => {
    setRound(round + 1);
    loadModels();
  };
  return html`
    <${Status} live=${model.live} />
    <div class="columns">
      <${PutForm} key=${model.name} model=${model} onDone=${changed} />
      <${LookUp} key=${`${model.name} ${params.get("item")}`} model=${model} item=${params.get("item")} onDone=${changed} />
    </div>
    <${Feed} key=${model.name} model=${model} round=${round} />`;
}

function Status({ live }) {
  if (!live) return html`<${Empty}>This service keeps no live catalogue.</${Empty}>`;
  const taken = live.items / live.capacity;
  return html`<p class="live-status"><strong>${plural(live.items, "live item")}</strong> of at most ${count(live.capacity)}${" "}
    <${Bar} value=${taken} kind=${taken > 0.9 ? "" : "info"} /> <span class="dim">${percent(taken, 1)}</span>${" · "}
    ${plural(live.tombstones, "trained item")} deleted · last operation ${count(live.sequence)}
    ${live.applied < live.sequence && html` <${Badge} kind="warn">${count(live.sequence - live.applied)} behind</${Badge}>`}
    ${live.reason && html` <span class="bad"><bdi>${live.reason}</bdi></span>`}</p>`;
}

// One item as it is now, by GET; and its end.
function LookUp({ model, item, onDone }) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState(null);
  const [said, setSaid] = useState(null);
  const [question, setQuestion] = useState(null);
  const path = (id) => `models/${encodeURIComponent(model.name)}/items/${encodeURIComponent(id)}`;

  const attempt = async (work) => {
    setProblem(null);
    setSaid(null);
    try {
      await work();
    } catch (failure) {
      setFound(null);
      setProblem(failure);
    }
  };
  const look = (id) => attempt(async () => setFound(await get(path(id), {}, undefined, { key: "write" })));
  const end = (id) => attempt(async () => {
    const outcome = await remove(path(id), {}, undefined, { key: "write" });
    setFound(null);
    setSaid(`${id}: ${outcome.outcome}, operation ${count(outcome.sequence)}.`);
    onDone();
  });
  const choose = (id) => {
    go("live", { model: model.name, item: id }, { replace: true });
    look(id);
  };
  const live = found && { fields: found.fields, text: found.text, like: found.like, events: found.events, valid_until: found.valid_until, source_version: found.source_version };
  return html`<section class="panel"><h2>Look at an item</h2>
    <${ItemBox} model=${model} label="Item" keep value=${item ?? ""} placeholder="id or title, trained or live" onChoose=${({ id }) => choose(id)} />
    ${item && !found && !problem && !said && html`<div class="toolbar"><${Button} onClick=${() => look(item)}>Look <bdi>${item}</bdi> up</${Button}></div>`}
    <${ProblemView} problem=${problem} />
    ${said && html`<p class="good" role="status"><bdi>${said}</bdi></p>`}
    ${found && html`<dl class="live-facts">
        <div><dt>Id</dt><dd><bdi class="mono">${found.id}</bdi> ${found.live ? html`<${Badge} kind="info">live</${Badge}>` : html`<${Badge}>trained</${Badge}>`}</dd></div>
        <div><dt>Last operation</dt><dd>${found.sequence ? `${count(found.sequence)}, ${moment(found.at)}` : "none: as it was trained"}</dd></div>
        <div><dt>Placed</dt><dd>${found.placed ? html`by ${found.placed.by}, under <a href=${href("tree", { model: model.name, version: found.placed.version, node: found.placed.parent })}>node ${found.placed.parent}</a> of version ${found.placed.version}` : "nowhere"}</dd></div>
      </dl>
      <pre class="live-body" tabindex="0">${JSON.stringify(live, (_, value) => value ?? undefined, 1)}</pre>
      <div class="toolbar"><a class="button" href=${href("lab", { model: model.name, q: JSON.stringify({ history: [found.id], exclude_seen: true }) })} hidden=${model.query.kind !== "history"}>What goes with it?</a>
        <${Button} kind="danger" onClick=${() => setQuestion({ title: `Delete ${found.id}?`, detail: "The next request does not find it any more. A later PUT brings it back.", action: "Delete it", danger: true })}>Delete</${Button}></div>`}
    <${Confirm} question=${question} onAnswer=${(yes) => (setQuestion(null), yes && end(found.id))} />
  </section>`;
}

// What was put and deleted last: the end of the changes feed, which is an administrator's. round: another number when something was changed here
function Feed({ model, round }) {
  const [wanted, setWanted] = useState(false);
  const { value, problem, busy, again } = useAnswer((signal) => last(model, signal), wanted ? [model.name, round] : null);
  return html`<section class="panel"><div class="toolbar"><h2>Last changes</h2>
      <span class="end"></span><${Button} disabled=${busy} onClick=${() => (wanted ? again() : setWanted(true))}>${wanted ? "Read again" : "Read the feed"}</${Button}></div>
    ${!wanted && html`<p class="hint">Changes show what customers did. Where the service has keys, they need an admin key.</p>`}
    <${ProblemView} problem=${problem} again=${again} />
    ${value?.length === 0 && html`<${Empty}>Nothing was ever put or deleted.</${Empty}>`}
    ${value?.length > 0 && html`<${Table} caption="Last changes" rows=${value} rowKey=${(row) => row.sequence} columns=${[
      { label: "Operation", numeric: true, cell: (row) => count(row.sequence) },
      { label: "", cell: (row) => html`<${Badge} kind=${row.kind === "delete" ? "warn" : "good"}>${row.kind}</${Badge}>` },
      { label: "Item", cell: (row) => html`<a href=${href("live", { model: model.name, item: row.id })}><bdi class="mono">${row.id}</bdi></a>` },
      { label: "Title", cell: (row) => html`<bdi class="dim">${row.fields?.title}</bdi>` },
      { label: "Evidence", cell: (row) => evidence(row) },
      { label: "When", cell: (row) => moment(row.at) },
    ]} />`}
  </section>`;
}

async function last(model, signal) {
  const path = `models/${encodeURIComponent(model.name)}/changes`;
  const { sequence } = await get(path, { after: 0, limit: 1 }, signal, { key: "admin" });
  const { changes } = await get(path, { after: Math.max(0, sequence - MOST_LISTED), limit: MOST_LISTED }, signal, { key: "admin" });
  return changes.reverse();
}

function evidence(row) {
  return [row.events?.length && plural(row.events.length, "event"), row.like?.length && `like ${row.like.length}`, row.text && "text"].filter(Boolean).join(", ") || "–";
}
