// Work that somebody starts: whether it is under way, what came of it, why it failed.

import { useRef, useState } from "./preact.js";

// One thing at a time: {busy: what is being done, or null; done: what came of it; problem; run(doing, work)}. after(): called at its end.
export function useAction(after = () => {}) {
  const [state, setState] = useState({ busy: null, done: null, problem: null });
  const run = async (doing, work) => {
    setState({ busy: doing, done: null, problem: null });
    try {
      const done = await work();
      setState({ busy: null, done, problem: null });
    } catch (problem) {
      setState({ busy: null, done: null, problem });
    } finally {
      after();
    }
  };
  return { ...state, run };
}

// Rows that come one after another: {rows, problem, busy, start, cancel}. work(signal, take) hands them over by take(rows).
export function useRows(work) {
  const [rows, setRows] = useState([]);
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const running = useRef(null);

  async function start() {
    running.current?.abort();
    const controller = (running.current = new AbortController());
    setRows([]);
    setProblem(null);
    setBusy(true);
    try {
      await work(controller.signal, (more) => setRows((former) => [...former, ...more]));
    } catch (failure) {
      if (!controller.signal.aborted) setProblem(failure);
    } finally {
      if (running.current === controller) setBusy(false);
    }
  }

  function cancel() {
    running.current?.abort();
    setBusy(false);
  }

  return { rows, problem, busy, start, cancel };
}
