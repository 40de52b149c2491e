// The admin API as the console uses it: the token, one call, and the overview as it changes. Knows nothing of the page.

const KEY = "rewake-admin-token";
const QUIET_S = 5;
const CALL_MS = 20_000;
const BACKOFF_MS = [500, 1_000, 2_000, 4_000, 8_000, 15_000];

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  clear: () => sessionStorage.removeItem(KEY),
};

/** One call; its JSON. Raises ApiError; status 0: nobody answered. */
export async function call(method, path, body, { waitS = 0, signal } = {}) {
  const deadline = AbortSignal.timeout(CALL_MS + waitS * 1000);
  let answer;
  try {
    answer = await fetch(`/admin/v1/${path}`, {
      method,
      // The token travels in this header alone: a page of somebody else's cannot send it.
      headers: { Authorization: `Bearer ${token.get()}`, ...(body ? { "Content-Type": "application/json" } : {}) },
      body: body ? JSON.stringify(body) : undefined,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: signal ? AbortSignal.any([deadline, signal]) : deadline,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "unreachable", "The gateway does not answer.");
  }
  const found = await answer.json().catch(() => null);
  if (!answer.ok) {
    const fault = found?.error ?? {};
    throw new ApiError(answer.status, fault.code ?? "", fault.message ?? `HTTP ${answer.status}`);
  }
  return found;
}

/** Follow the overview until `signal` is aborted or the token is refused (then it raises).
 * `onNews` gets each document, `onLost` the milliseconds until it is tried again. */
export async function watch({ onNews, onLost, signal }) {
  let after = "";
  let failures = 0;
  while (!signal.aborted) {
    try {
      const query = after ? `?after=${encodeURIComponent(after)}&wait=${QUIET_S}` : "";
      const found = await call("GET", `overview${query}`, undefined, { waitS: QUIET_S, signal });
      failures = 0;
      after = found.version;
      onNews(found);
      // A hidden page is nobody's: look again when it is seen.
      if (document.hidden) await seen(signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status === 401) throw error;
      const pause = BACKOFF_MS[Math.min(failures, BACKOFF_MS.length - 1)];
      failures += 1;
      after = "";
      onLost(pause, error);
      await sleep(pause, signal);
    }
  }
}

/** A task, once it has ended. */
export async function finished(task, signal) {
  while (task.state === "running" && !signal?.aborted) {
    task = await call("GET", `tasks/${task.id}?wait=20`, undefined, { waitS: 20, signal });
  }
  return task;
}

export const sleep = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });

const seen = (signal) =>
  new Promise((resolve) => {
    const done = () => document.hidden || (document.removeEventListener("visibilitychange", done), resolve());
    document.addEventListener("visibilitychange", done);
    signal.addEventListener("abort", () => resolve(), { once: true });
  });
