// The stages of a start as bars on one axis, with the cold start beside them. A table first: the bars only repeat its numbers.

import { h } from "./dom.js";
import { bytes, seconds } from "./format.js";

/** What to draw of a progress record, `nowMs` by its host's clock. */
export function ofProgress(progress, nowMs) {
  const begun = progress.begun_ms;
  const running = progress.doing.map((stage) => ({ ...stage, seconds: Math.max(0, (nowMs - stage.begun_ms) / 1000), running: true }));
  return lay([...progress.stages, ...running], begun, Math.max(0, (nowMs - begun) / 1000));
}

/** What to draw of a replica's record: a start that has ended. */
export function ofReplica(replica) {
  const begun = Math.min(...replica.stages.map((stage) => stage.begun_ms || Infinity));
  return replica.stages.length ? lay(replica.stages, Number.isFinite(begun) ? begun : 0) : null;
}

function lay(stages, begunMs, atLeastS = 0) {
  let end = 0;
  const rows = stages
    .map((stage) => {
      // A record of an older version says no beginnings: its stages came one after another.
      const from = stage.begun_ms && begunMs ? Math.max(0, (stage.begun_ms - begunMs) / 1000) : end;
      end = Math.max(end, from + stage.seconds);
      return { ...stage, from };
    })
    .sort((a, b) => a.from - b.from || b.seconds - a.seconds);
  return { rows, total: Math.max(end, atLeastS, 0.001) };
}

/** A table of the stages; `cold` are the seconds that a cold start takes, or null. */
export function waterfall({ rows, total }, { cold, caption, live }) {
  const scale = Math.max(total, cold ?? 0);
  const percent = (value) => `${((100 * value) / scale).toFixed(2)}%`;
  const bar = (from, length, kind) =>
    h(
      "svg",
      { class: `bar ${kind}`, "aria-hidden": "true", focusable: "false", width: "100%", height: "14" },
      h("rect", { class: "track", x: "0", y: "6", width: "100%", height: "2", rx: "1" }),
      h("rect", { class: "span", x: percent(from), y: "2", width: percent(Math.max(length, scale / 400)), height: "10", rx: "3" }),
    );
  return h(
    "table",
    { class: "waterfall" },
    h("caption", { class: "unseen" }, caption),
    h(
      "thead",
      { class: "unseen" },
      h("tr", {}, h("th", { scope: "col" }, "Stage"), h("th", { scope: "col" }, "Timeline"), h("th", { scope: "col" }, "Time"), h("th", { scope: "col" }, "Read")),
    ),
    h(
      "tbody",
      {},
      rows.map((row, number) =>
        h(
          "tr",
          { "data-key": `${number}-${row.name}`, class: row.running ? "running" : null },
          h("th", { scope: "row" }, row.name, row.running ? h("span", { class: "unseen" }, ", under way") : null),
          h("td", { class: "graph" }, bar(row.from, row.seconds, row.running ? "running" : "done")),
          h("td", { class: "number" }, seconds(row.seconds)),
          h("td", { class: "note" }, row.bytes ? `${bytes(row.bytes)}${row.tier ? ` from ${row.tier}` : ""}` : ""),
        ),
      ),
    ),
    h(
      "tfoot",
      {},
      h(
        "tr",
        { "data-key": "total" },
        h("th", { scope: "row" }, live ? "so far" : "in all"),
        h("td", { class: "graph" }, bar(0, total, "total")),
        h("td", { class: "number" }, seconds(total)),
        h("td", { class: "note" }, cold && !live && cold > total ? `${(cold / total).toFixed(1)} times faster` : ""),
      ),
      cold
        ? h(
            "tr",
            { "data-key": "cold" },
            h("th", { scope: "row" }, "cold start"),
            h("td", { class: "graph" }, bar(0, cold, "cold")),
            h("td", { class: "number" }, seconds(cold)),
            h("td", { class: "note" }, "as the donor took"),
          )
        : null,
    ),
  );
}
