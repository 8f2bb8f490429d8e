// The models of the service: read once, and again on demand. Which of them is looked at stands in the address (model, version).

import { useEffect, useState } from "./preact.js";
import { get } from "./api.js";

const AGAIN_MS = 1000; // while a model is loading

const watchers = new Set();
let state = { models: null, problem: null, busy: false };

// Read the models (again). Never throws: the state has the problem.
export async function loadModels() {
  if (state.busy) return;
  set({ ...state, busy: true });
  try {
    const { models } = await get("models");
    set({ models, problem: null, busy: false });
    if (models.some((model) => model.state === "loading")) setTimeout(loadModels, AGAIN_MS);
  } catch (problem) {
    set({ ...state, problem, busy: false });
  }
}

// {models: list or null before the first answer, problem, busy}.
export function useModels() {
  const [, render] = useState(0);
  useEffect(() => {
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

function set(next) {
  state = next;
  watchers.forEach((watcher) => watcher());
}
