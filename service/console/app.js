// The start of the console: layout, navigation, which view is shown. Views are loaded when they are first shown.

import { html, render, useEffect, useErrorBoundary, useLayoutEffect, useReducer, useState } from "./core/preact.js";
import { changed, go, href, read, watch } from "./core/address.js";
import { KeyDialog } from "./core/dialogs.js";
import { chosenModel, loadModels, loadedVersions, useModels } from "./core/models.js";
import { queryParams } from "./core/query.js";
import { applyTheme, ThemeButton } from "./core/theme.js";
import { Busy, Empty, ProblemView, Select } from "./core/ui.js";

const VIEWS = [
  ["today", "Today", () => import("./views/today.js")],
  ["lab", "Lab", () => import("./views/lab.js")],
  ["whynot", "Why not", () => import("./views/whynot.js")],
  ["frontier", "Frontier", () => import("./views/frontier.js")],
  ["tree", "Tree", () => import("./views/tree.js")],
  ["replays", "Replays", () => import("./views/replays.js")],
  ["models", "Models", () => import("./views/models.js")],
  ["live", "Live", () => import("./views/live.js")],
];
const FIRST = "lab";
const WITH_QUERY = ["lab", "whynot"]; // between these the query goes along

const modules = {}; // view -> its module
let lastQuery = null; // the parameters of the last query that was looked at

function App() {
  const [, redraw] = useReducer((round) => round + 1, 0);
  useLayoutEffect(() => watch(redraw), []);
  const { models, problem, busy } = useModels();
  const { view: named, params } = read();
  const view = named || FIRST;
  const model = models && chosenModel(models, params.get("model"));
  if (params.has("q")) lastQuery = new URLSearchParams(params);

  return html`
    <a class="skip" href="#main" onClick=${toMain}>Skip to the content</a>
    <header class="side">
      <div class="brand"><span class="mark" aria-hidden="true"></span>Espalier</div>
      ${model && html`<${Pickers} models=${models} model=${model} params=${params} view=${view} />`}
      <nav aria-label="Views">
        ${VIEWS.map(([name, title]) => html`<a key=${name} href=${linkTo(name, params, model)} aria-current=${name === view ? "page" : undefined}>${title}</a>`)}
      </nav>
      <div class="foot"><a href="docs">API</a> <a href="metrics">Metrics</a> <${ThemeButton} /></div>
    </header>
    <main id="main" tabindex="-1">
      <${ProblemView} problem=${problem} again=${loadModels} />
      ${models === null && busy && html`<${Busy}>Reading the models…</${Busy}>`}
      ${models?.length === 0 && html`<${Empty}>The models folder is empty. Train a model with <code>python -m training</code>, then reload this page.</${Empty}>`}
      ${models?.length > 0 && model === null && html`<${Empty}>There is no model named <bdi>${params.get("model")}</bdi> here. Choose one:
        ${models.map((one) => html` <a href=${href(view, { model: one.name })}><bdi>${one.name}</bdi></a>`)}</${Empty}>`}
      ${model?.state === "loading" && html`<${Busy}>The model is being loaded, checked and warmed up…</${Busy}>`}
      ${model?.state === "failed" && html`<${ProblemView} problem=${{ title: `${model.name} does not serve`, detail: model.reason }} again=${loadModels} />`}
      ${model && (model.query || view === "models") && html`<${View} key=${`${view} ${model.name}`} name=${view} params=${params} model=${model} />`}
    </main>
    <${KeyDialog} />`;
}

function View({ name, params, model }) {
  const [module, setModule] = useState(modules[name] ?? null);
  const [failed, forget] = useErrorBoundary((error) => console.error(error));
  const [missing, setMissing] = useState(null);
  const load = VIEWS.find(([own]) => own === name)?.[2];
  const enter = () => load?.().then((loaded) => setModule((modules[name] = loaded)), setMissing);
  useLayoutEffect(() => {
    if (!module) enter();
  }, []);
  useEffect(() => {
    document.title = [module?.title, model.name, "Espalier"].filter(Boolean).join(" · ");
  }, [module, model.name]);
  if (!load) return html`<${Empty}>There is no view named <bdi>${name}</bdi>. <a href="#/">To the Lab</a></${Empty}>`;
  if (failed || missing) return html`<${ProblemView} problem=${failed ?? missing} again=${failed ? forget : () => location.reload()} />`;
  if (!module) return html`<${Busy} />`;
  return html`<h1>${module.title}${module.about && html` <small>${module.about}</small>`}</h1>
    <${module.default} params=${params} model=${model} />`;
}

function Pickers({ models, model, params, view }) {
  const choose = (name) => (value) => go(view, changed(name === "model" ? {} : params, { [name]: value }));
  const versions = [["", `version ${model.version} (default)`], ...loadedVersions(model).map((version) => [version, `version ${version}`])];
  return html`<div class="pickers">
    <${Select} label="Model" hidden=${true} value=${model.name} options=${models.map((one) => one.name)} onChange=${choose("model")} />
    <${Select} label="Version" hidden=${true} value=${params.get("version") ?? ""} options=${versions} onChange=${choose("version")} />
  </div>`;
}

function linkTo(name, params, model) {
  const kept = new URLSearchParams();
  for (const own of ["model", "version"]) if (params.has(own)) kept.set(own, params.get(own));
  if (!WITH_QUERY.includes(name) || !lastQuery || (lastQuery.get("model") ?? model?.name) !== model?.name) return href(name, kept);
  return href(name, name === "lab" ? lastQuery : queryParams(lastQuery));
}

function toMain(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

// A view that was come to by a link begins at its top, for the keyboard and the reader too.
let shown = read().view || FIRST;
watch(() => {
  const view = read().view || FIRST;
  if (view !== shown) toMain(new Event("view", { cancelable: true }));
  shown = view;
});

loadModels();
applyTheme();
VIEWS.find(([name]) => name === shown)?.[2]().then((module) => (modules[shown] = module), () => {}); // beside the models; a failure shows later
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
