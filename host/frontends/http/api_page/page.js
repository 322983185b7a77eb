"use strict";
const MAX_SHOWN = 2000; // displayed elements of a tensor
const MAX_RESPONSES = 500; // displayed responses of a stream
const AS_BYTES = ["FP16", "BF16"]; // data types without a JSON form
const MAX_PICTURES = 16; // displayed pictures of a response
const OVERVIEW_LIFE = 600; // milliseconds after which the server collects its numbers again
let api = { "x-models": [] };
let index = [];
let crashes = []; // summaries of all crashes
let quarantine = []; // requests that are refused as they ended processes
let overview = { models: [] };

// JavaScript cannot parse NaN, Infinity, and integers that do not fit a double. They become strings
// with a prefix that no other string has.
const MARK = "\u0000";
function parse(text) {
  const token = /"(?:[^"\\]|\\.)*"|-?(?:Infinity|Inf|NaN)|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?/g;
  const odd = /^-?(?:I|N|\d{16,}$)/;
  return JSON.parse(text.replace(token, (found) => (odd.test(found) ? `"\\u0000${found}"` : found)));
}
function written(value) {
  if (value instanceof Uint8Array) return `<${value.length} bytes>`;
  if (Array.isArray(value)) return `[${value.map(written).join(", ")}]`;
  if (typeof value === "string" && value[0] === MARK) return value.slice(1);
  return JSON.stringify(value);
}
function number(value) {
  if (typeof value !== "string") return Number(value);
  return Number(value.slice(1).replace(/Inf$/, "Infinity"));
}

function shapeOf(value) {
  const shape = [];
  for (let part = value; Array.isArray(part); part = part[0]) shape.push(part.length);
  return shape;
}
function filled(shape, value) {
  return shape.reduceRight((inner, dim) => Array(dim < 0 ? 1 : dim).fill(inner), value);
}
function example(input) {
  const one = { BOOL: true, BYTES: "text" }[input.datatype] ?? 1;
  return written(filled(input.shape, one));
}
function nested(values, shape) {
  let whole = values;
  for (const dim of shape.slice(1).reverse()) {
    if (!dim) break;
    const rows = [];
    for (let at = 0; at < whole.length; at += dim) rows.push(whole.slice(at, at + dim));
    whole = rows;
  }
  return whole;
}
function shown(values, shape) {
  const rest = values.length - MAX_SHOWN;
  if (rest > 0) return `${written(values.slice(0, MAX_SHOWN))}\n… and ${rest} more`;
  return written(nested(values, shape));
}

function toBytes(datatype, values) {
  const view = new DataView(new ArrayBuffer(2 * values.length));
  values.forEach((value, at) => {
    if (datatype === "FP16") return view.setFloat16(2 * at, number(value), true);
    const wide = new DataView(new ArrayBuffer(4));
    wide.setFloat32(0, number(value));
    const bits = wide.getUint32(0);
    const rounded = bits + 0x7fff + ((bits >>> 16) & 1); // round to nearest, ties to even
    view.setUint16(2 * at, Number.isNaN(number(value)) ? 0x7fc0 : rounded >>> 16, true);
  });
  return new Uint8Array(view.buffer);
}
// Returns texts; an element that is no text stays a Uint8Array.
function elementsOf(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const elements = [];
  for (let at = 0; at < bytes.length;) {
    const size = view.getUint32(at, true);
    const element = bytes.subarray(at + 4, (at += 4 + size));
    try {
      elements.push(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(element));
    } catch {
      elements.push(element);
    }
  }
  return elements;
}
// Bytes of BYTES elements, as pieces of a body; a file is a piece of its own.
function elementPieces(files) {
  return files.flatMap((file) => {
    const size = new Uint8Array(4);
    new DataView(size.buffer).setUint32(0, file.bytes.length, true);
    return [{ bytes: size }, file];
  });
}
// The first free dimension has as many elements as there are files.
function shapeOfFiles(shape, count) {
  const free = shape.indexOf(-1);
  return shape.map((dim, at) => (at === free ? count : dim === -1 ? 1 : dim));
}
function fromBytes(datatype, bytes) {
  if (datatype === "BYTES") return elementsOf(bytes);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Array.from({ length: bytes.byteLength >> 1 }, (_, at) => {
    let value;
    if (datatype === "FP16") value = view.getFloat16(2 * at, true);
    else {
      const wide = new DataView(new ArrayBuffer(4));
      wide.setUint16(0, view.getUint16(2 * at, true));
      value = wide.getFloat32(0);
    }
    return Number.isFinite(value) ? value : MARK + value;
  });
}

// Pictures: files of images in BYTES, and UINT8 tensors of height, width and colours.
const IMAGES = [["image/png", [0x89, 0x50, 0x4e, 0x47]], ["image/jpeg", [0xff, 0xd8, 0xff]], ["image/gif", [0x47, 0x49, 0x46, 0x38]], ["image/webp", [0x52, 0x49, 0x46, 0x46]], ["image/bmp", [0x42, 0x4d]]];
function imageOf(bytes, caption) {
  const kind = IMAGES.find(([, magic]) => magic.every((byte, at) => bytes[at] === byte))?.[0];
  if (!kind) return null;
  const address = URL.createObjectURL(new Blob([bytes], { type: kind }));
  const image = make("img", { alt: caption, src: address });
  image.addEventListener("load", () => URL.revokeObjectURL(address));
  image.addEventListener("error", () => image.closest("figure")?.remove()); // it only looked like one
  return make("figure", {}, image, make("figcaption", {}, caption));
}
function canvasOf(values, shape, caption) {
  const dims = shape.length === 4 && shape[0] === 1 ? shape.slice(1) : shape;
  if (dims.length !== 3) return null;
  const last = [1, 3, 4].includes(dims[2]);
  if (!last && ![1, 3].includes(dims[0])) return null;
  const [height, width, colours] = last ? dims : [dims[1], dims[2], dims[0]];
  if (Math.min(height, width) < 8 || values.length !== height * width * colours) return null;
  const pixels = new ImageData(width, height);
  for (let pixel = 0; pixel < height * width; pixel += 1) {
    for (let colour = 0; colour < 4; colour += 1) {
      const from = colours === 1 ? 0 : colour;
      const place = last ? pixel * colours + from : from * height * width + pixel;
      pixels.data[4 * pixel + colour] = colour === 3 && colours < 4 ? 255 : values[place];
    }
  }
  const canvas = make("canvas", { width, height, role: "img", "aria-label": caption });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return make("figure", {}, canvas, make("figcaption", {}, caption));
}
function pictures(tensors) {
  const found = tensors.flatMap(({ name, datatype, shape, values }) => {
    if (datatype === "UINT8") return [canvasOf(values, shape, name)];
    if (datatype !== "BYTES") return [];
    return values.slice(0, MAX_PICTURES).map((value, at) => (value instanceof Uint8Array ? imageOf(value, values.length > 1 ? `${name}, element ${at}` : name) : null));
  });
  return make("div", { className: "pictures" }, ...found.filter(Boolean).slice(0, MAX_PICTURES));
}

// Returns a request { path, head, tail, headers }: head is the JSON text, tail the pieces of binary
// data after it. With `toShow`, texts are asked for as bytes, since JSON has no form for other bytes.
function compose(model, fields, parameters, toShow = false) {
  const given = fields.filter(({ input, area, files }) => files.length || !input.optional || area.value.trim());
  const parsed = given.map(({ input, area, files }) => {
    if (files.length) return { input, files };
    try {
      return { input, text: area.value.trim(), value: parse(area.value) };
    } catch (error) {
      throw new Error(`${input.name} is not JSON: ${error.message}`);
    }
  });
  let extra = parameters.value.trim();
  if (extra) {
    try {
      parse(extra);
    } catch (error) {
      throw new Error(`The parameters are not JSON: ${error.message}`);
    }
  }
  const named = (name, text) => `${JSON.stringify(name)}:${text}`;
  const members = extra ? [named("parameters", extra)] : [];
  const headers = { "Content-Type": "application/json", ...Object.fromEntries(keys) };
  if (model.decoupled) {
    members.unshift(...parsed.map(({ input, text }) => named(input.name, text)));
    return { path: `${model.path}/generate_stream`, head: `{${members.join()}}`, tail: [], headers };
  }
  const tail = [];
  const inputs = parsed.map(({ input, text, value, files }) => {
    const shape = files ? shapeOfFiles(input.shape, files.length) : shapeOf(value);
    const head = `"name":${JSON.stringify(input.name)},"datatype":"${input.datatype}","shape":[${shape}]`;
    if (files) {
      const pieces = elementPieces(files);
      tail.push(...pieces);
      return `{${head},"parameters":{"binary_data_size":${pieces.reduce((size, piece) => size + piece.bytes.length, 0)}}}`;
    }
    if (!AS_BYTES.includes(input.datatype)) return `{${head},"data":${Array.isArray(value) ? text : `[${text}]`}}`;
    const bytes = toBytes(input.datatype, [value].flat(Infinity));
    tail.push({ bytes });
    return `{${head},"parameters":{"binary_data_size":${bytes.length}}}`;
  });
  members.unshift(`"inputs":[${inputs.join()}]`);
  const binary = toShow ? [...AS_BYTES, "BYTES"] : AS_BYTES;
  if (model.outputs.some((output) => binary.includes(output.datatype))) {
    const wanted = model.outputs.map(({ name, datatype }) => ({ name, parameters: { binary_data: binary.includes(datatype) } }));
    members.push(`"outputs":${JSON.stringify(wanted)}`);
  }
  const head = `{${members.join()}}`;
  if (tail.length) {
    headers["Content-Type"] = "application/octet-stream";
    headers["Inference-Header-Content-Length"] = String(new TextEncoder().encode(head).length);
  }
  return { path: `${model.path}/infer`, head, tail, headers };
}
function curl(request) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const options = Object.entries(request.headers).map(([name, value]) => ` \\\n  -H ${quote(`${name}: ${value}`)}`);
  const stream = request.path.endsWith("_stream") ? "-N " : "";
  const command = `curl -sS ${stream}${quote(url(request.path))}${options.join("")}`;
  if (!request.tail.length) return `${command} \\\n  --data-binary ${quote(request.head)}`;
  const octal = (bytes) => Array.from(bytes, (byte) => `\\${byte.toString(8).padStart(3, "0")}`).join("");
  const pieces = request.tail.map(({ name, bytes }) => (name === undefined ? `printf '${octal(bytes)}'` : `cat ${quote(`./${name}`)}`));
  return `{ printf '%s' ${quote(request.head)}; ${pieces.join("; ")}; } |\n  ${command} \\\n  --data-binary @-`;
}

const NUMPY = { BYTES: "object_", BOOL: "bool_", FP16: "float16", BF16: "float32", FP32: "float32", FP64: "float64" };
function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string" && value[0] === MARK && /[IN]/.test(value)) return `float("${value.slice(1)}")`;
  return written(value);
}
// Returns Python code that sends the same inputs with tritonclient.
function triton(model, fields) {
  const quote = (text) => JSON.stringify(text);
  const lines = ["import numpy as np", "import tritonclient.http as triton", ""];
  const [scheme, rest] = url("/").replace(/\/$/, "").split("://");
  lines.push(`client = triton.InferenceServerClient(${quote(rest)}${scheme === "https" ? ", ssl=True" : ""})`, "inputs = []");
  for (const { input, area, files } of fields) {
    if (input.optional && !area.value.trim() && !files.length) continue;
    const type = NUMPY[input.datatype] ?? input.datatype.toLowerCase();
    if (files.length) lines.push(`files = [open(name, "rb").read() for name in ${JSON.stringify(files.map((file) => file.name))}]`);
    const values = files.length ? "files" : literal(parse(area.value));
    const shape = files.length ? `.reshape([${shapeOfFiles(input.shape, files.length).join(", ")}])` : "";
    lines.push(`array = np.array(${values}, dtype=np.${type})${shape}`);
    lines.push(`tensor = triton.InferInput(${quote(input.name)}, array.shape, ${quote(input.datatype)})`, "tensor.set_data_from_numpy(array)", "inputs.append(tensor)");
  }
  const more = model.latest ? "" : `, model_version=${quote(model.version)}`;
  const headers = keys.size ? `, headers=${JSON.stringify(Object.fromEntries(keys))}` : "";
  lines.push(`result = client.infer(${quote(model.name)}, inputs${more}${headers})`);
  for (const output of model.outputs) lines.push(`print(result.as_numpy(${quote(output.name)}))`);
  return lines.join("\n");
}
// Returns a heading with a button that copies the text of `block`.
function heading(title, block) {
  const button = make("button", { type: "button", "aria-label": `Copy: ${title}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(block.textContent);
    } catch { // the clipboard needs https or localhost, and a permission
      getSelection().selectAllChildren(block);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return make("div", { className: "heading" }, make("h3", {}, title), button);
}

function tensorTable(title, tensors) {
  const rows = tensors.map((tensor) => {
    const name = tensor.name + (tensor.optional ? " (optional)" : "");
    const cells = [make("td", { className: "name" }, name), make("td", {}, tensor.datatype), make("td", {}, `[${tensor.shape.join(", ")}]`)];
    if ("values" in tensor) {
      const text = shown(tensor.values, tensor.shape);
      const long = text.length > 2000 ? { tabIndex: 0, role: "region", "aria-label": `Data of ${tensor.name}` } : {};
      cells.push(make("td", { className: "data" }, make("div", { className: "values", ...long }, text)));
    }
    return make("tr", {}, ...cells);
  });
  if (!rows.length) return [make("h3", {}, title), make("p", { className: "quiet" }, "None.")];
  const heads = ["Name", "Datatype", "Shape", ...("values" in tensors[0] ? ["Data"] : [])];
  return table(title, heads, make("tbody", {}, ...rows));
}
function table(title, heads, body) {
  const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text))));
  return [make("h3", {}, title), make("div", { className: "scroll" }, make("table", { "aria-label": title }, head, body))];
}

function flatTensors(model, answer) {
  const known = new Map(model.outputs.map((output) => [output.name, output]));
  return Object.entries(answer).filter(([name]) => known.has(name)).map(([name, value]) => {
    const values = [value].flat();
    return { name, datatype: known.get(name).datatype, shape: [values.length], values };
  });
}
function tensorsOf(head, tail) {
  let at = 0;
  return head.outputs.map((output) => {
    const size = output.parameters?.binary_data_size ?? 0;
    const values = output.data ?? fromBytes(output.datatype, tail.subarray(at, (at += size)));
    return { ...output, values };
  });
}

async function send(model, request, into, signal) {
  const body = new Blob([request.head, ...request.tail.map((piece) => piece.bytes)]);
  const begun = performance.now();
  const response = await fetch(url(request.path), { method: "POST", body, headers: request.headers, signal });
  const status = (bytes, more = "") => {
    into.status.className = response.ok ? "good" : "bad";
    into.status.textContent = `${response.status} ${response.statusText} · ${(performance.now() - begun).toFixed(1)} ms · ${bytes} bytes${more}`;
  };
  if (!response.ok) {
    const text = await response.text();
    status(text.length);
    throw new Error(errorOf(text, response.status));
  }
  if (model.decoupled) return receiveStream(model, response, into, status);
  const bytes = new Uint8Array(await response.arrayBuffer());
  status(bytes.length);
  const size = Number(response.headers.get("Inference-Header-Content-Length") ?? bytes.length);
  const text = new TextDecoder().decode(bytes.subarray(0, size));
  into.text.textContent = text.slice(0, 100000);
  into.raw.hidden = false;
  const tensors = tensorsOf(parse(text), bytes.subarray(size));
  into.outputs.append(pictures(tensors), ...tensorTable("Response", tensors));
}
async function receiveStream(model, response, into, status) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const rows = make("tbody");
  into.outputs.append(...table("Responses", ["Response", "Name", "Datatype", "Data"], rows));
  let rest = "", count = 0, size = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    size += value.length;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      count += 1;
      if (count > MAX_RESPONSES) continue; // counted, but not displayed
      const answer = parse(event.replace(/^data: /, ""));
      const cell = (text, kind = "") => make("td", { className: kind }, text);
      if (answer.error !== undefined) rows.append(make("tr", {}, cell(String(count)), cell("error", "bad"), cell(""), cell(answer.error, "data bad")));
      for (const { name, datatype, shape, values } of flatTensors(model, answer)) {
        rows.append(make("tr", {}, cell(String(count)), cell(name, "name"), cell(datatype), cell(shown(values, shape), "data")));
      }
    }
    status(size, ` · ${count} responses`);
  }
  status(size, count === 1 ? " · 1 response" : ` · ${count} responses`);
}

// Returns what lets a person give files instead of the JSON of a BYTES input.
function fileChooser(model, field) {
  const { input, area } = field;
  const chooser = make("input", { type: "file", multiple: true, "aria-label": `Files for ${input.name}` });
  const preview = make("div", { className: "pictures" });
  const problem = make("p", { className: "bad", role: "alert" });
  const remove = make("button", { type: "button", hidden: true, "aria-label": `Remove the files for ${input.name}` }, "Remove files");
  const use = async () => {
    const files = await Promise.all([...chooser.files].map(async (file) => ({ name: file.name, bytes: new Uint8Array(await file.arrayBuffer()) })));
    problem.textContent = "";
    if (model.decoupled && files.length) { // its requests are JSON, which has no form for other bytes
      try {
        const texts = files.map((file) => new TextDecoder("utf-8", { fatal: true }).decode(file.bytes));
        area.value = written(texts.length === 1 && !input.shape.some((dim) => dim !== 1) ? filled(input.shape, texts[0]) : texts);
      } catch {
        problem.textContent = "This file is not UTF-8 text, and a request of a decoupled model is JSON.";
      }
      chooser.value = "";
    } else {
      field.files = files;
      area.hidden = files.length > 0;
      remove.hidden = !files.length;
      preview.replaceChildren(...files.map((file) => {
        const caption = `${file.name}, ${file.bytes.length} bytes`;
        return imageOf(file.bytes, caption) ?? make("p", { className: "quiet" }, caption);
      }));
    }
    area.dispatchEvent(new Event("input", { bubbles: true }));
  };
  chooser.addEventListener("change", use);
  remove.addEventListener("click", () => {
    chooser.value = "";
    use();
  });
  return [preview, make("div", { className: "row wrap" }, chooser, remove), problem];
}
function form(model) {
  const fields = model.inputs.map((input, at) => {
    const text = input.optional ? "" : example(input);
    const area = make("textarea", { id: `input-${at}`, spellcheck: false, rows: text.length > 90 ? 4 : 2, value: text });
    if (input.optional) area.placeholder = `optional; for example ${example(input)}`.slice(0, 300);
    return { input, area, files: [] };
  });
  const wanted = Object.keys(model.parameters).length ? JSON.stringify(model.parameters) : "";
  const parameters = make("textarea", { id: "parameters", spellcheck: false, rows: 2, value: wanted });
  const command = make("pre", { id: "curl", tabIndex: 0, "aria-label": "The same with curl" });
  const python = make("pre", { id: "python", tabIndex: 0, "aria-label": "The same with tritonclient" });
  const sendButton = make("button", { className: "main", id: "send", type: "submit" }, "Send");
  const stop = make("button", { type: "button", id: "stop", disabled: true }, "Stop");
  const into = {
    status: make("span", { id: "status", role: "status" }),
    error: make("p", { id: "error", className: "bad", role: "alert" }),
    outputs: make("div", { id: "outputs" }),
    text: make("pre", { id: "text", tabIndex: 0 }),
  };
  into.raw = make("details", { hidden: true }, make("summary", {}, "Response body"), into.text);
  const refresh = () => {
    try {
      command.textContent = curl(compose(model, fields, parameters));
      python.textContent = triton(model, fields);
    } catch (error) {
      command.textContent = python.textContent = error.message;
    }
  };
  const rows = fields.map((field) => {
    const { input, area } = field;
    const kind = make("span", { className: "quiet" }, ` ${input.datatype} [${input.shape.join(", ")}]${input.optional ? ", optional" : ""}`);
    return make("div", { className: "field" }, make("label", { htmlFor: area.id }, input.name, kind), area,
      ...(input.datatype === "BYTES" ? fileChooser(model, field) : []));
  });
  rows.push(make("details", { open: Boolean(wanted) }, make("summary", {}, "Parameters"),
    make("div", { className: "field" }, make("label", { htmlFor: "parameters" }, "Parameters of the request", make("span", { className: "quiet" }, " a JSON object")), parameters)));
  let running = null;
  stop.addEventListener("click", () => running?.abort());
  const made = make("form", { id: "try", autocomplete: "off" }, ...rows, make("div", { className: "row" }, sendButton, stop, into.status));
  made.addEventListener("input", refresh);
  made.addEventListener("submit", async (event) => {
    event.preventDefault();
    into.outputs.replaceChildren();
    into.raw.hidden = true;
    into.error.textContent = into.status.textContent = "";
    running = new AbortController();
    sendButton.disabled = true;
    stop.disabled = false;
    try {
      await send(model, compose(model, fields, parameters, true), into, running.signal);
    } catch (error) {
      into.error.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    } finally {
      sendButton.disabled = false;
      stop.disabled = true;
    }
  });
  refresh();
  const how = model.decoupled ? "Enter values as JSON. This model sends any number of responses." : "Enter values as JSON arrays, nested like the shape. In a shape, -1 means any size.";
  return [
    make("section", {}, make("h3", {}, "Try it"), make("p", { className: "quiet field" }, how), made, into.error, into.outputs, into.raw),
    make("section", {}, heading("The same with curl", command), command),
    ...(model.decoupled || Object.keys(model.parameters).length ? [] : [make("section", {}, heading("The same with Python", python), python)]),
  ];
}

// The document names the models that speak chat.
function speaks(model, path) {
  const body = api.paths?.[path]?.post.requestBody;
  return model.latest && (body?.content["application/json"].schema.properties.model.enum ?? []).includes(model.name);
}
const speaksChat = (model) => speaks(model, "/v1/chat/completions");
const speaksOpenAI = (model) => speaksChat(model) || speaks(model, "/v1/completions");
async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
  }
}
let apiKey = ""; // only in the memory of this page
let leaveChat = () => {}; // cancels the answer of the displayed chat
function chatRequest(model, messages, limit) {
  const headers = { "Content-Type": "application/json", ...Object.fromEntries(keys) };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const fields = { model: model.name, messages, stream: true, stream_options: { include_usage: true } };
  if (limit) fields.max_tokens = Number(limit);
  return { method: "POST", headers, body: JSON.stringify(fields) };
}
// Joins the pieces of a streamed answer. `heard` gets the text and the figures so far.
async function receiveChat(model, options, heard) {
  const begun = performance.now();
  const response = await fetch(url("/v1/chat/completions"), options);
  if (!response.ok) {
    const error = new Error(errorOf(await response.text(), response.status));
    error.status = response.status;
    throw error;
  }
  let text = "", reasoning = "", chunks = 0, first = 0, usage = null, ended = false;
  const figures = () => {
    const seconds = (performance.now() - begun) / 1000;
    const [count, unit] = usage?.completion_tokens ? [usage.completion_tokens, "tokens"] : [chunks, "chunks"];
    return `${count} ${count === 1 ? unit.slice(0, -1) : unit} · ${(count / seconds).toFixed(1)} ${unit}/s · first after ${first.toFixed(1)} ms`;
  };
  for await (const event of serverSentEvents(response)) {
    if (event === "[DONE]") {
      ended = true;
      continue;
    }
    const chunk = JSON.parse(event);
    if (chunk.error) throw new Error(chunk.error.message ?? "The model failed.");
    usage = chunk.usage ?? usage;
    const delta = chunk.choices?.[0]?.delta ?? {};
    reasoning += delta.reasoning_content ?? "";
    text += delta.content ?? "";
    if (delta.content || delta.reasoning_content) {
      chunks += 1;
      first ||= performance.now() - begun;
    }
    if (chunks) heard({ text, reasoning, figures: figures() });
  }
  if (!ended) throw new Error("The connection closed before the answer was complete.");
}
function chatSection(model) {
  const messages = [];
  const field = (id, label, control, more = "") => make("div", { className: "field" },
    make("label", { htmlFor: id }, label, make("span", { className: "quiet" }, more)), control);
  const turns = make("div", { id: "turns", role: "log", tabIndex: 0, "aria-label": "Conversation", "aria-live": "polite" });
  const message = make("textarea", { id: "chat-message", rows: 2 });
  const system = make("textarea", { id: "chat-system", rows: 2 });
  const limit = make("input", { id: "chat-limit", type: "number", min: "1", step: "1" });
  const key = make("input", { id: "chat-key", type: "password", autocomplete: "off", value: apiKey });
  const options = make("details", { id: "chat-options" }, make("summary", {}, "Chat options"),
    field("chat-system", "System message", system, " optional"), field("chat-limit", "Maximum tokens", limit, " optional"),
    field("chat-key", "API key", key, " if the server wants one; this page does not store it"));
  const sendButton = make("button", { className: "main", type: "submit" }, "Send message");
  const stop = make("button", { type: "button", disabled: true }, "Stop answer");
  const clear = make("button", { type: "button" }, "New conversation");
  const error = make("p", { id: "chat-error", className: "bad", role: "alert" });
  const made = make("form", { id: "chat", autocomplete: "off" }, field("chat-message", "Message", message, " Enter sends, Shift+Enter starts a line"),
    make("div", { className: "row wrap" }, sendButton, stop, clear), options);
  let running = null;
  key.addEventListener("input", () => { apiKey = key.value; });
  leaveChat = () => running?.abort();
  stop.addEventListener("click", leaveChat);
  clear.addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    turns.replaceChildren();
    error.textContent = "";
    message.focus();
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    made.requestSubmit();
  });
  const turn = (role, title, text) => {
    const parts = { thought: make("p", { className: "quiet", hidden: true }), text: make("p", { className: "said" }, text), figures: make("p", { className: "quiet figures" }) };
    turns.append(make("div", { className: `turn ${role}` }, make("h4", {}, title), ...Object.values(parts)));
    turns.scrollTop = turns.scrollHeight;
    return parts;
  };
  made.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = message.value.trim();
    if (!text || running) return;
    const conversation = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    const asked = { role: "user", content: text };
    conversation.push(...messages, asked);
    const controller = running = new AbortController();
    error.textContent = message.value = "";
    sendButton.disabled = true;
    stop.disabled = false;
    turns.setAttribute("aria-busy", "true"); // a screen reader reads the whole answer, not its pieces
    turn("user", "You", text);
    const answer = turn("assistant", model.name, "");
    let whole = "";
    const heard = (so) => {
      const atEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
      whole = answer.text.textContent = so.text;
      answer.thought.textContent = so.reasoning;
      answer.thought.hidden = !so.reasoning;
      answer.figures.textContent = so.figures;
      if (atEnd) turns.scrollTop = turns.scrollHeight; // follows, unless the reader scrolled up
    };
    try {
      await receiveChat(model, { ...chatRequest(model, conversation, limit.value), signal: controller.signal }, heard);
    } catch (failure) {
      if (failure.name === "AbortError") answer.figures.textContent += `${whole ? " · " : ""}stopped`;
      else error.textContent = failure.message;
      if (failure.status === 401) {
        options.open = true;
        key.focus();
      }
      if (!whole && failure.name !== "AbortError") message.value ||= text; // to be sent again
    } finally {
      const kept = answer.text.isConnected; // false after "New conversation"
      if (kept && whole) messages.push(asked, { role: "assistant", content: whole });
      running = null;
      sendButton.disabled = false;
      stop.disabled = true;
      turns.setAttribute("aria-busy", "false");
      if (kept) setTimeout(refreshTokens, OVERVIEW_LIFE, model);
    }
  });
  return make("section", { "aria-label": "Chat" }, make("h3", {}, "Chat"), turns, error, made);
}
function openaiSection(model) {
  const python = [
    "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(url("/v1"))}, api_key="none")`,
    `messages = [{"role": "user", "content": "Hello"}]`,
    `stream = client.chat.completions.create(model=${JSON.stringify(model.name)}, messages=messages, stream=True)`,
    "for chunk in stream:", "    if chunk.choices:", `        print(chunk.choices[0].delta.content or "", end="", flush=True)`,
  ];
  const block = make("pre", { id: "openai", tabIndex: 0, "aria-label": "Chat from Python with openai" }, python.join("\n"));
  return make("section", {}, heading("Chat from Python", block), block);
}

// What the server has measured and recorded about a model.
const milliseconds = (us) => (us >= 1e6 ? `${(us / 1e6).toFixed(2)} s` : `${(us / 1000).toFixed(us < 1e4 ? 2 : 1)} ms`);
function tokenTimes(model) {
  const known = overview.models.find((one) => one.name === model.name && String(one.version) === model.version);
  const rows = [["To the first token", known?.first_token ?? []], ["Between tokens", known?.inter_token ?? []]];
  const found = rows.filter(([, buckets]) => buckets.length).flatMap(([title, buckets]) => (
    [[`${title}, p50`, quantile(buckets, 0.5, true) || 0], [`${title}, p99`, quantile(buckets, 0.99, true) || 0]]
  ));
  if (!found.length) return [make("p", { className: "quiet" }, "No text was streamed yet.")];
  return [make("dl", { className: "figures-list" }, ...found.map(([title, us]) => make("div", {}, make("dt", {}, title), make("dd", {}, milliseconds(us)))))];
}
function tokenSection(model) {
  return make("section", { id: "tokens" }, make("h3", {}, "Times of tokens, since the load"), ...tokenTimes(model));
}
async function readOverview() {
  overview = (await get("/v2/overview")) ?? { models: [] };
}
async function refreshTokens(model) {
  await readOverview();
  byId("tokens")?.replaceChildren(make("h3", {}, "Times of tokens, since the load"), ...tokenTimes(model));
}
function crashSection(name) {
  const found = crashes.filter((one) => one.model === name);
  const refused = quarantineList(name); // their records may be gone
  if (!found.length && !refused.length) return [];
  const records = found.map((one) => crashDetails(`${new Date(one.time).toLocaleString()} · ${one.instance} · `, one));
  return [make("section", { id: "crashes" }, make("h3", {}, "Crashes of its processes"), ...refused, ...records)];
}
// Returns what says which requests to a model are refused, and accepts them again.
function quarantineList(name) {
  const found = quarantine.filter((one) => one.model === name);
  if (!found.length) return [];
  const said = make("p", { className: "quiet", role: "status" }, "These requests are in quarantine: they are refused, as each of them ended two processes.");
  const items = found.map((one) => make("li", {}, `${one.request.id || "without an id"}: ${inputsOf(one.request)}; until ${new Date(one.until).toLocaleTimeString()}; crashes ${one.crashes.join(", ")}`));
  const button = make("button", { type: "button" }, "Lift the quarantine");
  button.addEventListener("click", async () => {
    try {
      if (await liftQuarantine(name)) load();
    } catch (error) {
      said.className = "bad";
      said.textContent = error.message;
    }
  });
  return [make("div", { id: "quarantine" }, said, make("ul", {}, ...items), button)];
}
let current = "";
function show(model) {
  if (current === JSON.stringify(model)) { // keeps the entered values
    byId("try").dispatchEvent(new Event("input"));
    byId("tokens")?.replaceWith(tokenSection(model));
    byId("crashes")?.remove();
    byId("model").append(...crashSection(model.name));
    return;
  }
  current = JSON.stringify(model);
  leaveChat();
  const kinds = [model.platform, `version ${model.version}`];
  if (model.max_batch_size > 0) kinds.push(`batches of up to ${model.max_batch_size}`);
  if (model.decoupled) kinds.push("decoupled");
  byId("model").replaceChildren(
    make("div", { className: "head" }, make("h2", {}, model.name), make("p", { className: "quiet" }, kinds.filter(Boolean).join(" · "))),
    make("section", {}, ...tensorTable("Inputs", model.inputs), ...tensorTable("Outputs", model.outputs)),
    ...(speaksChat(model) ? [chatSection(model)] : []),
    ...form(model),
    ...(speaksChat(model) ? [openaiSection(model)] : []),
    ...(speaksOpenAI(model) ? [tokenSection(model)] : []),
    ...crashSection(model.name),
  );
}

const place = (model) => `#${encodeURIComponent(model.name)}/${model.version ?? ""}`;
const unready = () => index.filter((entry) => entry.state !== "READY");
function showUnready(entry) {
  if (current === JSON.stringify(entry)) return;
  current = JSON.stringify(entry);
  leaveChat();
  const failed = entry.reason && entry.reason !== "unloaded";
  const reason = make("pre", { id: "reason", className: failed ? "bad" : "", tabIndex: 0, "aria-label": "Reason" }, entry.reason || "No reason is known.");
  const kinds = [entry.state ?? "not loaded", entry.version ? `version ${entry.version}` : ""];
  byId("model").replaceChildren(
    make("div", { className: "head" }, make("h2", {}, entry.name), make("p", { className: failed ? "bad" : "quiet" }, kinds.filter(Boolean).join(" · "))),
    make("section", {}, heading(failed ? "Why the model failed" : "Why the model is not ready", reason), reason),
    ...crashSection(entry.name),
  );
}
function choose() {
  const models = api["x-models"];
  const other = models.some((known) => place(known) === location.hash) ? undefined : unready().find((entry) => place(entry) === location.hash);
  const model = other ?? models.find((known) => place(known) === location.hash) ?? models[0];
  for (const link of byId("models").querySelectorAll("a")) {
    if (model && link.getAttribute("href") === place(model)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (other) return showUnready(other);
  if (model) return show(model);
  current = "";
  byId("model").replaceChildren(make("p", { className: "quiet" }, "No model is loaded."));
}

function list() {
  const models = api["x-models"];
  byId("title").textContent = api.info?.title ?? "pbhost: models";
  document.title = byId("title").textContent;
  const loaded = new Set(models.map((model) => model.name)).size;
  byId("count").textContent = `${loaded} loaded`;
  const several = (name) => models.filter((model) => model.name === name).length > 1;
  const links = models.map((model) => {
    const name = several(model.name) ? `${model.name} version ${model.version}` : model.name;
    const link = make("a", { href: place(model) }, make("span", { className: "name" }, name), make("span", { className: "state" }, "READY"));
    return make("li", {}, link);
  });
  const others = unready().map((entry) => {
    const name = entry.version ? `${entry.name} version ${entry.version}` : entry.name;
    const state = make("span", { className: entry.reason && entry.reason !== "unloaded" ? "state bad" : "state" }, entry.state ?? "not loaded");
    const reason = entry.reason ? make("span", { className: "reason" }, entry.reason) : null;
    return make("li", {}, make("a", { className: "gone", href: place(entry) }, make("span", { className: "name" }, name), state, reason));
  });
  byId("models").replaceChildren(...links, ...others);
  search();
}
function search() {
  const wanted = byId("search").value.trim().toLowerCase();
  const items = [...byId("models").children];
  for (const item of items) item.hidden = !item.querySelector(".name").textContent.toLowerCase().includes(wanted);
  byId("nomatch").textContent = items.length && items.every((item) => item.hidden) ? "No model matches." : "";
}
byId("search").addEventListener("input", search);

function requestKeys(wanted) {
  byId("keyfields").replaceChildren(...wanted.map((name, at) => keyField(name, `key-${at}`)));
  byId("keys").hidden = !wanted.length;
}
onKeys(load);

// Returns what the server tells, null if it does not: these parts of the page are then left out.
async function get(path, options) {
  try {
    return await ask(path, options);
  } catch { // the server has gone; the document says so
    return null;
  }
}
async function load() {
  const trouble = byId("trouble");
  trouble.hidden = true;
  byId("count").textContent = "Loading…";
  byId("refresh").disabled = true;
  try {
    onMissingKey = (name) => requestKeys([name]);
    api = await ask("/openapi.json");
    onMissingKey = () => {}; // all keys are known from now on
    index = (await get("/v2/repository/index", { method: "POST" })) ?? [];
    for (const entry of index) {
      // The index does not tell why a model has no version.
      if (!entry.version && Object.hasOwn(api["x-failures"], entry.name)) {
        entry.state ??= "failed";
        entry.reason ??= api["x-failures"][entry.name];
      }
    }
    crashes = (await get("/v2/crashes"))?.crashes ?? [];
    quarantine = (await get("/v2/quarantine"))?.requests ?? [];
    await readOverview();
    const schemes = Object.values(api.components.securitySchemes).map((scheme) => scheme.name);
    requestKeys([...new Set(schemes), ...(keys.has("Authorization") ? [API_KEY] : [])]);
    list();
    choose();
  } catch (error) {
    trouble.textContent = error.message;
    trouble.hidden = false;
    byId("count").textContent = "";
  } finally {
    byId("refresh").disabled = false;
  }
}
addEventListener("hashchange", choose);
byId("refresh").addEventListener("click", load);
load();
