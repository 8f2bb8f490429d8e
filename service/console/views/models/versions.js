// The versions of a model. What changes them needs an admin key, which is asked for then.

import { html, useState } from "../../core/preact.js";
import { href } from "../../core/address.js";
import { post } from "../../core/api.js";
import { Confirm } from "../../core/dialogs.js";
import { loadModels } from "../../core/models.js";
import { useAction } from "../../core/running.js";
import { Badge, Busy, Button, ProblemView, Table, Toggle } from "../../core/ui.js";
import { Trial } from "./trial.js";

export const STATES = { ready: "good", loading: "info", failed: "bad" }; // badges of states

export function Versions({ model }) {
  const [question, setQuestion] = useState(null);
  const { busy, done, problem, run } = useAction(loadModels);

  const change = ({ path, body, doing, did }) =>
    run(doing, () => post(`models/${encodeURIComponent(model.name)}/${path}`, body, undefined, { key: "admin" }).then(() => did));
  const answer = (yes) => {
    setQuestion(null);
    if (yes) change(question);
  };
  const pin = (version) => setQuestion({
    title: `Serve version ${version} of ${model.name}?`,
    detail: `All workers load it where they have not yet, then every request without a version is answered by it, in place of version ${model.version}. It stays so over restarts.`,
    action: `Serve version ${version}`, path: "default", body: { version }, doing: `Making version ${version} the default…`, did: `Version ${version} is the default.`,
  });
  const drop = (version) => setQuestion({
    title: `Drop version ${version} of ${model.name}?`, danger: true,
    detail: "Requests that it has accepted are answered; later ones that name it get 404. Its files stay, and it can be loaded again.",
    action: `Drop version ${version}`, path: "unload", body: { version }, doing: `Dropping version ${version}…`, did: `Version ${version} is dropped.`,
  });
  const load = (version, asDefault) => {
    const body = { version, default: asDefault };
    const what = { path: "load", body, doing: `Loading and checking version ${version}…`, did: `Version ${version} is loaded${asDefault ? " and is the default" : " beside the default"}.` };
    if (asDefault) setQuestion({ ...what, title: `Load version ${version} of ${model.name}, and serve it?`, detail: "It is opened, checked and warmed up beside what serves. If that fails, nothing changes.", action: "Load and serve it" });
    else change(what);
  };
  return html`<section class="panel"><h2><bdi>${model.name}</bdi></h2>
    <${Table} caption="Versions" rows=${model.versions} rowKey=${(one) => one.version} columns=${[
      { label: "Version", numeric: true, cell: (one) => html`<strong>${one.version}</strong>` },
      { label: "State", cell: (one) => html`<${Badge} kind=${STATES[one.state] ?? ""}>${one.state}</${Badge}>${one.version === model.version && html` <${Badge} kind="info">default</${Badge}>`}${one.version === model.candidate?.version && html` <${Badge}>candidate</${Badge}>`}` },
      { label: "Engine", cell: (one) => one.engine ?? "–" },
      { label: "", cell: (one) => html`<bdi class=${one.state === "failed" ? "bad" : "dim"}>${one.reason}</bdi>` },
      { label: "", cell: (one) => html`<span class="toolbar models-actions">
        ${one.version !== model.version && html`<${Button} disabled=${busy !== null} onClick=${() => pin(one.version)}>${one.version < model.version ? "Roll back to it" : "Make it the default"}</${Button}>`}
        ${one.version !== model.version && one.state === "ready" && html`<${Button} kind="danger" disabled=${busy !== null} onClick=${() => drop(one.version)}>Drop</${Button}>
          <a href=${href("replays", { model: model.name, "b.version": one.version })}>Compare</a>`}</span>` },
    ]} />
    <${LoadForm} busy=${busy !== null} load=${load} next=${Math.max(0, ...model.versions.map((one) => one.version)) + 1} />
    <${Busy} busy=${busy !== null}>${busy}</${Busy}>
    ${done && html`<p class="good" role="status">${done}</p>`}
    <${ProblemView} problem=${problem} />
    ${model.reason && html`<p class="bad"><bdi>${model.reason}</bdi></p>`}
    <${Confirm} question=${question} onAnswer=${answer} />
  </section>
  <${Trial} model=${model} promote=${pin} />`;
}

function LoadForm({ busy, load, next }) {
  const [version, setVersion] = useState(String(next));
  const [asDefault, setAsDefault] = useState(false);
  const submit = (event) => {
    event.preventDefault();
    if (Number(version) >= 1) load(Number(version), asDefault);
  };
  return html`<form class="toolbar" onSubmit=${submit}>
    <label class="select"><span>Load version</span><input class="models-version" type="number" min="1" required value=${version} onInput=${(event) => setVersion(event.target.value)} /></label>
    <${Toggle} label="and make it the default" checked=${asDefault} onChange=${setAsDefault} />
    <button type="submit" class="button" disabled=${busy}>Load</button>
    <span class="hint">of those in the models folder</span>
  </form>`;
}
