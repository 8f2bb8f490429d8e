// Replays: many queries over two sides, the worst first. Queries are held-out ones, of which it is known what they should find, or pasted.

import { html, useEffect, useRef, useState } from "../core/preact.js";
import { go } from "../core/address.js";
import { count } from "../core/format.js";
import { Busy, Button, ProblemView, Select } from "../core/ui.js";
import { heldOut, pasted, replay } from "./replays/replay.js";
import { Side } from "./replays/side.js";
import { Table, Summary } from "./replays/results.js";

export const title = "Replays";
export const about = "many queries over A and B, the worst first";

const COUNTS = [20, 100, 500, 1000];

export default function View({ params, model }) {
  const [rows, setRows] = useState([]);
  const [wanted, setWanted] = useState(0);
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const [text, setText] = useState("");
  const running = useRef(null);
  const source = params.get("from") ?? "heldout";
  const limit = COUNTS.find((one) => one === Number(params.get("count"))) ?? COUNTS[1];

  const change = (name, value) => {
    const next = new URLSearchParams(params);
    if (value === null || value === "") next.delete(name);
    else next.set(name, value);
    go("replays", next, { replace: true });
  };
  const cancel = () => {
    running.current?.abort();
    setBusy(false);
  };
  const start = async () => {
    running.current?.abort();
    const controller = (running.current = new AbortController());
    setRows([]);
    setProblem(null);
    setBusy(true);
    try {
      const queries = source === "pasted" ? pasted(text, model) : await heldOut(model, params.get("version"), limit, controller.signal);
      setWanted(queries.length);
      await replay(model, params, queries, controller.signal, (more) => setRows((former) => [...former, ...more]));
    } catch (failure) {
      if (!controller.signal.aborted) setProblem(failure);
    } finally {
      if (running.current === controller) setBusy(false);
    }
  };
  useEffect(() => cancel, [model.name]);
  const m = Math.min(Number(params.get("m")) || model.search.m, model.search.max_m);

  return html`
    <form class="panel replays-ask" onSubmit=${(event) => (event.preventDefault(), start())}>
      <div class="columns">
        <${Side} name="A" model=${model} params=${params} prefix="" change=${change} />
        <${Side} name="B" model=${model} params=${params} prefix="b." change=${change} />
      </div>
      <div class="toolbar">
        <${Select} label="Queries" value=${source} options=${[["heldout", "held out from training"], ["pasted", "pasted"]]} onChange=${(value) => change("from", value === "heldout" ? null : value)} />
        ${source === "heldout" && html`<${Select} label="of them" value=${limit} options=${COUNTS.map((one) => [one, count(one)])} onChange=${(value) => change("count", value)} />`}
        <label class="select"><span>Results (m)</span><input class="replays-m" type="number" min="1" max=${model.search.max_m} value=${m} onChange=${(event) => change("m", event.target.value)} /></label>
        ${busy ? html`<${Button} onClick=${cancel}>Cancel</${Button}>` : html`<button type="submit" class="button primary">Replay</button>`}
        <${Busy} busy=${busy}>${`${count(rows.length)} of ${count(wanted)}`}</${Busy}>
      </div>
      ${source === "pasted" && html`<label class="field"><span>Queries, one a line: ids of a history, or a query as JSON</span>
        <textarea rows="6" spellcheck=${false} placeholder="libsdl2-2.0-0, libgl1" value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>`}
    </form>
    ${problem && html`<${ProblemView} problem=${problem} again=${start} />`}
    ${rows.length > 0 && html`<${Summary} rows=${rows} m=${m} done=${!busy} /><${Table} rows=${rows} m=${m} model=${model} params=${params} />`}
    ${rows.length === 0 && !busy && !problem && html`<p class="hint">A is what customers get now. Give B another version, beam or re-ranking, and replay: the queries that lose most by B come first.</p>`}`;
}
