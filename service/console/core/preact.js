// Preact as the console uses it: all that is vendored, and useId, which that release lacks.

import { useState } from "../vendor/standalone.js";

export * from "../vendor/standalone.js";

let last = 0;

// An id for one element of this component, for labels and ARIA.
export function useId() {
  return useState(() => `id-${++last}`)[0];
}
