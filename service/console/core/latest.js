// The newest of many requests: a slider asks for more answers than anybody can look at.

import { useEffect, useLayoutEffect, useRef, useState } from "./preact.js";

const PASSING = [0, 429, 502, 503, 504];
const RETRY_S = 2;

// A function that runs work(signal, ...arguments) with its newest arguments and returns a promise of the result. The first call runs at
// once; calls that follow within wait_ms wait for its end, and only the newest of them runs. A call that runs aborts the one before it.
// The promise of a call that was overtaken never settles: a late answer cannot be used by mistake. call.cancel() ends what is under way.
export function latest(work, wait_ms = 0) {
  let controller = new AbortController();
  let timer = null;
  let started = -Infinity;
  let newest = 0;

  function call(...given) {
    const own = ++newest;
    clearTimeout(timer);
    return new Promise((resolve, reject) => {
      const settle = (settler) => (value) => own === newest && settler(value);
      const start = () => {
        started = performance.now();
        controller.abort();
        controller = new AbortController();
        Promise.resolve(work(controller.signal, ...given)).then(settle(resolve), settle(reject));
      };
      const wait = started + wait_ms - performance.now();
      if (wait <= 0) start();
      else timer = setTimeout(start, wait);
    });
  }

  call.cancel = () => {
    newest++;
    clearTimeout(timer);
    controller.abort();
  };
  return call;
}

// What work(signal, ...inputs) answers, as a state: {value, problem, busy}. It runs again whenever the inputs change (by their JSON); the
// former value stays until the next one comes, or null where `forget` is set. inputs null: nothing to do. again(): the same once more.
// retry: a service that is away or has no room is asked again by itself.
export function useAnswer(work, inputs, { wait_ms = 0, forget = false, retry = false } = {}) {
  const newestWork = useRef(work);
  newestWork.current = work;
  const call = useRef(null);
  call.current ??= latest((signal, ...given) => newestWork.current(signal, ...given), wait_ms);
  const [state, setState] = useState({ value: null, problem: null, busy: inputs !== null });
  const [round, setRound] = useState(0);
  useLayoutEffect(() => () => call.current.cancel(), []);
  useLayoutEffect(() => {
    if (inputs === null) {
      call.current.cancel();
      setState({ value: null, problem: null, busy: false });
      return;
    }
    setState((former) => ({ value: forget ? null : former.value, problem: former.problem, busy: true }));
    call.current(...inputs).then(
      (value) => setState({ value, problem: null, busy: false }),
      (problem) => setState((former) => ({ value: former.value, problem, busy: false })),
    );
  }, [JSON.stringify(inputs), round]);
  useEffect(() => {
    if (!retry || state.busy || !PASSING.includes(state.problem?.status)) return undefined;
    const timer = setTimeout(() => setRound((former) => former + 1), 1000 * Math.max(RETRY_S, state.problem.retry_after_s ?? 0));
    return () => clearTimeout(timer);
  }, [state.problem, state.busy]);
  return { ...state, again: () => setRound(round + 1) };
}
