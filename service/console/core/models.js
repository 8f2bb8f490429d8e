// The models of the service: read once, and again on demand. Which of them is looked at stands in the address (model, version).

import { useLayoutEffect, useState } from "./preact.js";
import { get, hasKey } from "./api.js";

const SMALLEST_BEAM = 10; // where the model does not say
const LOADING_MS = 1000; // between two looks at a model that is loading
const RETRY_MS = 2000; // at a service that is away

const watchers = new Set();
let state = { models: null, keys: [], problem: null, busy: false };

// Read the models (again). Never throws: the state has the problem.
export async function loadModels() {
  if (state.busy) return;
  set({ ...state, busy: true });
  try {
    const { models, keys = [] } = await get("models");
    set({ models, keys, problem: null, busy: false });
    if (models.some((model) => model.state === "loading")) setTimeout(loadModels, LOADING_MS);
  } catch (problem) {
    set({ ...state, problem, busy: false });
    if (problem.passes) setTimeout(loadModels, RETRY_MS);
  }
}

// {models: list or null before the first answer, keys: the roles that have keys, problem, busy}.
export function useModels() {
  const [, render] = useState(0);
  useLayoutEffect(() => {
    const watcher = () => render((round) => round + 1);
    watchers.add(watcher);
    watcher();
    return () => watchers.delete(watcher);
  }, []);
  return state;
}

// The model that an address means: the named one, else the first that is ready. null: there is none of that name.
export function chosenModel(models, name) {
  if (name) return models.find((model) => model.name === name) ?? null;
  return models.find((model) => model.state === "ready") ?? models[0] ?? null;
}

// The versions of a model that answer, ascending.
export function loadedVersions(model) {
  return model.versions.filter((version) => version.state === "ready").map((version) => version.version);
}

// The beam to which one may shrink near a deadline.
export function smallestBeam(model) {
  return model.search.min_beam_size ?? SMALLEST_BEAM;
}

// Whether held-out queries and health can be read without asking for a key.
export function isOpen() {
  return state.keys.length === 0 || hasKey("admin");
}

function set(next) {
  state = next;
  watchers.forEach((watcher) => watcher());
}
