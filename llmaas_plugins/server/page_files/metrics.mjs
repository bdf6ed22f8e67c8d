// Figures of the page, from the text that Prometheus reads. No DOM here.

const PAIR = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const ESCAPED = { "\\\\": "\\", '\\"': '"', "\\n": "\n" };
const PLUGINS = ["kv_chunks", "flash_weights", "elastic", "deadlines", "knn_lm"];
const COLORS = ["c1", "c2", "c3", "c4"];
const WINDOW_S = 30;

/** Return the samples of a scrape: arrays of {labels, value} by name. */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (match === null) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(PAIR)) {
      labels[name] = value.replace(/\\[\\"n]/g, (escape) => ESCAPED[escape]);
    }
    const value = match[3] === "+Inf" ? Infinity : Number(match[3]);
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value });
  }
  return found;
}

/** Return a metric without labels; 0 if it is missing. */
export function value(metrics, name) {
  return metrics.get(name)?.[0]?.value ?? 0;
}

/** Return the samples of a dictionary in a plugin's report, by key. */
export function byKey(metrics, name) {
  return new Map((metrics.get(name) ?? []).map((sample) => [sample.labels.key, sample.value]));
}

/** Return the names of the plugins that are on. */
export function pluginsOn(metrics) {
  const names = [...metrics.keys()];
  return PLUGINS.filter((plugin) => names.some((name) => name.startsWith(`llmaas_${plugin}_`)));
}

/** Return the owners of memory in the service's report, the rest first: {name, color, bytes, why}. */
export function memoryByOwner(report) {
  const rank = ({ kind }) => (kind === "rest" ? 0 : 1);
  const sorted = [...report.owners].sort((a, b) => rank(a) - rank(b) || a.owner.localeCompare(b.owner));
  return sorted.map(({ owner, bytes, kind, why }, i) => ({
    name: owner.charAt(0).toUpperCase() + owner.slice(1),
    color: kind !== "rest" ? COLORS[i % COLORS.length] : owner === "mapped files" ? "lost" : "c0",
    bytes,
    why,
  }));
}

/** Return the counters of a scrape that rates are taken of. */
export function counters(metrics) {
  const at = (name) => value(metrics, name);
  return {
    generated: at("llmaas_generated_tokens_total"),
    prompt: at("llmaas_prompt_tokens_total"),
    reused: at("llmaas_reused_tokens_total"),
    decodeS: at("llmaas_decode_seconds_total"),
    firsts: at("llmaas_first_token_seconds_count"),
    firstS: at("llmaas_first_token_seconds_sum"),
  };
}

/** Return tokens a second over the last 30 s of samples {time, counters}. */
export function rates(samples) {
  const last = samples.at(-1);
  const first = samples.find((sample) => last.time - sample.time <= WINDOW_S) ?? last;
  const seconds = last.time - first.time;
  const rate = (of) => (seconds > 0 ? (of(last.counters) - of(first.counters)) / seconds : 0);
  return { written: rate((c) => c.generated), read: rate((c) => c.prompt - c.reused) };
}

/** Return the mean speed of answers and time to the first token: recently, else since the start. */
export function speeds(samples) {
  const [first, last] = [samples[0].counters, samples.at(-1).counters];
  const none = { generated: 0, firsts: 0, decodeS: 0, firstS: 0 };
  const ratio = (of, over) => {
    for (const before of [first, none]) {
      if (over(last) > over(before)) return (of(last) - of(before)) / (over(last) - over(before));
    }
    return null;
  };
  return {
    writing: ratio((c) => c.generated - c.firsts, (c) => c.decodeS),
    firstTokenS: ratio((c) => c.firstS, (c) => c.firsts),
  };
}

/** Return the outcomes of promises: {met, flagged, unflagged, unplanned}. */
export function promises(metrics) {
  const found = byKey(metrics, "llmaas_deadlines_requests");
  const at = (key) => found.get(key) ?? 0;
  return {
    met: at("met"),
    flagged: at("missed") - at("unexpected"),
    unflagged: at("unexpected"),
    unplanned: at("unplanned"),
  };
}

/** Return tokens by level, the widest level first: [level, tokens]. */
export function levels(metrics) {
  const found = [...byKey(metrics, "llmaas_elastic_tokens")].filter(([, tokens]) => tokens > 0);
  return found.map(([level, tokens]) => [Number(level), tokens]).sort((a, b) => b[0] - a[0]);
}

/** Return what features saved: {name, amount, detail} with texts. */
export function savings(metrics) {
  const at = (name) => value(metrics, name);
  const on = pluginsOn(metrics);
  const { prompt, reused } = counters(metrics);
  const found = [
    ["Prompt tokens not computed again", count(reused), `${share(reused, prompt)} of ${count(prompt)}`],
  ];
  if (on.includes("kv_chunks")) {
    const [restored, parked] = [at("llmaas_kv_chunks_restored_tokens"), at("llmaas_kv_chunks_taken_tokens")];
    const saved = Math.max(0, at("llmaas_kv_chunks_recompute_saved_seconds"));
    found.push(["Tokens restored", count(restored), `${count(parked)} of them in parked cells`]);
    found.push(["Time not spent computing them", seconds(saved), "estimated by this service's own speed"]);
  }
  if (on.includes("flash_weights")) {
    const [needed, read] = [at("llmaas_flash_weights_needed_bytes"), at("llmaas_flash_weights_read_bytes")];
    const whole = bytes(at("llmaas_flash_weights_weight_bytes"));
    found.push(["Weights not read from disk", bytes(Math.max(0, needed - read)), `${bytes(read)} read; all weights are ${whole}`]);
  }
  const byLevel = levels(metrics);
  if (byLevel.length) {
    const tokens = byLevel.reduce((total, [, n]) => total + n, 0);
    const mean = byLevel.reduce((total, [level, n]) => total + level * n, 0) / tokens;
    found.push(["Elastic width not computed", share(1 - mean, 1), `mean level ${mean.toFixed(2)} of ${count(tokens)} tokens`]);
  }
  if (metrics.has("llmaas_knn_lm_proposed")) {
    const [accepted, proposed] = [at("llmaas_knn_lm_accepted"), at("llmaas_knn_lm_proposed")];
    found.push(["Drafted tokens accepted", count(accepted), `${share(accepted, proposed)} of ${count(proposed)} proposed`]);
  }
  return found.map(([name, amount, detail]) => ({ name, amount, detail }));
}

// -- numbers as texts, with units --------------------------------------------------------------

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Return a whole number with thousands separated. */
export function count(number) {
  return WHOLE.format(number);
}

/** Return bytes in a unit that leaves about three digits. */
export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (number >= 999.5 && power < units.length - 1) {
    number /= 1000;
    power += 1;
  }
  return `${power ? digits(number) : count(number)} ${units[power]}`;
}

/** Return a number with about three digits. */
export function digits(number) {
  return number >= 99.95 || number === 0 ? count(number) : number.toFixed(number >= 9.995 ? 1 : 2);
}

/** Return a duration in ms, s, min or h. */
export function seconds(number) {
  if (number < 1) return `${count(number * 1000)} ms`;
  if (number < 120) return `${digits(number)} s`;
  return number < 7200 ? `${count(number / 60)} min` : `${count(number / 3600)} h`;
}

/** Return a share in percent; "none" if there is no whole. */
export function share(part, whole) {
  if (part > 0 && part < 0.005 * whole) return "< 1 %";
  return whole > 0 ? `${count((100 * part) / whole)} %` : "none";
}

/** Return how long ago a Unix time was. */
export function ago(time, now) {
  const passed = Math.max(0, now - time);
  if (passed < 5) return "now";
  if (passed < 60) return `${count(passed)} s ago`;
  if (passed < 3600) return `${count(passed / 60)} min ago`;
  return passed < 172800 ? `${count(passed / 3600)} h ago` : `${count(passed / 86400)} d ago`;
}
