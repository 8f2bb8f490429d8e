// The version that is tried on some requests: how it does beside the default one, and how a trial begins, is promoted and ends.

import { html, useEffect, useState } from "../../core/preact.js";
import { get, put, remove } from "../../core/api.js";
import { count, ms, percent } from "../../core/format.js";
import { loadModels } from "../../core/models.js";
import { useAction } from "../../core/running.js";
import { Busy, Button, ProblemView, Select, Table } from "../../core/ui.js";

const EVERY_MS = 5000;

export function Trial({ model, promote }) {
  const [found, setFound] = useState(null);
  const { busy, problem, run } = useAction(loadModels);
  const path = `models/${encodeURIComponent(model.name)}/candidate`;
  const candidate = model.candidate;

  useEffect(() => {
    setFound(null);
    if (!candidate) return undefined;
    const stopped = new AbortController();
    const read = () => get(path, {}, stopped.signal, { key: "admin", quiet: true }).then(setFound, () => {}); // who has no key sees no figures
    read();
    const timer = setInterval(read, EVERY_MS);
    return () => {
      clearInterval(timer);
      stopped.abort();
    };
  }, [path, JSON.stringify(candidate)]);

  const others = model.versions.filter((one) => one.version !== model.version && one.state !== "failed");
  const begin = (body) => run(`Trying version ${body.version}…`, () => put(path, body, undefined, { key: "admin" }));
  const end = () => run("Ending the trial…", () => remove(path, {}, undefined, { key: "admin" }));
  if (!candidate && !others.length) return null;
  return html`<section class="panel"><h2>Trial</h2>
    ${candidate && html`<p>Version <strong>${candidate.version}</strong> answers ${said(candidate)}; all else goes to version ${model.version}.</p>`}
    ${candidate && found && html`<${Figures} found=${found} />`}
    <${TrialForm} key=${JSON.stringify(candidate)} candidate=${candidate} others=${others} busy=${busy !== null} begin=${begin} />
    ${candidate && html`<p class="toolbar">
      <${Button} disabled=${busy !== null} onClick=${() => promote(candidate.version)}>Promote version ${candidate.version}</${Button}>
      <${Button} kind="danger" disabled=${busy !== null} onClick=${end}>End the trial</${Button}></p>`}
    <${Busy} busy=${busy !== null}>${busy}</${Busy}>
    <${ProblemView} problem=${problem} />
  </section>`;
}

function said({ share, keys, groups, shadow }) {
  const parts = [
    share > 0 && `${percent(share)} of the users`,
    keys.length > 0 && `requests of the ${keys.length > 1 ? "keys" : "key"} ${keys.join(", ")}`,
    groups.length > 0 && `requests of the ${groups.length > 1 ? "groups" : "group"} ${groups.join(", ")}`,
    shadow > 0 && `${percent(shadow)} of the others unseen`,
  ].filter(Boolean);
  return parts.join(", ") || "nothing yet";
}

function Figures({ found }) {
  const { shadow } = found;
  return html`<${Table} caption="Since they were loaded" rows=${found.versions} rowKey=${(one) => one.version} columns=${[
    { label: "Version", numeric: true, cell: (one) => html`<strong>${one.version}</strong>` },
    { label: "Answered", numeric: true, cell: (one) => count(one.answered) },
    { label: "Refused", numeric: true, cell: (one) => count(one.refused) },
    { label: "Late", numeric: true, cell: (one) => count(one.late) },
    { label: "Failed", numeric: true, cell: (one) => (one.failed ? html`${count(one.failed)} <span class="dim">${interval(one.failed_ci)}</span>` : "0") },
    { label: "p50", numeric: true, cell: (one) => ms(one.p50_ms) },
    { label: "p99", numeric: true, cell: (one) => ms(one.p99_ms) },
  ]} />
  ${shadow && shadow.compared + shadow.failed + shadow.left_out > 0 && html`<p>${count(shadow.failed)} second answers failed, ${count(shadow.left_out)} were left out.</p>`}
  ${shadow?.compared > 0 && html`<p>Of ${count(shadow.compared)} requests that both answered, the answers have <strong>${percent(shadow.overlap)}</strong> of the items in
    common <span class="dim">${interval(shadow.overlap_ci)}</span>; the engine took ${ms(shadow.default_p50_ms)} and ${ms(shadow.candidate_p50_ms)} in the
    median.</p>`}`;
}

function interval(ends) {
  return ends ? `${percent(ends[0], 1)} to ${percent(ends[1], 1)}` : "";
}

function TrialForm({ candidate, others, busy, begin }) {
  const [version, setVersion] = useState(String(candidate?.version ?? others[others.length - 1]?.version ?? ""));
  const [share, setShare] = useState(String(100 * (candidate?.share ?? 0.05)));
  const [shadow, setShadow] = useState(String(100 * (candidate?.shadow ?? 0)));
  const submit = (event) => {
    event.preventDefault();
    const { keys = [], groups = [] } = candidate ?? {};
    begin({ version: Number(version), share: Number(share) / 100, shadow: Number(shadow) / 100, keys, groups });
  };
  return html`<form class="toolbar" onSubmit=${submit}>
    <${Select} label="Try version" value=${version} options=${others.map((one) => [String(one.version), String(one.version)])} onChange=${setVersion} />
    <label class="select"><span>% of the users</span><input class="models-version" type="number" min="0" max="100" step="any" required value=${share} onInput=${(event) => setShare(event.target.value)} /></label>
    <label class="select"><span>% of the others unseen</span><input class="models-version" type="number" min="0" max="100" step="any" required value=${shadow} onInput=${(event) => setShadow(event.target.value)} /></label>
    <button type="submit" class="button" disabled=${busy || !version}>${candidate ? "Change" : "Try it"}</button>
    <span class="hint">a user is named by the header Espalier-User</span>
  </form>`;
}
