// The page: signing in and out, the overview as it changes, and what is said of it to those who do not see it.

import { ApiError, call, token, watch } from "./api.js";
import { act, announce } from "./dialogs.js";
import { morph } from "./dom.js";
import { board } from "./views.js";

const $ = (id) => document.getElementById(id);
const form = $("login");
let view = null;
let skew = 0;
let watching = new AbortController();
let said = new Map();

// ---------------------------------------------------------------- signing in

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  token.set($("token").value.trim());
  $("login-error").textContent = "";
  try {
    await call("GET", "overview");
    $("token").value = "";
    begin();
  } catch (error) {
    token.clear();
    $("login-error").textContent = error.status === 401 ? "This is not the admin token of this gateway." : error.message;
    $("token").focus();
  }
});

$("sign-out").addEventListener("click", () => end(""));

async function begin() {
  form.hidden = true;
  for (const id of ["board", "nav", "sign-out"]) $(id).hidden = false;
  watching = new AbortController();
  said = new Map();
  link("wait", "Connecting");
  $("main").focus({ preventScroll: true });
  try {
    await watch({ onNews: show, onLost: lost, signal: watching.signal });
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    end("The gateway does not accept the token any more: it may have been started anew. Sign in again.");
  }
}

function end(reason) {
  watching.abort();
  token.clear();
  view = null;
  form.hidden = false;
  for (const id of ["board", "nav", "sign-out"]) $(id).hidden = true;
  $("board").replaceChildren();
  $("login-error").textContent = reason;
  link("off", "Not signed in");
  document.title = "Rewake";
  $("token").focus();
}

// ---------------------------------------------------------------- what is shown

function show(found) {
  skew = found.now_ms - Date.now();
  view = found;
  link("on", "Live");
  draw();
  speak(found);
}

function draw() {
  if (!view) return;
  const fresh = board(view, Date.now() + skew);
  morph($("board"), fresh);
  const failed = view.models.filter((model) => model.state === "failed").length;
  document.title = failed ? `(${failed} failed) Rewake` : "Rewake";
}

function lost(pauseMs, error) {
  const text = error.status === 0 ? "Gateway not reached" : error.message;
  if ($("link").dataset.link !== "lost") announce(`Connection lost: ${text}. What is shown is as it was. Trying again.`);
  link("lost", `${text}; trying again`);
  $("board").classList.toggle("stale", true);
}

function link(kind, text) {
  if ($("link").dataset.link === "lost" && kind === "on") announce("Connected again.");
  $("link").dataset.link = kind;
  if ($("link-text").textContent !== text) $("link-text").textContent = text;
  if (kind === "on") $("board").classList.toggle("stale", false);
}

/** Tell of changes of state, not of numbers. */
function speak(found) {
  const now = new Map(found.models.map((model) => [model.name, model.state]));
  const news = [...now].filter(([name, state]) => said.size && said.get(name) !== state).map(([name, state]) => `${name} is ${state}`);
  if (news.length) announce(`${news.join(", ")}.`);
  said = now;
}

// Ages and running bars go on between two documents; calmly where less motion is wanted.
const calm = matchMedia("(prefers-reduced-motion: reduce)");
setInterval(() => view?.progress.length && !document.hidden && !calm.matches && draw(), 250);
setInterval(() => !document.hidden && draw(), 2_000);

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-act]");
  if (button && view) act(button, view);
});

// ---------------------------------------------------------------- light and dark

const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };
const SAID = { auto: "as the system", light: "light", dark: "dark" };
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = THEMES[name];
  $("theme").setAttribute("aria-label", `Theme: ${SAID[name]}`);
}
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
  localStorage.setItem("rewake-theme", next);
  theme(next);
});
theme(Object.hasOwn(THEMES, localStorage.getItem("rewake-theme") ?? "") ? localStorage.getItem("rewake-theme") : "auto");

// Until here nothing could have been typed that this page does not handle.
for (const id of ["token", "sign-in"]) $(id).disabled = false;
if (token.get()) begin();
else $("token").focus();
