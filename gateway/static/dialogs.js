// What happens on a click: a question before anything is changed, then the call; explanations and logs. One dialog at a time.

import { ApiError, call, finished, sleep } from "./api.js";
import { h } from "./dom.js";
import { bytes, moment, plural, seconds } from "./format.js";
import { state } from "./views.js";

const dialog = document.getElementById("dialog");
let opener = null;
let closing = new AbortController();

export const announce = (text) => {
  const live = document.getElementById("live");
  live.textContent = "";
  // A change after a moment is read out even if the words are the same.
  setTimeout(() => (live.textContent = text), 50);
};

dialog.addEventListener("close", () => {
  closing.abort();
  dialog.replaceChildren();
  dialog.className = "";
  // The button may have been drawn anew, or be gone with what it stood for.
  const again = opener && [...document.querySelectorAll("[data-act]")].find((one) => same(one, opener));
  (again ?? document.getElementById("main")).focus();
});
const same = (one, other) => Object.keys({ ...one.dataset, ...other.dataset }).every((name) => one.dataset[name] === other.dataset[name]);

function open(title, content, buttons, kind = "") {
  closing.abort();
  closing = new AbortController();
  dialog.className = kind;
  dialog.replaceChildren(
    h("h2", { id: "dialog-title", tabindex: "-1" }, title),
    h("div", { class: "content" }, content),
    h("div", { class: "buttons" }, buttons),
  );
  if (!dialog.open) dialog.showModal();
  (dialog.querySelector("[data-first]") ?? dialog.querySelector("h2")).focus();
  return closing.signal;
}

const close = () => h("button", { type: "button", "data-close": "" }, "Close");
dialog.addEventListener("click", (event) => {
  if (event.target.closest("[data-close]")) dialog.close();
});

/** Ask, then do; what went wrong is said in the same place. */
function confirm({ title, text, verb, grave = false, act, done }) {
  const error = h("p", { class: "error", role: "alert" });
  const go = h("button", { type: "button", class: grave ? "grave" : "primary" }, verb);
  const cancel = h("button", { type: "button", "data-close": "", "data-first": "" }, "Cancel");
  go.addEventListener("click", async () => {
    go.disabled = true;
    error.textContent = "";
    try {
      const result = await act();
      dialog.close();
      announce(done(result));
    } catch (fault) {
      go.disabled = false;
      error.textContent = fault instanceof ApiError ? fault.message : String(fault);
      go.focus();
    }
  });
  open(title, [text.map((line) => h("p", {}, line)), error], [cancel, go]);
}

const ACTIONS = {
  start({ model }, view) {
    const facts = view.models.find((one) => one.name === model);
    const snapshot = view.hosts.some((host) => host.snapshots.some((one) => one.model === model && one.fits));
    confirm({
      title: `Start ${model}?`,
      text: [
        snapshot ? "One more replica is restored from its snapshot." : "One more replica is started cold: no snapshot of it fits a host that reports.",
        facts?.eta_s ? `That usually takes about ${seconds(facts.eta_s)}.` : "",
      ].filter(Boolean),
      verb: "Start",
      act: () => call("POST", "scale-up", { model, replicas: (facts?.admitted ?? 0) + (facts?.coming ?? 0) + 1 }),
      done: () => `${model} is being started.`,
    });
  },
  stop({ model }, view) {
    const facts = view.models.find((one) => one.name === model);
    confirm({
      title: `Stop ${model}?`,
      text: [
        `${plural(facts?.admitted ?? 0, "replica is", "replicas are")} drained, then stopped. ${plural(facts?.inflight ?? 0, "request is", "requests are")} in flight and may finish.`,
        facts?.keep ? `models.${model}.keep is ${facts.keep}: as many are started again.` : "The next request starts it again.",
      ],
      verb: "Drain and stop",
      grave: true,
      act: () => call("POST", "scale-down", { model, replicas: 0 }),
      done: () => `${model} is being drained.`,
    });
  },
  capture({ model }) {
    confirm({
      title: `Make a snapshot of ${model}?`,
      text: ["A donor is started for it beside what runs, captured, restored once to prove it, and ended. Needs memory for one more replica; no client is touched."],
      verb: "Make a snapshot",
      act: () => call("POST", "snapshots", { model }),
      done: () => `A snapshot of ${model} is being made.`,
    });
  },
  drain({ replica }, view) {
    const record = view.replicas.find((one) => one.id === replica);
    confirm({
      title: `Drain ${replica}?`,
      text: [`It gets no new requests, and stops when ${record?.inflight ? `its ${plural(record.inflight, "request")} in flight` : "what it has in flight"} have ended. Its snapshot stays.`],
      verb: "Drain and stop",
      grave: true,
      act: () => call("POST", "drain", { replica }),
      done: () => `${replica} is being drained.`,
    });
  },
  move({ replica }, view) {
    const record = view.replicas.find((one) => one.id === replica);
    const others = view.hosts.filter((host) => host.host !== record?.host).map((one) => one.host);
    if (!others.length) {
      const why = `${record?.host || "Its host"} is the only host that reports.`;
      open(`${replica} cannot be moved`, [h("p", {}, why), h("p", { class: "note" }, "To restart it here instead, drain it: the next request restores it.")], [close()]);
      return;
    }
    const choice = h("select", { id: "move-to" }, h("option", { value: "" }, "the best of the others"), others.map((name) => h("option", { value: name }, name)));
    confirm({
      title: `Move ${replica}?`,
      text: [
        `Another replica is started on the host below. Once it serves, ${replica} on ${record?.host} gets no new requests, and stops when what it has in flight has ended.`,
        h("span", { class: "field" }, h("label", { for: "move-to" }, "To "), choice),
      ],
      verb: "Move",
      act: () => call("POST", "move", { replica, to: choice.value }),
      done: () => `${replica} is being moved.`,
    });
  },
  async verify({ snapshot, host }) {
    confirm({
      title: `Verify ${snapshot}?`,
      text: [`${host} reads every byte of it, and of the files it needs, and compares them with what was committed. It goes on if this page is closed.`],
      verb: "Verify",
      act: () => call("POST", "tasks", { kind: "verify", snapshot, host }),
      done: (task) => (settle(task), `${snapshot} is being verified.`),
    });
  },
  push({ snapshot, host }, view) {
    confirm({
      title: `Push ${snapshot}?`,
      text: [`${host} copies it to the remote${view.remotes.length === 1 ? ` ${view.remotes[0]}` : ""}; what is there already is not sent again. It goes on if this page is closed.`],
      verb: "Push",
      act: () => call("POST", "tasks", { kind: "push", snapshot, host }),
      done: (task) => (settle(task), `${snapshot} is being pushed.`),
    });
  },
  pull({ snapshot, host }) {
    confirm({
      title: `Pull ${snapshot} to ${host}?`,
      text: ["Only what the host has not got is fetched; every byte and the signature are checked before it is published."],
      verb: "Pull",
      act: () => call("POST", "tasks", { kind: "pull", snapshot, host }),
      done: (task) => (settle(task), `${snapshot} is being pulled.`),
    });
  },
  async remote({ host }, view) {
    const here = new Set(view.hosts.find((one) => one.host === host)?.snapshots.map((one) => one.id));
    const signal = open(`Pull a snapshot to ${host}`, h("p", { role: "status" }, "Asking the remote…"), [close()], "wide");
    await shown(signal, { kind: "remote", host }, (found) => copies(found, host, here));
  },
  async explain({ snapshot, host }) {
    const signal = open(`Does ${snapshot} fit ${host}?`, h("p", { role: "status" }, "Asking…"), [close()], "wide");
    await shown(signal, { kind: "explain", snapshot, host }, explanation);
  },
  async log({ replica, host }) {
    await follow(replica, host);
  },
  async why({ model, replica }) {
    const name = replica || model;
    const signal = open(`Why ${name}?`, h("p", { role: "status" }, "Asking…"), [close()], "wide");
    const content = dialog.querySelector(".content");
    try {
      const told = await call("GET", `why?of=${encodeURIComponent(name)}`, undefined, { signal });
      if (signal.aborted) return;
      content.replaceChildren(...story(told));
      const last = told.tries[0];
      const record = told.replicas.find((one) => one.id === (replica || last?.replica));
      if (record?.incarnation || last?.logged) {
        const facts = { "data-replica": record?.id ?? last.replica, "data-host": record?.host || last?.host };
        dialog.querySelector(".buttons").prepend(h("button", { type: "button", "data-act": "log", ...facts }, "Its log"));
      }
    } catch (error) {
      if (!signal.aborted) content.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
    }
  },
};

/** Run what a button names. */
export function act(element, view) {
  const { act: name, ...facts } = element.dataset;
  if (!ACTIONS[name]) return;
  if (!element.closest("dialog")) opener = element.cloneNode(true);
  ACTIONS[name](facts, view);
}

async function settle(task) {
  try {
    const found = await finished(task);
    announce(found.state === "succeeded" ? found.detail : `${found.kind} failed: ${found.detail}`);
    const faults = found.result.faults ?? [];
    const verdict = found.state === "failed" ? "failed" : faults.length ? "failed" : "succeeded";
    if (dialog.open) return;
    open(`${found.kind} ${found.snapshot}`, [
      h("p", { class: "verdict" }, state(verdict), ` ${found.detail}`),
      faults.length ? h("ul", { class: "faults" }, faults.map((fault) => h("li", {}, fault))) : null,
      found.result.bytes ? h("p", { class: "note" }, `${bytes(found.result.bytes)} read in ${seconds(found.result.seconds)}`) : null,
    ], [close()], "wide");
  } catch {
    // The gateway went away meanwhile; the task is in the list of operations.
  }
}

async function shown(signal, body, render) {
  const content = dialog.querySelector(".content");
  try {
    const task = await finished(await call("POST", "tasks", body, { signal }), signal);
    if (signal.aborted) return;
    content.replaceChildren(...(task.state === "failed" ? [h("p", { class: "error", role: "alert" }, task.detail)] : render(task.result)));
  } catch (error) {
    if (!signal.aborted) content.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
  }
}

function copies({ remote, snapshots }, host, here) {
  if (!snapshots.length) return [h("p", {}, `There are no snapshots in ${remote}.`)];
  const rows = snapshots.map((one) =>
    h("tr", {},
      h("th", { scope: "row" }, h("span", { class: "name mono" }, one.id), h("span", { class: "under" }, one.model ?? one.state)),
      h("td", { "data-label": "Made" }, h("div", { class: "value" }, one.created_ms ? moment(one.created_ms) : "–")),
      h("td", { "data-label": "Size" }, h("div", { class: "value" }, bytes(one.bytes))),
      h("td", { "data-label": "Actions" }, h("div", { class: "value actions" }, here.has(one.id) ? "is here" : h("button", { type: "button", "data-act": "pull", "data-snapshot": one.id, "data-host": host, "aria-label": `Pull ${one.id}` }, "Pull"))),
    ),
  );
  return [
    h("p", { class: "note" }, `In ${remote}:`),
    h("div", { class: "scroll" }, h("table", { class: "list" }, h("caption", { class: "unseen" }, "Snapshots in the remote"), h("thead", {}, h("tr", {}, ["Snapshot", "Made", "Size"].map((title) => h("th", { scope: "col" }, title)), h("th", { scope: "col" }, h("span", { class: "unseen" }, "Actions")))), h("tbody", {}, rows))),
  ];
}

function explanation({ model, fits, quarantined, mismatches, made }) {
  return [
    h("p", { class: "verdict", role: "status" }, state(quarantined ? "quarantined" : fits ? "fits" : "does not fit"), fits ? ` It can be restored here as ${model}.` : ` It is not restored here as ${model}.`),
    quarantined ? h("p", {}, h("strong", {}, "Quarantined: "), quarantined) : null,
    mismatches.length
      ? h("div", { class: "scroll" }, h("table", { class: "list" }, h("caption", { class: "unseen" }, "Mismatches"),
          h("thead", {}, h("tr", {}, ["Fact", "Snapshot has", "Found here", "To mend"].map((title) => h("th", { scope: "col" }, title)))),
          h("tbody", {}, mismatches.map((one) => h("tr", {}, h("th", { scope: "row" }, one.field), h("td", { "data-label": "Snapshot has", class: "long" }, one.expected), h("td", { "data-label": "Found here", class: "long" }, one.found), h("td", { "data-label": "To mend" }, one.remedy))))))
      : null,
    h("p", { class: "note" }, `Made on ${made.host}; its donor started in ${seconds(made.cold_start_s)}.`),
  ].filter(Boolean);
}

const FAULTS = {
  host: "This host's doing: another may do.",
  snapshot: "The snapshot's own fault.",
  transient: "The moment's: it is tried again.",
  tool: "A tool failed.",
  environment: "This host lacks something just now.",
  cancelled: "Nobody wanted it any more.",
};

function story(told) {
  // What has gone well since is not why things are as they are.
  const [last, ...more] = told.tries.filter((one) => !one.past);
  const earlier = [...more, ...told.tries.filter((one) => one.past)];
  const again = told.next_try_s === null ? null : h("p", { class: "note" }, `It is not tried again by itself for another ${seconds(told.next_try_s)}; an operator may at any time.`);
  if (!last) {
    const record = told.replicas.find((one) => one.reason) ?? told.replicas[0];
    const said = record?.reason || told.brief;
    const none = stuck(told) ? null : h("p", {}, "Nothing is on record against it.");
    return [h("p", { class: "verdict" }, state(record?.state ?? told.state)), said ? quoted(said) : none, stuck(told), again, before(earlier), unfit(told)].filter(Boolean);
  }
  const cold = last.outcome === "succeeded";
  const what = last.kind === "start" ? (cold ? "The restore" : "The start") : "The snapshot";
  return [
    h("p", { class: "verdict" }, state(cold ? "failed" : last.outcome), h("span", {}, `${what} failed ${last.step}, on ${last.host}, at ${moment(last.at_ms)}${cold ? "; it was then started cold" : ""}.`)),
    h("h3", {}, "What was said"),
    quoted(last.quote),
    last.remedy ? [h("h3", {}, "To mend it"), h("p", { class: "remedy" }, capital(last.remedy))] : [],
    last.fault ? h("p", { class: "note" }, FAULTS[last.fault] ?? last.fault) : null,
    stuck(told),
    again,
    last.said && last.said !== last.quote ? h("details", {}, h("summary", {}, "All that was said"), quoted(last.said)) : null,
    before(earlier),
    unfit(told),
  ].flat().filter(Boolean);
}

const before = (tries) =>
  tries.length
    ? h("details", {}, h("summary", {}, `Before that: ${plural(tries.length, "attempt")} that failed`), h("ul", { class: "faults" }, tries.map((one) => h("li", {}, `${moment(one.at_ms)} on ${one.host}, ${one.step}: ${one.quote}`))))
    : null;

/** Why nothing can start it now; null: a host can. */
function stuck(told) {
  if (!told.hosts.length) return h("p", {}, h("strong", {}, "No restorer reports"), ", so nothing can be started.");
  const lacking = Object.entries(told.lacking);
  if (!lacking.length) return null;
  return h("div", {}, h("p", {}, h("strong", {}, `No host that reports can start ${told.model}:`)), h("ul", { class: "faults" }, lacking.map(([host, what]) => h("li", {}, `${host}: ${what}`))));
}

const quoted = (text) => h("pre", { class: "quote", tabindex: "0", role: "region", "aria-label": `Quoted: ${text.slice(0, 40)}` }, text);
const capital = (text) => `${text[0].toUpperCase()}${text.slice(1).replace(/\.$/, "")}.`;
const unfit = (told) =>
  told.unfit.length
    ? h("details", {}, h("summary", {}, `${plural(told.unfit.length, "snapshot is", "snapshots are")} not used`), h("ul", { class: "faults" }, told.unfit.map((one) => h("li", {}, h("code", {}, one.id), ` on ${one.host}:`, one.reason.split("\n").map((line) => h("p", {}, line))))))
    : null;

/** The engine's log as it grows. */
async function follow(replica, host) {
  const text = h("pre", { class: "log", tabindex: "0", role: "log", "aria-label": `Log of ${replica}`, "aria-live": "off" });
  const status = h("p", { class: "note", role: "status" }, "Asking…");
  const pause = h("button", { type: "button", "aria-pressed": "false" }, "Pause");
  const signal = open(`Log of ${replica}`, [text, status], [pause, close()], "wide tall");
  let paused = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Go on" : "Pause";
  });
  let offset = null;
  while (!signal.aborted) {
    try {
      if (!paused) {
        const body = { kind: "log", replica, host, ...(offset === null ? { lines: 400 } : { offset }) };
        const task = await finished(await call("POST", "tasks", body, { signal }), signal);
        if (signal.aborted) return;
        if (task.state === "failed") {
          status.textContent = task.detail;
          return;
        }
        offset = task.result.offset;
        const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 8;
        if (task.result.text) text.append(task.result.text);
        while (text.childNodes.length > 400) text.firstChild.remove();
        if (atEnd) text.scrollTop = text.scrollHeight;
        status.textContent = task.result.running ? "Live. The engine's own words: it may write what clients send." : "The engine has ended; this is the end of its log.";
        if (!task.result.running) return;
      }
    } catch (error) {
      if (signal.aborted) return;
      status.textContent = `${error.message} Trying again.`;
    }
    await sleep(1_000, signal);
  }
}
