// The newest of many requests: a slider asks for more answers than anybody can look at.

import { useEffect, useLayoutEffect, useRef, useState } from "./preact.js";

const RETRY_S = 2;
const PATIENCE = 1.5; // an answer may take so many times as long as the one before it
const LONGEST_PACE_MS = 1000;

// A function that runs work(signal, ...arguments) with its newest arguments and returns a promise of the result. The first call runs at
// once; calls that follow within wait_ms wait for its end, and only the newest of them runs. It aborts the one that is under way, after
// more than the time that answers take of late: so a slow service is seen to follow a slider, too.
// The promise of a call that was overtaken never settles: a late answer cannot be used by mistake. call.cancel() ends what is under way.
export function latest(work, wait_ms = 0) {
  let controller = null; // of the call under way
  let pending = null; // the call that waits
  let timer = null;
  let started = -Infinity;
  let pace_ms = wait_ms;

  function call(...given) {
    return new Promise((resolve, reject) => {
      pending = () => {
        const { signal } = (controller = new AbortController());
        const begun = (started = performance.now());
        const settle = (settler) => (answer) => {
          if (signal.aborted) return;
          controller = null;
          pace_ms = Math.min(Math.max(wait_ms, PATIENCE * (performance.now() - begun)), LONGEST_PACE_MS);
          settler(answer);
          if (pending) schedule();
        };
        Promise.resolve(work(signal, ...given)).then(settle(resolve), settle(reject));
      };
      schedule();
    });
  }

  function schedule() {
    clearTimeout(timer);
    const wait = started + (controller && wait_ms ? pace_ms : wait_ms) - performance.now();
    if (wait > 0) timer = setTimeout(run, wait);
    else run();
  }

  function run() {
    const start = pending;
    call.cancel();
    start();
  }

  call.cancel = () => {
    clearTimeout(timer);
    pending = null;
    controller?.abort();
    controller = null;
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
  const asked = useRef(0);
  useLayoutEffect(() => () => call.current.cancel(), []);
  useLayoutEffect(() => {
    if (inputs === null) {
      call.current.cancel();
      setState({ value: null, problem: null, busy: false });
      return;
    }
    setState((former) => ({ value: forget ? null : former.value, problem: former.problem, busy: true }));
    const own = ++asked.current;
    call.current(...inputs).then(
      (value) => setState({ value, problem: null, busy: own !== asked.current }),
      (problem) => setState((former) => ({ value: former.value, problem, busy: own !== asked.current })),
    );
  }, [JSON.stringify(inputs), round]);
  useEffect(() => {
    if (!retry || state.busy || !state.problem?.passes) return undefined;
    const timer = setTimeout(() => setRound((former) => former + 1), 1000 * Math.max(RETRY_S, state.problem.retry_after_s ?? 0));
    return () => clearTimeout(timer);
  }, [state.problem, state.busy]);
  return { ...state, again: () => setRound(round + 1) };
}
