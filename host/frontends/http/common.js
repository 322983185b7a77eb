"use strict"; // what the pages have in common; it comes before the script of each
/* eslint-disable no-unused-vars -- the scripts of the pages use these */
const API_KEY = "API key"; // the name of its field; it is sent as Authorization
const keys = new Map(); // headers for restricted APIs
const byId = (id) => document.getElementById(id);
const url = (path) => new URL(`.${path}`, document.baseURI).href;

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Requests
function errorOf(text, status) {
  try {
    const error = JSON.parse(text).error;
    return error?.message ?? error ?? text; // the OpenAI routes send an object
  } catch {
    return text || `The response with status ${status} is empty.`;
  }
}
let onMissingKey = () => {}; // called with the name of a header that a request needs
// Returns the JSON of a response. Throws an Error; `missingKey` tells that a key may help.
async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(url(path), { cache: "no-store", ...options, headers: Object.fromEntries(keys) });
  } catch {
    throw new Error("The server does not answer.");
  }
  const text = await response.text();
  if (response.ok) return text ? JSON.parse(text) : null;
  const error = new Error(errorOf(text, response.status));
  const header = response.status === 401 ? API_KEY : response.status === 403 && /expecting header '(.*)'$/.exec(error.message)?.[1];
  error.missingKey = Boolean(header);
  if (header) onMissingKey(header);
  throw error;
}
function keyField(name, id) {
  const field = make("input", { id, name, type: "password", autocomplete: "off" });
  field.value = name === API_KEY ? (keys.get("Authorization") ?? "").replace(/^Bearer /, "") : keys.get(name) ?? "";
  return make("div", { className: "field" }, make("label", { htmlFor: id }, name), field);
}
// Takes the keys that the user has entered, and calls `use`.
function onKeys(use) {
  byId("keyform").addEventListener("submit", (event) => {
    event.preventDefault();
    for (const field of byId("keyfields").querySelectorAll("input")) {
      const [name, value] = field.name === API_KEY ? ["Authorization", `Bearer ${field.value}`] : [field.name, field.value];
      if (field.value) keys.set(name, value);
      else keys.delete(name);
    }
    use();
  });
}

// Without `wide`, the buckets are so narrow that their bounds are good quantiles.
function quantile(buckets, share, wide = false) {
  const rank = share * buckets.reduce((sum, [, number]) => sum + number, 0);
  let below = 0, least = 0;
  for (const [bound, number] of buckets) {
    if (number && below + number >= rank) return wide ? least + (bound - least) * (rank - below) / number : bound;
    below += number;
    least = bound;
  }
  return NaN;
}

// Crashes
const inputsOf = (request) => request.inputs.map((input) => `${input.name} ${input.datatype} [${input.shape}]`).join(", ");
async function describeTensors(id) {
  let requests;
  try {
    ({ requests } = await ask(`/v2/crashes/${encodeURIComponent(id)}/requests`));
  } catch (error) {
    return error.message;
  }
  return requests.flatMap((request) => [
    `Request ${request.id || "without an id"}`, ...(Object.keys(request.parameters).length ? [`Parameters ${JSON.stringify(request.parameters)}`] : []),
    ...request.inputs.map((input) => `${input.name} ${input.datatype} [${input.shape}], ${input.size} bytes:\n${input.text}`),
  ]).join("\n");
}
function describeCrash(record) {
  const requests = record.requests.map((one) => `  ${one.id || "without an id"}: ${inputsOf(one)}`);
  const parts = [`Process ${record.pid}, during: ${record.phase}`];
  if (record.signal) parts.push(`Signal: ${record.signal}`);
  else if (record.status !== null) parts.push(`Exit status: ${record.status}`);
  if (record.request_count) parts.push(`Requests (${record.request_count}):`, ...requests);
  if (record.stacks.length) parts.push("", "Stacks:", ...record.stacks);
  if (record.output.length) parts.push("", "Last output:", ...record.output);
  return parts.join("\n");
}
// Returns a crash by its summary; its record is read when it is opened.
function crashDetails(title, one) {
  const element = make("details", { className: "crash" }, make("summary", {}, title, make("span", { className: "bad" }, one.reason)));
  element.addEventListener("toggle", async () => {
    if (!element.open || element.children.length > 1) return;
    const text = element.appendChild(make("pre", { tabIndex: 0, "aria-label": "Record of the crash" }, "Loading…"));
    try {
      const record = await ask(`/v2/crashes/${encodeURIComponent(one.id)}`);
      text.textContent = describeCrash(record);
      if (record.recorded_requests) element.append(make("pre", { tabIndex: 0, className: "tensors", "aria-label": "Tensors of its requests" }, await describeTensors(one.id)));
    } catch (error) {
      text.textContent = error.message;
    }
  });
  return element;
}
// Accepts the requests to a model again. Returns whether the user wants that.
async function liftQuarantine(model) {
  if (!confirm(`Accept the requests to ${model} again that ended its processes?`)) return false;
  await ask("/v2/quarantine/lift", { method: "POST", body: JSON.stringify({ model }) });
  return true;
}
