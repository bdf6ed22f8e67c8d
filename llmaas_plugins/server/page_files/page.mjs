// The page: reads the service's routes, and shows what the key opens. Texts of the service are put
// in as text, never as HTML.

import { drawBar, drawChart } from "./chart.mjs";
import * as figures from "./metrics.mjs";

const EVERY_MS = 2000;
const PATIENCE_MS = 10000;
const KEPT_S = 900;
const SHOWN = 12;
const PLACES = [
  ["cells", "in cells"],
  ["parked", "parked"],
  ["ram", "in RAM"],
  ["disk", "on disk"],
];
const ADMINISTRATORS = ["now", "memory", "speed", "promises", "levels", "saved"];

const samples = [];
let key = null; // in memory only: scripts of /docs, which come from elsewhere, share this origin
let started = 0;
let showsAll = false;
let timer = 0;
let turns = 0;

const byId = (id) => document.getElementById(id);

function element(name, { className, role, title } = {}, ...content) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (role) made.setAttribute("role", role);
  if (title) made.title = title;
  made.append(...content); // strings become text nodes
  return made;
}

// -- reading -----------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function get(path) {
  const answer = await fetch(path, {
    headers: key === null ? {} : { Authorization: `Bearer ${key}` },
    cache: "no-store",
    credentials: "omit",
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, said.detail ?? `status ${answer.status}`);
  }
  return answer;
}

/** Read the contexts, and the metrics too if the key is not an app's. */
async function read() {
  const overview = await (await get("v1/llmaas/contexts")).json();
  if (overview.app !== null) return { overview, metrics: null };
  return { overview, metrics: figures.parse(await (await get("metrics")).text()) };
}

function show({ overview, metrics }) {
  showScope(overview);
  for (const id of ADMINISTRATORS) byId(id).hidden = metrics === null;
  showContexts(overview);
  if (metrics === null) return;
  keep(metrics, overview);
  showMetrics(metrics, overview);
}

/** Add a sample, and forget old ones, and those of a service that has restarted. */
function keep(metrics, { memory }) {
  const begin = figures.value(metrics, "process_start_time_seconds");
  if (begin !== started) samples.length = 0;
  started = begin;
  const time = Date.now() / 1000;
  const sample = { time, counters: figures.counters(metrics), memory: memory ? figures.memoryByOwner(memory) : [] };
  samples.push(sample);
  sample.rates = figures.rates(samples);
  while (samples[0].time < time - KEPT_S) samples.shift();
}

// -- state -------------------------------------------------------------------------------------

function say(kind, text) {
  const state = byId("state");
  state.dataset.kind = kind;
  if (state.textContent !== text) state.textContent = text; // screen readers hear changes only
  document.body.classList.toggle("stale", kind !== "good");
}

/** Read and show, and again after a while; a later turn or `stop` makes this one void. */
async function turn() {
  stop();
  const mine = turns;
  try {
    const found = await read();
    if (mine !== turns) return;
    show(found);
    say("good", "Running");
    byId("ask").hidden = true;
    byId("forget").hidden = key === null;
  } catch (error) {
    if (mine !== turns) return;
    failed(error);
    if (error.status === 401) return; // goes on with a key
  }
  timer = setTimeout(turn, EVERY_MS);
}

function stop() {
  clearTimeout(timer);
  turns += 1;
}

function failed(error) {
  if (error.status === 401) askForKey();
  else if (error.status === 503) say("bad", `Not now: ${error.message}`);
  else if (error instanceof Refused) say("bad", `Refused: ${error.message}`);
  else if (error instanceof TypeError || error.name === "TimeoutError" || error.name === "AbortError")
    say("bad", "No answer from the service. Trying again…");
  else {
    say("bad", "This page failed; the browser's console tells why.");
    console.error(error);
  }
}

function askForKey() {
  const wasGiven = key !== null;
  forgetKey();
  say("wait", wasGiven ? "This key was not accepted." : "This service needs a key.");
}

function forgetKey() {
  key = null;
  samples.length = 0;
  for (const id of ["scope", "contexts", "forget", ...ADMINISTRATORS]) byId(id).hidden = true;
  byId("ask").hidden = false;
  byId("key").focus();
}

// -- showing -----------------------------------------------------------------------------------

function showScope({ app }) {
  const scope = byId("scope");
  scope.hidden = app === null;
  scope.textContent =
    app === null ? "" : `Contexts of app ${app}. All other figures need the administrator's key.`;
}

function showMetrics(metrics, overview) {
  showFigures(metrics, overview);
  showCharts();
  showPromises(metrics);
  showLevels(metrics);
  const saved = figures.savings(metrics).map(({ name, amount, detail }) =>
    element(
      "div",
      {},
      element("dt", {}, name),
      element("dd", { className: "amount" }, amount),
      element("dd", { className: "detail" }, detail),
    ),
  );
  document.querySelector(".saved").replaceChildren(...saved);
  const on = figures.pluginsOn(metrics);
  byId("plugins").textContent = on.length
    ? `Plugins that are on: ${on.join(", ")}.`
    : "No plugin is on, so contexts are computed again at each switch.";
}

function figure(name, text, unit = "") {
  const number = element("dd", {}, text);
  if (unit) number.append(" ", element("span", { className: "unit" }, unit));
  return element("div", {}, element("dt", {}, name), number);
}

function showFigures(metrics, overview) {
  const at = (name) => figures.value(metrics, name);
  const { writing, firstTokenS } = figures.speeds(samples);
  const withUnit = (name, text) => figure(name, ...text.split(/ (?=\D*$)/));
  const waiting = at("llmaas_queue_waiting_calls");
  const shown = [
    writing === null ? figure("Speed of answers", "–") : figure("Speed of answers", figures.digits(writing), "tokens/s"),
    firstTokenS === null ? figure("First token", "–") : withUnit("First token", figures.seconds(firstTokenS)),
    figure("Calls running", figures.count(at("llmaas_queue_running_calls")), waiting ? `+ ${figures.count(waiting)} waiting` : ""),
    withUnit("Memory", figures.bytes(at("process_resident_memory_bytes"))),
    figure("Contexts", figures.count(overview.n_contexts)),
  ];
  if (at("llmaas_kv_chunks_disk_budget_bytes")) {
    shown.push(withUnit("Contexts on disk", figures.bytes(at("llmaas_kv_chunks_disk_bytes"))));
  }
  byId("figures").replaceChildren(...shown);
}

/** Fill a legend: rows of [color, name, text] and maybe a detail. */
function showLegend(section, rows) {
  const made = rows.map(([color, name, text, detail]) =>
    element(
      "tr",
      {},
      element(
        "th",
        {},
        element("i", { className: color }),
        name,
        ...(detail ? [element("span", { className: "detail" }, detail)] : []),
      ),
      element("td", {}, text),
    ),
  );
  section.querySelector("tbody").replaceChildren(...made);
}

function showCharts() {
  const times = samples.map((sample) => sample.time);
  const last = samples.at(-1);
  const memory = last.memory.map(({ color, name }) => ({
    color,
    values: samples.map((sample) => sample.memory.find((one) => one.name === name)?.bytes ?? 0),
  }));
  const svg = (id) => byId(id).querySelector("svg");
  drawChart(svg("memory"), times, memory, { stacked: true, format: figures.bytes, least: 1e6 });
  const rows = last.memory.map(({ color, name, bytes, why }) => [color, name, figures.bytes(bytes), why]);
  showLegend(byId("memory"), rows);
  const lines = [
    { color: "c3", name: "Prompts, computed", of: "read" },
    { color: "c1", name: "Answers", of: "written" },
  ].map((line) => ({ ...line, values: samples.map(({ rates }) => rates[line.of]) }));
  drawChart(svg("speed"), times, lines, { stacked: false, format: figures.digits, least: 1 });
  showLegend(byId("speed"), lines.map(({ color, name, values }) => [color, name, `${figures.digits(values.at(-1))} tokens/s`]));
}

function showPromises(metrics) {
  const section = byId("promises");
  section.hidden = !metrics.has("llmaas_deadlines_requests");
  const { met, flagged, unflagged, unplanned } = figures.promises(metrics);
  const whole = met + flagged + unflagged;
  const parts = [
    { color: "met", name: "Kept", amount: met },
    { color: "flagged", name: "Missed, as flagged before", amount: flagged },
    { color: "unflagged", name: "Missed without a flag", amount: unflagged },
  ];
  drawBar(section.querySelector("svg"), parts, whole);
  const rows = parts.map(({ color, name, amount }) => [color, name, figures.count(amount)]);
  if (unplanned) rows.push(["lost", "Without measured times", figures.count(unplanned)]);
  showLegend(section, rows);
}

function showLevels(metrics) {
  const section = byId("levels");
  section.hidden = !figures.pluginsOn(metrics).includes("elastic");
  const found = figures.levels(metrics);
  const whole = found.reduce((total, [, tokens]) => total + tokens, 0);
  const parts = found.map(([level, tokens]) => ({
    color: `c1 level-${Math.round(10 * level)}`,
    name: `Level ${level}`,
    amount: tokens,
  }));
  drawBar(section.querySelector("svg"), parts, whole);
  const text = (amount) => `${figures.count(amount)} tokens, ${figures.share(amount, whole)}`;
  const rows = parts.map(({ color, name, amount }) => [color, name, text(amount)]);
  showLegend(section, rows.length ? rows : [["lost", "No token at any level yet", ""]]);
}

function showContexts({ n_contexts: n, contexts }) {
  const now = Date.now() / 1000;
  const hasPlaces = contexts.some(({ places }) => places !== null);
  const shown = showsAll ? contexts : contexts.slice(0, SHOWN);
  const section = byId("contexts");
  section.hidden = false;
  section.querySelector("table").hidden = n === 0;
  section.querySelector(".key").hidden = !hasPlaces;
  section.querySelector("th.where").hidden = !hasPlaces;
  section.querySelector("tbody").replaceChildren(...shown.map((one) => contextRow(one, now)));
  const note = [];
  if (n === 0) note.push("There is no context yet.");
  if (n > contexts.length) note.push(`The latest ${contexts.length} of ${figures.count(n)} contexts.`);
  if (n > 0 && !hasPlaces) note.push("Where they are is unknown without the plugin kv_chunks.");
  byId("contexts-note").textContent = note.join(" ");
  const more = byId("more");
  more.hidden = contexts.length <= SHOWN;
  more.textContent = showsAll ? `Show ${SHOWN}` : `Show all ${figures.count(contexts.length)}`;
  more.setAttribute("aria-expanded", String(showsAll));
}

function contextRow({ id, app, n_tokens: n, n_calls: calls, used, places, bytes }, now) {
  const cell = (className, unit, ...content) => {
    const made = element("td", { className, role: "cell" }, ...content);
    made.dataset.unit = unit;
    return made;
  };
  const row = element(
    "tr",
    { role: "row" },
    cell("", "", app),
    cell("", "", element("code", { title: id }, id.slice(0, 8))),
    cell("number", n === 1 ? " token" : " tokens", figures.count(n)),
    cell("number", calls === 1 ? " call" : " calls", figures.count(calls)),
    cell("number", "", figures.ago(used, now)),
  );
  if (places !== null) row.append(placesCell(n, places, bytes));
  return row;
}

function placesCell(n, places, bytes) {
  const parts = PLACES.map(([color, name]) => ({ color, name, amount: places[color] }));
  const known = parts.reduce((total, { amount }) => total + amount, 0);
  parts.push({ color: "lost", name: "not stored", amount: Math.max(0, n - known) });
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "bar");
  svg.setAttribute("aria-hidden", "true");
  drawBar(svg, parts, Math.max(n, known));
  const said = parts.filter(({ amount }) => amount > 0);
  const text = said.map(({ name, amount }) => `${figures.count(amount)} ${name}`).join(", ");
  const sizes = `${figures.bytes(bytes.ram)} stored in RAM, ${figures.bytes(bytes.disk)} on disk`;
  const label = element("span", { title: sizes }, text || "nothing yet");
  return element("td", { className: "where", role: "cell" }, svg, label);
}

// -- start -------------------------------------------------------------------------------------

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("key").value.trim();
  byId("key").value = "";
  if (!/^[!-~]+$/.test(given)) {
    say("wait", "This is no key: a key has printable ASCII without spaces.");
    return;
  }
  key = given;
  turn();
});
byId("forget").addEventListener("click", () => {
  stop();
  forgetKey();
  say("wait", "The key is forgotten.");
});
byId("more").addEventListener("click", () => {
  showsAll = !showsAll;
  turn();
});
document.addEventListener("visibilitychange", () => {
  stop(); // a page that nobody sees asks nothing
  if (!document.hidden && byId("ask").hidden) turn();
});
turn();
