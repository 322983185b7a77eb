"use strict";
const INTERVAL = 2000; // milliseconds from one poll to the next
const CRASH_POLLS = 5; // polls of the numbers for each poll of the crashes
const KEPT = 300; // samples of each model: ten minutes
const SHORTEST = 60; // seconds of a plot, at least
const MAX_LINES = 1000; // displayed lines of the log
const wanted = new Set(); // names of headers for restricted APIs

function draw(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}
// Sets a text only if it is another one, so that the browser has nothing to do for the same.
function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Units
const some = (format) => (value) => (value === null || value === undefined || Number.isNaN(value) ? "–" : format(value));
const digits = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
const count = some((value) => value.toLocaleString("en"));
const rate = some((value) => (value === 0 ? "0" : value >= 1e6 ? `${digits(value / 1e6)} M` : value >= 1e4 ? `${digits(value / 1e3)} k` : digits(value)));
const duration = some((us) => (us >= 1e6 ? `${digits(us / 1e6)} s` : us >= 1000 ? `${digits(us / 1000)} ms` : us === 0 ? "0" : `${us.toFixed(0)} µs`));
const bytes = some((value) => (value >= 2 ** 30 ? `${digits(value / 2 ** 30)} GiB` : value >= 2 ** 20 ? `${digits(value / 2 ** 20)} MiB` : `${(value / 1024).toFixed(0)} KiB`));
const percent = some((value) => `${digits(value)} %`);
function uptime(seconds) {
  const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  return days ? `${days} d ${hours} h` : hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

// Requests
onMissingKey = (name) => {
  if (wanted.has(name)) return;
  wanted.add(name);
  byId("keyfields").append(keyField(name, `key-${wanted.size}`));
  byId("keys").hidden = false;
};
onKeys(() => {
  polls = 0;
  crashIds = ""; // what an open crash could not show before is asked for again
  poll();
});

// Numbers: what happened between two overviews
const keyOf = (model) => JSON.stringify([model.namespace, model.name, model.version]);
function increase(old, now) {
  const known = new Map(old);
  return now.map(([bound, number]) => [bound, number - (known.get(bound) ?? 0)]);
}
function merge(lists) {
  const sums = new Map();
  for (const [bound, number] of lists.flat()) sums.set(bound, (sums.get(bound) ?? 0) + number);
  return [...sums].sort((a, b) => a[0] - b[0]);
}
const sum = (list, value) => list.reduce((total, one) => total + value(one), 0);
function sample(old, now, seconds, time) {
  const continues = old && old.success <= now.success && old.executions <= now.executions;
  const before = continues ? old : { success: 0, failure: 0, inferences: 0, executions: 0, latency: [], first_token: [], inter_token: [], instances: [] };
  const executions = now.executions - before.executions;
  const earlier = new Map(before.instances.map((one) => [one.name, one]));
  return {
    time,
    rate: (now.success - before.success) / seconds,
    failures: Math.max(0, now.failure - before.failure) / seconds,
    pending: now.pending,
    running: now.in_flight - now.pending,
    executions,
    inferences: now.inferences - before.inferences,
    latency: increase(before.latency, now.latency),
    first: increase(before.first_token, now.first_token),
    between: increase(before.inter_token, now.inter_token),
    restarts: sum(now.instances, (one) => one.restarts),
    memory: sum(now.instances, (one) => one.resident_bytes),
    instances: now.instances.map((one) => {
      const busy = one.busy_us - (earlier.get(one.name)?.busy_us ?? 0);
      return { name: one.name, busy: Math.max(0, busy) / seconds / 1e4, memory: one.resident_bytes, restarts: one.restarts };
    }),
  };
}
function finish(values) {
  values.batch = values.executions ? values.inferences / values.executions : NaN;
  values.p50 = quantile(values.latency, 0.5);
  values.p99 = quantile(values.latency, 0.99);
  values.first50 = quantile(values.first, 0.5, true);
  values.first99 = quantile(values.first, 0.99, true);
  values.between50 = quantile(values.between, 0.5, true);
  values.between99 = quantile(values.between, 0.99, true);
  for (const name of ["latency", "first", "between"]) delete values[name]; // not kept for ten minutes
  return values;
}
function total(samples, overview, time) {
  const whole = { time, instances: [] };
  for (const name of ["rate", "failures", "pending", "running", "executions", "inferences", "restarts", "memory"]) {
    whole[name] = sum(samples, (one) => one[name]);
  }
  for (const name of ["latency", "first", "between"]) whole[name] = merge(samples.map((one) => one[name]));
  whole.server = overview.resident_bytes;
  return whole;
}

let overview = null, index = [], polls = 0, timer = 0, paused = false, asking = false;
const history = new Map(); // samples by model
let all = []; // samples of all models together
function record(now) {
  const before = overview && overview.uptime_seconds < now.uptime_seconds ? overview : null;
  if (overview && !before && overview.uptime_seconds === now.uptime_seconds) return; // the same numbers again
  if (overview && !before) { // the server has started again
    history.clear();
    all = [];
  }
  const seconds = Math.max(now.uptime_seconds - (before?.uptime_seconds ?? 0), 0.001);
  const earlier = new Map(before?.models.map((model) => [keyOf(model), model]));
  const time = now.uptime_seconds;
  const samples = now.models.map((model) => sample(earlier.get(keyOf(model)), model, seconds, time));
  const whole = finish(total(samples, now, time));
  whole.cpu = before ? (now.cpu_seconds - before.cpu_seconds) / seconds * 100 : NaN;
  all.push(whole);
  if (all.length > KEPT) all.shift();
  const present = new Set();
  now.models.forEach((model, at) => {
    const key = keyOf(model);
    present.add(key);
    if (!history.has(key)) history.set(key, []);
    const known = history.get(key);
    known.push(finish(samples[at]));
    if (known.length > KEPT) known.shift();
  });
  for (const key of history.keys()) if (!present.has(key)) history.delete(key);
  overview = now;
}

// The table
const serving = (model) => model.instances.filter((one) => one.state === "serving").length;
const COLUMNS = [
  ["Model", "", (row) => row.name.toLowerCase(), null],
  ["State", "text rare", (row) => row.model.state, (row) => row.model.state],
  ["Inst.", "", (row) => serving(row.model), (row) => (row.last ? `${serving(row.model)}/${row.model.instances.length}` : "")],
  ["Req/s", "", (row) => row.last?.rate ?? -1, (row) => rate(row.last?.rate)],
  ["Fail/s", "rare", (row) => row.last?.failures ?? -1, (row) => rate(row.last?.failures)],
  ["p50", "rare", (row) => row.last?.p50 || -1, (row) => duration(row.last?.p50)],
  ["p99", "", (row) => row.last?.p99 || -1, (row) => duration(row.last?.p99)],
  ["Queue", "", (row) => row.last?.pending ?? -1, (row) => count(row.last?.pending)],
  ["Batch", "rare", (row) => row.last?.batch || -1, (row) => rate(row.last?.batch)],
  ["Memory", "rare", (row) => row.last?.memory ?? -1, (row) => bytes(row.last?.memory)],
  ["Restarts", "rare", (row) => row.last?.restarts ?? -1, (row) => count(row.last?.restarts)],
];
let sorted = 0, descending = false;
const rows = new Map(); // table rows by model
const failed = (model) => !["READY", "LOADING"].includes(model.state) && Boolean(model.reason) && model.reason !== "unloaded";
const shownName = (model) => `${model.namespace ? `${model.namespace}/` : ""}${model.name}${model.version ? `:${model.version}` : ""}`;
const place = (model) => `#${encodeURIComponent(keyOf(model))}`;
COLUMNS.forEach(([title, kind], at) => {
  const button = make("button", { type: "button" }, title);
  button.addEventListener("click", () => {
    descending = sorted === at ? !descending : at > 1;
    sorted = at;
    list();
  });
  byId("titles").append(make("th", { scope: "col", className: kind }, button));
});
function describe() {
  const known = new Set(overview.models.map((model) => model.name));
  const others = index.filter((entry) => !known.has(entry.name)).map((entry) => (
    { name: entry.name, namespace: "", version: 0, state: entry.state ?? "not loaded", reason: entry.reason ?? "", instances: [], absent: true }
  ));
  return [...overview.models, ...others].map((model) => (
    { model, key: keyOf(model), name: shownName(model), last: model.instances.length || model.state === "READY" ? history.get(keyOf(model))?.at(-1) : null }
  ));
}
function list() {
  const value = COLUMNS[sorted][2];
  const found = describe().sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    const order = one < other ? -1 : one > other ? 1 : 0;
    return (descending ? -order : order) || (a.name < b.name ? -1 : 1);
  });
  [...byId("titles").children].forEach((title, at) => {
    title.setAttribute("aria-sort", at === sorted ? (descending ? "descending" : "ascending") : "none");
  });
  const text = byId("search").value.trim().toLowerCase();
  const body = byId("models").tBodies[0];
  let visible = 0;
  found.forEach((row, at) => {
    let line = rows.get(row.key);
    if (!line) {
      line = make("tr", {}, make("td", {}, make("a", { href: place(row.model) }, row.name), make("span", { className: "reason" })), ...COLUMNS.slice(1).map(([, kind]) => make("td", { className: kind })));
      rows.set(row.key, line);
    }
    if (body.children[at] !== line) body.insertBefore(line, body.children[at] ?? null);
    line.hidden = !row.name.toLowerCase().includes(text);
    visible += !line.hidden;
    line.className = row.model.state === "READY" ? "" : "gone";
    line.setAttribute("aria-selected", String(row.key === chosen));
    put(line.cells[0].lastChild, row.model.reason.slice(0, 300));
    line.cells[0].lastChild.className = failed(row.model) ? "reason bad" : "reason";
    COLUMNS.forEach(([, , , format], column) => {
      if (format && !line.hidden) put(line.cells[column], format(row));
    });
    const troubled = row.last && serving(row.model) < row.model.instances.length;
    line.cells[1].className = `text rare ${failed(row.model) ? "bad" : row.model.state === "READY" ? "good" : ""}`;
    line.cells[2].className = troubled ? "bad" : "";
  });
  const present = new Set(found.map((row) => row.key));
  for (const [key, line] of rows) {
    if (present.has(key)) continue;
    line.remove();
    rows.delete(key);
  }
  put(byId("count"), visible === found.length ? `${found.length}` : `${visible} of ${found.length}`);
}
byId("search").addEventListener("input", () => overview && list());

// The plots
const lines = (...series) => () => series;
const perInstance = (value) => (samples) => {
  const names = samples.at(-1)?.instances.map((one) => one.name) ?? [];
  const shown = names.slice(0, 8).map((name) => [name, (one) => value(one.instances.find((known) => known.name === name))]);
  return shown;
};
const PLOTS = [
  ["Requests per second", rate, lines(["answered", (one) => one.rate], ["failed", (one) => one.failures])],
  ["Latency", duration, lines(["p50", (one) => one.p50], ["p99", (one) => one.p99])],
  ["Queue", count, lines(["waiting", (one) => one.pending], ["running", (one) => one.running])],
  ["Batch size", rate, lines(["mean", (one) => one.batch])],
  ["Time to first token", duration, lines(["p50", (one) => one.first50], ["p99", (one) => one.first99]), (one) => one.first50],
  ["Time between tokens", duration, lines(["p50", (one) => one.between50], ["p99", (one) => one.between99]), (one) => one.between50],
  ["Memory", bytes, (samples) => (chosen ? perInstance((one) => one?.memory)(samples) : [["models", (one) => one.memory], ["server", (one) => one.server]])],
  ["Busy", percent, perInstance((one) => one?.busy), (one) => one.instances[0]?.busy],
  ["Server CPU", percent, lines(["of one core", (one) => one.cpu]), (one) => one.cpu],
  ["Restarts", count, (samples) => (chosen ? perInstance((one) => one?.restarts)(samples) : [["all models", (one) => one.restarts]])],
];
function nice(largest, whole) {
  if (!(largest > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(largest));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= largest) * power;
  return whole ? Math.max(1, step) : step;
}
class Plot {
  constructor([title, format, series, needed]) {
    Object.assign(this, { title, format, series, needed, at: -1 });
    this.legend = make("span", { className: "legend" });
    this.picture = draw("svg", { role: "img", tabindex: "0" });
    this.element = make("figure", {}, make("figcaption", {}, make("h3", {}, title), this.legend), this.picture);
    this.picture.addEventListener("pointermove", (event) => {
      const box = this.picture.getBoundingClientRect();
      point(this.nearest((event.clientX - box.left) / box.width));
    });
    this.picture.addEventListener("pointerleave", () => point(-1));
    this.picture.addEventListener("blur", () => point(-1));
    this.picture.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const last = samples().length - 1;
      point(Math.min(last, Math.max(0, (pointed < 0 ? last + (step < 0 ? 1 : 0) : pointed) + step)));
    });
  }
  nearest(share) {
    const known = samples(), [first, length] = span(known);
    const time = first + share * length;
    let best = -1;
    known.forEach((one, at) => { if (best < 0 || Math.abs(one.time - time) < Math.abs(known[best].time - time)) best = at; });
    return best;
  }
  update(known) {
    this.element.hidden = !known.length || Boolean(this.needed && !known.some((one) => this.needed(one) >= 0));
    if (this.element.hidden) return;
    const series = this.series(known);
    const [width, height, low] = [this.picture.clientWidth || 300, this.picture.clientHeight || 136, 16];
    const [first, length] = span(known);
    const values = series.map(([, value]) => known.map(value));
    const unit = this.format === bytes ? 2 ** 20 : 1;
    const largest = Math.max(0, ...values.flat().filter(Number.isFinite)) * 1.05; // the line stays below the edge
    const top = unit * nice(largest / unit, this.format === count);
    const x = (time) => (time - first) / length * width;
    const y = (value) => low + (1 - value / top) * (height - low - 2);
    const parts = [0, 0.5, 1].map((share) => draw("line", { class: "grid", x1: 0, x2: width, y1: y(top * share), y2: y(top * share) }));
    parts.push(draw("text", { x: 0, y: 11 }, this.format(top)));
    const ago = draw("text", { x: width, y: 11, "text-anchor": "end" }, `last ${length >= 120 ? `${Math.round(length / 60)} min` : `${Math.round(length)} s`}`);
    parts.push(ago);
    values.forEach((line, at) => {
      let path = "", open = false;
      line.forEach((value, place) => {
        const there = Number.isFinite(value);
        if (there) path += `${open ? "L" : "M"}${x(known[place].time).toFixed(1)} ${y(value).toFixed(1)}`;
        if (there && !open && !Number.isFinite(line[place + 1])) path += "h0.01"; // a single one is a dot
        open = there;
      });
      parts.push(draw("path", { class: `s${at}`, d: path, "stroke-linecap": "round" }));
    });
    const place = pointed >= 0 && pointed < known.length ? pointed : known.length - 1;
    if (pointed >= 0) parts.push(draw("line", { class: "cursor", x1: x(known[place].time), x2: x(known[place].time), y1: low, y2: height }));
    this.picture.replaceChildren(...parts);
    const texts = series.map(([name], at) => `${name} ${this.format(values[at][place])}`);
    if (pointed >= 0) texts.push(`${Math.round(known.at(-1).time - known[place].time)} s ago`);
    this.picture.setAttribute("aria-label", `${this.title}: ${texts.join(", ")}`);
    this.legend.replaceChildren(...texts.map((text, at) => make("span", {}, ...(at < series.length ? [make("i", { className: `s${at}` })] : []), text)));
  }
}
let chosen = "", pointed = -1; // the model and the sample that are shown
const plots = PLOTS.map((plot) => new Plot(plot));
byId("plots").append(...plots.map((plot) => plot.element));
const samples = () => (chosen ? history.get(chosen) ?? [] : all);
function span(known) {
  const last = known.at(-1)?.time ?? 0;
  const length = Math.max(SHORTEST, last - (known[0]?.time ?? 0));
  return [last - length, length];
}
function point(at) {
  if (pointed === at) return;
  pointed = at;
  plots.forEach((plot) => plot.update(samples()));
}
new ResizeObserver(() => plots.forEach((plot) => plot.update(samples()))).observe(byId("plots"));

function showTiles() {
  const last = all.at(-1);
  const tiles = {
    "Requests/s": rate(last.rate), "Failed/s": rate(last.failures), "p99": duration(last.p99), "Waiting": count(last.pending),
    "Model memory": bytes(last.memory), "Server memory": bytes(last.server), "Server CPU": percent(last.cpu), "Restarts": count(last.restarts),
  };
  const known = byId("tiles");
  if (!known.children.length) known.append(...Object.keys(tiles).map((name) => make("div", {}, make("dt", {}, name), make("dd", {}))));
  Object.values(tiles).forEach((text, at) => put(known.children[at].lastChild, text));
}
// A load or reload may give the chosen model another version.
function follow() {
  if (!chosen || !overview) return;
  const known = describe();
  if (known.some((row) => row.key === chosen)) return;
  const [namespace, name] = parts(chosen);
  const row = known.findLast(({ model }) => model.name === name && model.namespace === namespace);
  if (!row) return;
  chosen = row.key;
  window.history.replaceState(null, "", place(row.model));
}
function parts(key) {
  try {
    return JSON.parse(key);
  } catch { // not an address of this page
    return [];
  }
}
function showModel() {
  const row = describe().find((one) => one.key === chosen);
  const model = row?.model;
  put(byId("chosen"), model ? row.name : chosen ? "This model is gone" : "All models");
  put(byId("state"), model ? `${model.state}${model.reason ? `: ${model.reason.slice(0, 500)}` : ""}` : "");
  byId("state").className = model && failed(model) ? "bad" : "quiet";
  byId("all").hidden = !chosen;
  byId("load").hidden = byId("unload").hidden = !(model && overview.model_control);
  put(byId("load"), model?.state === "READY" ? "Reload" : "Load");
  byId("unload").disabled = controlling || model?.state !== "READY";
  byId("load").disabled = controlling;
  const known = samples();
  plots.forEach((plot) => plot.update(row && !row.last ? [] : known));
  showInstances(model, known.at(-1));
}
const INSTANCE_TITLES = ["Instance", "State", "Process", "Busy", "Memory", "Restarts"];
function showInstances(model, last) {
  const shown = byId("instances");
  shown.hidden = !model?.instances.length;
  if (shown.hidden) return;
  if (!shown.firstChild) {
    const titles = INSTANCE_TITLES.map((title, at) => make("th", { scope: "col", className: at === 1 ? "text" : at === 2 ? "rare" : "" }, title));
    shown.append(make("table", {}, make("thead", {}, make("tr", {}, ...titles)), make("tbody")));
  }
  const body = shown.firstChild.tBodies[0];
  while (body.rows.length > model.instances.length) body.lastChild.remove();
  model.instances.forEach((one, at) => {
    const line = body.rows[at] ?? body.appendChild(make("tr", {}, ...INSTANCE_TITLES.map(() => make("td"))));
    const busy = last?.instances.find((known) => known.name === one.name)?.busy;
    [one.name, one.state, String(one.pid), percent(busy), bytes(one.resident_bytes), count(one.restarts)].forEach((text, cell) => put(line.cells[cell], text));
    line.cells[2].className = "rare";
    line.cells[1].className = `text ${one.state === "serving" ? "good" : "bad"}`;
  });
}
function choose() {
  try {
    chosen = decodeURIComponent(location.hash.slice(1));
  } catch { // not an address of this page
    chosen = "";
  }
  pointed = -1;
  byId("control").textContent = "";
  if (!overview) return;
  follow();
  list();
  showModel();
}
addEventListener("hashchange", choose);

// Load and unload
let controlling = false;
async function control(verb) {
  const model = describe().find((one) => one.key === chosen)?.model;
  if (!model || controlling) return;
  if (verb === "unload" && !confirm(`Unload ${shownName(model)}? Its clients will be refused.`)) return;
  controlling = true;
  const said = byId("control");
  said.className = "quiet";
  said.textContent = verb === "load" ? "Loading…" : "Unloading…";
  showModel();
  try {
    await ask(`/v2/repository/models/${encodeURIComponent(model.name)}/${verb}`, { method: "POST", body: "{}" });
    said.textContent = verb === "load" ? "Loaded." : "Unloading has begun.";
  } catch (error) {
    said.className = "bad";
    said.textContent = error.message;
  } finally {
    controlling = false;
    await readIndex();
    await poll();
  }
}
byId("load").addEventListener("click", () => control("load"));
byId("unload").addEventListener("click", () => control("unload"));
async function readIndex() {
  try {
    index = await ask("/v2/repository/index", { method: "POST", body: "{}" });
  } catch (error) {
    index = []; // then models that were never loaded are missing; the others have what they need
    if (!error.missingKey) byId("control").textContent = error.message;
  }
}

// Crashes
let crashIds = "";
async function pollCrashes() {
  const note = byId("crash-note");
  let crashes;
  try {
    ({ crashes } = await ask("/v2/crashes"));
  } catch (error) {
    put(note, error.message);
    return;
  }
  put(note, crashes.length ? "The newest first." : "No process of a model has died.");
  const ids = crashes.map((one) => one.id).join();
  if (ids === crashIds) return;
  crashIds = ids;
  const open = new Set([...byId("crashes").querySelectorAll("details[open]")].map((one) => one.dataset.id));
  byId("crashes").replaceChildren(...crashes.map((one) => crash(one, open.has(one.id))));
}
function crash(one, open) {
  const element = crashDetails(`${new Date(one.time).toLocaleString()} · ${one.model}${one.version ? `:${one.version}` : ""} · ${one.instance} · `, one);
  element.dataset.id = one.id;
  element.open = open;
  return element;
}

// The quarantine
const QUARANTINE_NOTE = byId("quarantine-note").textContent;
let quarantineText = "";
async function pollQuarantine() {
  let requests = [];
  try {
    ({ requests } = await ask("/v2/quarantine"));
  } catch { /* the note of the crashes, which have the same category, says why */ }
  const text = JSON.stringify(requests);
  if (text === quarantineText) return;
  quarantineText = text;
  byId("quarantine").hidden = !requests.length;
  byId("quarantine").querySelector("ul").replaceChildren(...requests.map((one) => {
    const title = `${one.model}:${one.version} · ${one.request.id || "without an id"} · ${inputsOf(one.request)} · until ${new Date(one.until).toLocaleTimeString()} · crashes ${one.crashes.join(", ")}`;
    const button = make("button", { type: "button", "aria-label": `Lift the quarantine of ${one.model}` }, "Lift");
    button.addEventListener("click", () => lift(one.model));
    return make("li", {}, make("span", {}, title), button);
  }));
}
async function lift(model) {
  const note = byId("quarantine-note");
  try {
    if (!(await liftQuarantine(model))) return;
    put(note, QUARANTINE_NOTE);
    note.className = "quiet";
  } catch (error) {
    put(note, error.message);
    note.className = "bad";
  }
  await pollQuarantine();
}
// The log
let lastLine = 0;
function matches(line) {
  return line.textContent.toLowerCase().includes(byId("filter").value.trim().toLowerCase());
}
function levelOf(text) {
  const letter = /^([EWI])\d{4} |^\S+Z ([EWI]) |"level":"([EWI])/.exec(text);
  return { E: "bad", W: "warn" }[letter?.[1] ?? letter?.[2] ?? letter?.[3]] ?? "";
}
async function pollLog() {
  let found;
  try {
    found = await ask(`/v2/logging/lines?after=${lastLine}`);
  } catch (error) {
    put(byId("log-note"), error.message);
    return;
  }
  put(byId("log-note"), "");
  if (found.last < lastLine) byId("lines").replaceChildren(); // of the server before
  const shown = byId("lines");
  if (found.missed && lastLine) shown.append(make("div", { className: "warn" }, `… ${found.missed} lines were missed`));
  lastLine = found.last;
  shown.append(...found.lines.map((text) => {
    const line = make("div", { className: levelOf(text) }, text);
    line.hidden = !matches(line);
    return line;
  }));
  while (shown.children.length > MAX_LINES) shown.firstChild.remove();
  if (found.lines.length && byId("follow").checked) shown.scrollTop = shown.scrollHeight;
}
byId("filter").addEventListener("input", () => {
  for (const line of byId("lines").children) line.hidden = !matches(line);
});

// Polling: only while somebody can see the page
async function poll() {
  if (asking) return;
  asking = true;
  stop();
  try {
    const first = polls === 0;
    if (first) await readIndex();
    record(await ask("/v2/overview"));
    byId("trouble").hidden = true;
    put(byId("title"), `pbhost: ${overview.name}`);
    put(byId("about"), `version ${overview.version} · up ${uptime(overview.uptime_seconds)}`);
    document.title = `${overview.name}: dashboard`;
    showTiles();
    follow();
    list();
    showModel();
  } catch (error) {
    put(byId("trouble"), error.message);
    byId("trouble").hidden = false;
  }
  await pollLog();
  if (polls % CRASH_POLLS === 0) {
    await pollCrashes();
    await pollQuarantine();
  }
  polls += 1;
  asking = false;
  schedule();
}
function schedule() {
  stop();
  if (!paused && !document.hidden) timer = setTimeout(poll, INTERVAL);
}
function stop() {
  clearTimeout(timer);
  timer = 0;
}
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Continue" : "Pause";
  if (!paused) poll();
  else stop();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stop();
  else if (!paused) poll();
});
choose();
poll();
