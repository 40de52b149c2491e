// What the page shows of an overview: pure functions from the document to elements. Actions are names in `data-act`.

import { h } from "./dom.js";
import { ago, bytes, moment, plural, seconds } from "./format.js";
import { ofProgress, ofReplica, waterfall } from "./waterfall.js";

const COMING = new Set(["queued", "matching", "restoring", "starting", "verifying"]);
const SHAPES = {
  good: "M8 2.5a5.5 5.5 0 1 0 0 11a5.5 5.5 0 1 0 0-11z",
  busy: "M8 2.5a5.5 5.5 0 0 1 0 11z",
  bad: "M8 2l6.5 11.5h-13z",
  still: "",
  leaving: "M2.5 8h11v1.5h-11z",
};
const LOOKS = {
  ready: "good", admitted: "good", succeeded: "good", committed: "good", fits: "good",
  queued: "busy", matching: "busy", restoring: "busy", starting: "busy", verifying: "busy", running: "busy",
  draining: "leaving", failed: "bad", quarantined: "bad", "does not fit": "bad",
};

/** A state as a shape and a word: the colour only repeats them. */
export function state(word) {
  const look = LOOKS[word] ?? "still";
  return h(
    "span",
    { class: `state ${look}` },
    h(
      "svg",
      { viewBox: "0 0 16 16", width: "14", height: "14", "aria-hidden": "true", focusable: "false" },
      look === "bad" ? null : h("circle", { cx: "8", cy: "8", r: "5.5" }),
      SHAPES[look] ? h("path", { d: SHAPES[look] }) : null,
    ),
    word,
  );
}

const cell = (label, content, attributes = {}) => h("td", { "data-label": label, ...attributes }, h("div", { class: "value" }, content));
const button = (act, label, said, facts = {}, attributes = {}) =>
  h("button", { type: "button", "data-act": act, "aria-label": said, ...facts, ...attributes }, label);

function table(caption, titles, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "list" },
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, titles.map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, rows),
    ),
  );
}

const section = (id, title, note, ...content) =>
  h(
    "section",
    { id, "aria-labelledby": `${id}-title`, "data-key": id },
    h("div", { class: "head" }, h("h2", { id: `${id}-title`, tabindex: "-1" }, title), note ? h("p", { class: "note" }, note) : null),
    ...content,
  );

/** The whole board. `now` is the gateway's clock, in milliseconds. */
export function board(view, now) {
  return h("div", { id: "board" }, h("h1", { class: "unseen" }, "What runs here"), attention(view, now), models(view), held(view), underWay(view, now), replicas(view, now), starts(view, now), operations(view, now), snapshots(view, now));
}

// ---------------------------------------------------------------- what is wrong

function attention(view, now) {
  const found = [];
  for (const model of view.models) {
    if (model.failure) {
      // What the replica's record says is for the operator, and has the line that decided.
      const record = view.replicas.find((one) => one.model === model.name && one.state === "failed" && one.reason);
      found.push(
        item(`failed-${model.name}`, "failed", h("strong", {}, model.name), " cannot be started: ", brief(record?.reason ?? model.failure), whyButton(model.name), retry(model)),
      );
    }
  }
  for (const replica of view.replicas) {
    if (replica.state === "quarantined" || (replica.state === "failed" && !view.models.some((m) => m.name === replica.model && m.failure))) {
      found.push(
        item(`replica-${replica.id}`, replica.state, h("strong", {}, replica.id), ` ${replica.state} ${ago(replica.updated_ms, now)}: `, brief(replica.reason), whyButton(replica.model, replica.id)),
      );
    }
    if (replica.state === "admitted" && replica.start === "cold" && /failed/.test(replica.reason)) {
      found.push(
        item(`cold-${replica.id}`, "failed", h("strong", {}, replica.id), " was started cold: ", brief(replica.reason), whyButton(replica.model, replica.id)),
      );
    }
  }
  for (const host of view.hosts) {
    if (!host.capable) found.push(item(`host-${host.host}`, "failed", h("strong", {}, host.host), ` makes cold starts only: ${host.capability}`));
  }
  if (!view.hosts.length) found.push(item("no-host", "failed", "No restorer reports: nothing can be started. Is ", h("code", {}, "rewake restorer"), " running?"));
  if (!view.store) found.push(item("no-store", "failed", "The store is not reached: serving goes on, nothing can be started or stopped."));
  if (!found.length) return h("div", { "data-key": "attention" });
  return h(
    "section",
    { class: "attention", "data-key": "attention", "aria-labelledby": "attention-title" },
    h("h2", { id: "attention-title" }, plural(found.length, "thing"), found.length === 1 ? " needs" : " need", " a look"),
    h("ul", {}, found),
  );
}

const item = (key, word, ...content) => h("li", { "data-key": key }, h("span", { class: "mark" }, state(word)), h("span", { class: "said" }, ...content));
const whyButton = (model, replica = "") =>
  button("why", "Why?", `Why ${replica || model} failed`, { "data-model": model, "data-replica": replica }, { class: "small" });
const retry = (model) => button("start", "Try again", `Start ${model.name} again`, { "data-model": model.name }, { class: "small" });

/** The first sentence of a reason: the whole of it is a click away. */
export const brief = (text) => {
  // Where in CRIU's sources the line comes from is left out: what it says is worth the room.
  const first = text.split(/; its log ends: |\n/)[0].replace(/(criu \w+ failed) with status -?\d+: (\d+: )?Error \([^)]*\): /, "$1: ");
  return first.length > 180 ? `${first.slice(0, 179)}…` : first;
};

// ---------------------------------------------------------------- models

function models(view) {
  const rows = view.models.map((model) =>
    h(
      "tr",
      { "data-key": model.name },
      h("th", { scope: "row" }, h("span", { class: "name" }, model.name), h("span", { class: "under" }, [model.engine, model.group && `group ${model.group}`].filter(Boolean).join(" · "))),
      cell("State", state(model.state)),
      cell("Replicas", [`${model.admitted}`, h("span", { class: "of" }, ` of ${model.max_replicas}`), model.coming ? h("span", { class: "under" }, `${model.coming} coming`) : null], { class: "number" }),
      cell("In flight", String(model.inflight), { class: "number" }),
      cell("Held", String(model.held), { class: model.held ? "number strong" : "number" }),
      cell("Ready in", model.state === "ready" ? "now" : model.eta_s === null ? "not known" : `about ${seconds(model.eta_s)}`, { class: "number" }),
      cell(
        "Actions",
        h(
          "div",
          { class: "actions" },
          model.admitted + model.coming < model.max_replicas
            ? button("start", model.admitted ? "Add one" : "Start", `${model.admitted ? "Add a replica of" : "Start"} ${model.name}`, { "data-model": model.name })
            : null,
          model.admitted ? button("stop", "Stop", `Stop all replicas of ${model.name}`, { "data-model": model.name }) : null,
          button("capture", "Snapshot", `Make a snapshot of ${model.name}`, { "data-model": model.name }),
        ),
      ),
    ),
  );
  return section("models", "Models", null, table("Models", ["Model", "State", "Replicas", "In flight", "Held", "Ready in", h("span", { class: "unseen" }, "Actions")], rows, "There are no models in the configuration."));
}

function held(view) {
  const total = view.models.reduce((sum, model) => sum + model.held, 0);
  if (!total) return h("div", { "data-key": "held" });
  const shown = view.held.slice(0, 12);
  const several = view.gateways > 1;
  const rows = shown.map((one, number) =>
    h(
      "tr",
      { "data-key": `held-${number}` },
      h("th", { scope: "row" }, one.model),
      cell("Tenant", one.tenant || "–"),
      cell("Position", [String(one.position), one.of ? h("span", { class: "of" }, ` of ${one.of}`) : null, several ? h("span", { class: "under" }, `at ${one.gateway}`) : null], { class: "number" }),
      cell("Has waited", seconds(one.waited_s), { class: "number" }),
      cell("Served in", one.eta_s === null ? "not known" : `about ${seconds(one.eta_s)}`, { class: "number" }),
    ),
  );
  const number = total > shown.length ? `the ${shown.length} that have waited longest, of ${total}` : plural(total, "request");
  const more = several ? `${number}; each of the ${view.gateways} gateway workers has a queue and slots of its own, and a position is one there` : number;
  return section("held", "Held requests", more, table("Held requests", ["Model", "Tenant", "Position", "Has waited", "Served in"], rows, "Nobody waits."));
}

// ---------------------------------------------------------------- starts

const VERBS = { start: "Start of", snapshot: "Snapshot of", verify: "Verifying", explain: "Explaining", push: "Pushing", pull: "Pulling" };
const coldOf = (view, name) => view.models.find((model) => model.name === name)?.cold_start_s ?? null;

function underWay(view, now) {
  const shown = view.progress.filter((one) => one.what !== "log");
  if (!shown.length) return h("div", { "data-key": "under-way" });
  return section(
    "under-way",
    "Under way",
    null,
    shown.map((one) => {
      const name = one.replica || one.model || one.snapshot;
      const replica = view.replicas.find((record) => record.id === one.replica);
      const said = `${VERBS[one.what] ?? one.what} ${name}`;
      const drawn = ofProgress(one, now);
      return h(
        "article",
        { class: "card", "data-key": one.id, "aria-label": said },
        h("h3", {}, said, " ", replica && COMING.has(replica.state) ? state(replica.state) : state("running"), h("span", { class: "under" }, ` on ${one.host}`)),
        one.bytes_total
          ? [
              h("progress", { max: String(one.bytes_total), value: String(one.bytes_done ?? 0), "aria-label": `${said}: bytes done` }),
              h("p", { class: "note" }, `${bytes(one.bytes_done)} of ${bytes(one.bytes_total)}`),
            ]
          : null,
        drawn.rows.length ? waterfall(drawn, { cold: one.what === "start" ? coldOf(view, one.model) : null, caption: `Stages of the ${said.toLowerCase()}`, live: true }) : null,
      );
    }),
  );
}

const outcome = (replica) => (["failed", "quarantined", "cancelled"].includes(replica.state) ? `${replica.state} after` : `${replica.start ?? replica.state} in`);

function starts(view) {
  const done = view.replicas.filter((replica) => replica.stages.length && !view.progress.some((one) => one.replica === replica.id));
  done.sort((a, b) => b.updated_ms - a.updated_ms);
  const cards = done.slice(0, 6).map((replica) =>
    h(
      "details",
      { class: "card", "data-key": replica.id, open: done.length <= 2 },
      h("summary", {}, h("span", { class: "name" }, replica.id), " ", outcome(replica), ` ${seconds(ofReplica(replica).total)}`, h("span", { class: "under" }, replica.host ? ` on ${replica.host}` : "")),
      waterfall(ofReplica(replica), { cold: coldOf(view, replica.model), caption: `Stages of the last start of ${replica.id}`, live: false }),
      replica.account ? h("p", { class: "note" }, `${replica.account[0].toUpperCase()}${replica.account.slice(1)}`) : null,
    ),
  );
  return section("starts", "Last starts", null, cards.length ? cards : h("p", { class: "empty" }, "Nothing has been started yet."));
}

// ---------------------------------------------------------------- replicas

function replicas(view, now) {
  const hosts = view.hosts.filter((host) => host.capable).length;
  const rows = view.replicas.map((replica) =>
    h(
      "tr",
      { "data-key": replica.id },
      h("th", { scope: "row" }, h("span", { class: "name" }, replica.id), h("span", { class: "under" }, replica.incarnation || "no incarnation")),
      cell("State", [state(replica.state), replica.reason ? h("span", { class: "under reason" }, brief(replica.reason)) : null]),
      cell("Start", replica.start ? [replica.start, replica.snapshot ? h("span", { class: "under" }, replica.snapshot) : null] : "–"),
      cell("Host", replica.host || "–"),
      cell("Changed", h("time", { datetime: moment(replica.updated_ms), title: moment(replica.updated_ms) }, ago(replica.updated_ms, now))),
      cell("In flight", String(replica.inflight), { class: "number" }),
      cell(
        "Actions",
        h(
          "div",
          { class: "actions" },
          replica.incarnation ? button("log", "Log", `Log of ${replica.id}`, { "data-replica": replica.id, "data-host": replica.host }) : null,
          replica.reason ? button("why", "Why?", `Why ${replica.id} is ${replica.state}`, { "data-model": replica.model, "data-replica": replica.id }) : null,
          replica.state === "admitted" ? button("drain", "Drain", `Drain and stop ${replica.id}`, { "data-replica": replica.id }) : null,
          replica.state === "admitted" ? button("move", "Move", `Move ${replica.id} to another host`, { "data-replica": replica.id, "data-hosts": String(hosts) }) : null,
        ),
      ),
    ),
  );
  return section("replicas", "Replicas", null, table("Replicas", ["Replica", "State", "Start", "Host", "Changed", "In flight", h("span", { class: "unseen" }, "Actions")], rows, "No replica has run since the store began."));
}

// ---------------------------------------------------------------- operations

const KINDS = { scale_up: "scale up", scale_down: "scale down", snapshot: "snapshot", move: "move" };

function operations(view, now) {
  const all = [
    ...view.operations.map((one) => ({ ...one, title: `${KINDS[one.kind] ?? one.kind} ${one.model}`, by: one.reason })),
    ...view.tasks.map((one) => ({ ...one, title: `${one.kind} ${one.snapshot || one.replica}`, by: "admin" })),
  ].sort((a, b) => b.created_ms - a.created_ms);
  const rows = all.slice(0, 20).map((one) =>
    h(
      "tr",
      { "data-key": one.id },
      h("th", { scope: "row" }, h("span", { class: "name" }, one.title), h("span", { class: "under" }, one.id)),
      cell("State", state(one.state)),
      cell("Asked by", one.by),
      cell("Begun", h("time", { datetime: moment(one.created_ms), title: moment(one.created_ms) }, ago(one.created_ms, now))),
      cell("Took", one.state === "running" ? "–" : seconds(Math.max(0, one.updated_ms - one.created_ms) / 1000), { class: "number" }),
      cell("Outcome", [one.snapshot && one.kind === "snapshot" ? one.snapshot : null, one.detail ? brief(one.detail) : null].filter(Boolean).join(": ") || "–", { class: "reason" }),
    ),
  );
  return section("operations", "Operations", null, table("Operations and tasks", ["What", "State", "Asked by", "Begun", "Took", "Outcome"], rows, "Nothing was asked for yet."));
}

// ---------------------------------------------------------------- snapshots

function snapshots(view, now) {
  const hosts = view.hosts.map((host) => {
    const rows = host.snapshots.map((one) => {
      const facts = { "data-snapshot": one.id, "data-host": host.host };
      const word = one.quarantined ? "quarantined" : one.fits ? "fits" : "does not fit";
      const reason = one.quarantined ?? one.mismatches[0];
      return h(
        "tr",
        { "data-key": `${host.host} ${one.id}` },
        h("th", { scope: "row" }, h("span", { class: "name mono" }, one.id), h("span", { class: "under" }, [one.model, one.engine].filter(Boolean).join(" · "))),
        cell("State", [state(word), reason ? h("span", { class: "under reason" }, brief(reason)) : null]),
        cell("Made", h("time", { datetime: moment(one.created_ms), title: moment(one.created_ms) }, ago(one.created_ms, now))),
        cell("Size", bytes(one.bytes), { class: "number" }),
        cell("Cold start", one.cold_start_s ? seconds(one.cold_start_s) : "–", { class: "number" }),
        cell(
          "Actions",
          h(
            "div",
            { class: "actions" },
            button("explain", "Explain", `Explain whether ${one.id} fits ${host.host}`, facts),
            button("verify", "Verify", `Verify every byte of ${one.id}`, facts),
            view.remotes.length ? button("push", "Push", `Push ${one.id} to the remote`, facts) : null,
          ),
        ),
      );
    });
    const note = `${host.capable ? "CRIU works" : `cold starts only: ${host.capability}`} · ${plural(host.running, "replica")} running · ${plural(host.parallel_starts, "start")} at once`;
    return h(
      "div",
      { "data-key": host.host, class: "host" },
      h("h3", {}, host.host, h("span", { class: "under" }, ` ${note}`), view.remotes.length ? button("remote", "Pull…", `Pull a snapshot to ${host.host}`, { "data-host": host.host }, { class: "small" }) : null),
      table(`Snapshots on ${host.host}`, ["Snapshot", "State", "Made", "Size", "Cold start", h("span", { class: "unseen" }, "Actions")], rows, "No snapshots here. The first cold start of a model makes one, unless snapshot.create is manual."),
    );
  });
  return section("snapshots", "Snapshots", null, hosts.length ? hosts : h("p", { class: "empty" }, "No restorer reports."));
}
