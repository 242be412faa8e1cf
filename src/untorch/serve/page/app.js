// The page of a server: what is loaded, a form for each model, its latency, and a chat for language models.

import { element, frontEndForm, showResult } from "./front_ends.js";
import { BYTES, cosines, decode, encode, imageLayout, parseNpy, parseNumbers, pixelsToNumbers, product } from "./tensors.js";

const base = new URL("..", import.meta.url);
const key = document.getElementById("key");
key.value = sessionStorage.getItem("untorch-key") ?? "";
key.addEventListener("change", () => { sessionStorage.setItem("untorch-key", key.value); load(); });
document.getElementById("reload").addEventListener("click", () => load());

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  const response = await fetch(new URL(path, base), { ...options, headers });
  if (!response.ok) {
    let text = await response.text();
    try {
      const { error } = JSON.parse(text);
      text = error.message ?? error;
    } catch { /* no JSON: the text itself */ }
    throw Object.assign(new Error(text || `status ${response.status}`), { status: response.status });
  }
  return response;
}

const json = async (path, options) => (await request(path, options)).json();

function say(text) {
  const message = document.getElementById("message");
  message.hidden = !text;
  message.textContent = text;
}

async function load() {
  const models = document.getElementById("models");
  try {
    const [server, index] = [await json("v2"), await json("v2/repository/index", { method: "POST" })];
    document.getElementById("server").textContent = `${server.name} ${server.version}`;
    const chats = await json("v1/models").then((list) => new Set(list.data.map((model) => model.id)), () => new Set());
    const frontEnds = await json("v1/pipeline").then((list) => list.data, () => []);
    const cards = frontEnds.map(frontEndCard);
    for (const row of index) {
      if (row.state !== "READY") {
        cards.push(element("section", {}, element("h2", { textContent: row.name }),
          element("div", { className: "facts", textContent: `${row.state.toLowerCase()}: ${row.reason}` })));
        continue;
      }
      const model = await json(`v2/models/${encodeURIComponent(row.name)}`);
      cards.push(cardOf(model, chats.has(model.name)));
    }
    models.replaceChildren(...cards);
    say(index.length ? "" : "Nothing is loaded.");
  } catch (error) {
    models.replaceChildren();
    say(error.status === 401 ? "This server asks for an API key." : error.message);
  }
}

function cardOf(model, chats) {
  if (model.platform !== "untorch_llm") return methodCard(model);
  if (model.untorch.task === "embed") return similarityCard(model);
  return chats && model.untorch.task !== "classify" ? chatCard(model) : textCard(model);
}

/** A card's frame: name, facts, and a place for latency. */
function card(model, facts) {
  const latency = element("span", { className: "facts" });
  const section = element("section", {},
    element("header", {}, element("h2", { textContent: model.name }), latency),
    element("div", { className: "facts", textContent: facts }));
  section.dataset.model = model.name;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  line.setAttribute("preserveAspectRatio", "none");
  const curve = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.append(curve);
  const times = [];
  const measured = (milliseconds) => {
    times.push(milliseconds);
    if (times.length > 200) times.shift();
    const sorted = [...times].sort((a, b) => a - b), most = sorted.at(-1);
    const at = (part) => sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))].toFixed(1);
    latency.textContent = `${milliseconds.toFixed(1)} ms; of ${times.length} calls p50 ${at(0.5)} ms, p99 ${at(0.99)} ms`;
    line.setAttribute("viewBox", `0 0 ${Math.max(1, times.length - 1)} 48`);
    curve.setAttribute("points", times.map((time, i) => `${i},${47 - 46 * time / most}`).join(" "));
  };
  return { section, line, measured };
}

/** A package by its front end: a picture, sound or text in, labels out. */
function frontEndCard(frontEnd) {
  const { section, line, measured } = card({ name: frontEnd.id }, `${frontEnd.task}; ${frontEnd.architecture}`);
  delete section.dataset.model; // which its methods have
  section.dataset.pipeline = frontEnd.id;
  const { fields, read } = frontEndForm(frontEnd);
  const run = element("button", { type: "submit", className: "main", textContent: "Run" });
  const result = element("div");
  const form = element("form", {}, ...fields, run, line, result);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    run.disabled = true;
    try {
      const { body, headers, query, picture } = read();
      const begin = performance.now();
      const response = await request(`v1/pipeline/${encodeURIComponent(frontEnd.id)}?${query}`, { method: "POST", body, headers });
      measured(performance.now() - begin);
      result.replaceChildren(...await showResult(frontEnd, response, picture));
    } catch (error) {
      result.replaceChildren(element("pre", { className: "error", textContent: error.message }));
    }
    run.disabled = false;
  });
  section.append(form);
  return section;
}

function methodCard(model) {
  const { device, batching } = model.untorch;
  const joined = batching.joined ? "calls are joined" : `calls are not joined: ${batching.reason}`;
  const { section, line, measured } = card(model, `method ${model.untorch.method} on ${device}; ${joined}`);
  const fields = model.inputs.map(inputField);
  const repeat = element("input", { type: "checkbox" });
  const run = element("button", { type: "submit", className: "main", textContent: "Run" });
  const result = element("pre", { hidden: true });
  const form = element("form", {}, ...fields.map((field) => field.element), run,
    element("label", {}, repeat, " again and again"), line, result);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    run.disabled = true;
    try {
      do {
        const inputs = fields.map((field) => field.read());
        const begin = performance.now(), outputs = await infer(model.name, inputs);
        measured(performance.now() - begin);
        result.textContent = outputs.map(show).join("\n");
        result.classList.remove("error");
      } while (repeat.checked && section.isConnected);
    } catch (error) {
      result.textContent = error.message;
      result.classList.add("error");
    }
    result.hidden = false;
    run.disabled = false;
  });
  section.append(model.inputs.length ? form : element("p", { textContent: "This package does not describe its inputs." }));
  return section;
}

/** An input's editor: numbers as JSON, or a file. ``read`` gives name, datatype, shape and bytes. */
function inputField(port) {
  const usual = port.shape.map((size) => (size < 0 ? 1 : size));
  const shape = element("input", { className: "shape", value: usual.join(", "), ariaLabel: `shape of ${port.name}` });
  const text = element("textarea", { rows: 2, ariaLabel: `values of ${port.name}`,
    placeholder: "numbers as JSON, such as [[1, 2], [3, 4]]; or one of: zeros, ones, random" });
  text.value = /INT|BOOL/.test(port.datatype) ? "ones" : "random";
  const layout = imageLayout(port.shape);
  const file = element("input", { type: "file", accept: layout ? "image/*,.npy" : "audio/*,.npy", ariaLabel: `file for ${port.name}` });
  const normalize = element("input", { type: "checkbox", checked: true });
  const note = element("span", { className: "facts" });
  let values = null;
  file.addEventListener("change", async () => {
    try {
      const read = await readFile(file.files[0], port, layout, normalize.checked);
      values = read.values;
      shape.value = read.shape.join(", ");
      text.value = "";
      note.textContent = `${values.length} numbers from ${file.files[0].name}`;
    } catch (error) {
      values = null;
      note.textContent = error.message;
    }
  });
  text.addEventListener("input", () => { values = null; note.textContent = ""; });
  const legend = `${port.name}: ${port.datatype}[${port.shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]`;
  const parts = [element("legend", { textContent: legend }), element("label", {}, "shape ", shape), file];
  if (layout?.channels === 3) parts.push(element("label", {}, normalize, " ImageNet's mean and deviation"));
  const frame = element("fieldset", {}, ...parts, note, text);

  const read = () => {
    if (!(port.datatype in BYTES)) throw new Error(`${port.name}: ${port.datatype} cannot be sent`);
    let sizes = shape.value.split(",").map((size) => size.trim()).filter(Boolean).map(Number), numbers = values;
    if (numbers === null) {
      const fill = { zeros: () => 0, ones: () => 1, random: () => Math.random() }[text.value.trim()];
      if (fill) numbers = Array.from({ length: product(sizes) }, fill);
      else ({ shape: sizes, values: numbers } = parseNumbers(text.value));
    }
    if (sizes.length !== port.shape.length && numbers.length === product(usual)) sizes = usual;
    if (numbers.length !== product(sizes)) throw new Error(`${port.name}: ${numbers.length} numbers for the shape ${sizes}`);
    return { name: port.name, datatype: port.datatype, shape: sizes, bytes: encode(numbers, port.datatype) };
  };
  return { element: frame, read };
}

async function readFile(file, port, layout, normalize) {
  if (file.name.endsWith(".npy")) return parseNpy(await file.arrayBuffer());
  if (layout) {
    const picture = await createImageBitmap(file);
    const height = layout.height > 0 ? layout.height : picture.height, width = layout.width > 0 ? layout.width : picture.width;
    const canvas = element("canvas", { width, height }), context = canvas.getContext("2d");
    context.drawImage(picture, 0, 0, width, height);
    const pixels = context.getImageData(0, 0, width, height).data;
    const values = pixelsToNumbers(pixels, layout, /INT/.test(port.datatype), normalize);
    const sizes = layout.first ? [layout.channels, height, width] : [height, width, layout.channels];
    return { shape: port.shape.length === 4 ? [1, ...sizes] : sizes, values };
  }
  // Sound: one channel at 16 kHz, as speech models take it.
  const sound = await new OfflineAudioContext(1, 1, 16000).decodeAudioData(await file.arrayBuffer());
  const mono = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel++) {
    sound.getChannelData(channel).forEach((value, i) => { mono[i] += value / sound.numberOfChannels; });
  }
  const length = port.shape.at(-1) > 0 ? port.shape.at(-1) : mono.length, fitted = new Float32Array(length);
  fitted.set(mono.subarray(0, length));
  return { shape: [...port.shape.slice(0, -1).map(() => 1), length], values: fitted };
}

/** A call with binary tensors both ways. */
async function infer(model, inputs) {
  const header = new TextEncoder().encode(JSON.stringify({
    inputs: inputs.map(({ bytes, ...rest }) => ({ ...rest, parameters: { binary_data_size: bytes.length } })),
    parameters: { binary_data_output: true },
  }));
  const response = await request(`v2/models/${encodeURIComponent(model)}/infer`, {
    method: "POST", body: new Blob([header, ...inputs.map((input) => input.bytes)]),
    headers: { "Inference-Header-Content-Length": String(header.length) },
  });
  const body = new Uint8Array(await response.arrayBuffer());
  let at = Number(response.headers.get("Inference-Header-Content-Length") ?? body.length);
  const document = JSON.parse(new TextDecoder().decode(body.subarray(0, at)));
  return document.outputs.map((output) => {
    const size = output.parameters?.binary_data_size;
    const values = size === undefined ? output.data : decode(body.slice(at, at += size), output.datatype);
    return { ...output, values };
  });
}

function show(output) {
  const { name, datatype, shape, values } = output;
  const number = (value) => (typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(5) : String(value));
  const first = values.slice(0, 24).map(number).join(", ") + (values.length > 24 ? ", …" : "");
  const lines = [`${name}: ${datatype}[${shape.join(", ")}]`, `  ${first}`];
  const row = shape.at(-1);
  if (row >= 10 && values.length === row && datatype !== "BYTES") { // scores of classes
    const best = values.map((value, i) => [value, i]).sort((a, b) => b[0] - a[0]).slice(0, 5);
    lines.push(`  largest: ${best.map(([value, i]) => `${i} (${number(value)})`).join(", ")}`);
  }
  return lines.join("\n");
}

/** The outputs of texts. */
const inferTexts = (model, texts, parameters) => json(`v2/models/${encodeURIComponent(model.name)}/infer`, {
  method: "POST",
  body: JSON.stringify({ inputs: [{ name: "text_input", datatype: "BYTES", shape: [texts.length], data: texts }], parameters }),
});

/** A model that embeds: how similar sentences are. */
function similarityCard(model) {
  const { section, line, measured } = card(model, `embeddings; ${model.untorch.max_positions} tokens at most`);
  const text = element("textarea", { rows: 4, placeholder: "A sentence a line", ariaLabel: "sentences" });
  const run = element("button", { type: "submit", className: "main", textContent: "Compare" });
  const result = element("div");
  const form = element("form", {}, text, run, line, result);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const sentences = text.value.split("\n").map((sentence) => sentence.trim()).filter(Boolean);
    if (!sentences.length) return;
    run.disabled = true;
    try {
      const begin = performance.now();
      const { outputs: [{ shape, data }] } = await inferTexts(model, sentences);
      measured(performance.now() - begin);
      const table = element("table", {}, element("tr", {}, element("th"),
        ...sentences.map((_, i) => element("th", { textContent: i + 1 }))));
      cosines(data, shape[1]).forEach((row, i) => table.append(element("tr", {},
        element("th", { textContent: `${i + 1} ${sentences[i]}` }),
        ...row.map((value) => element("td", { textContent: value.toFixed(3) })))));
      result.replaceChildren(table);
    } catch (error) {
      result.replaceChildren(element("pre", { className: "error", textContent: error.message }));
    }
    run.disabled = false;
  });
  section.append(form);
  return section;
}

/** A language model without the OpenAI API, or one that classifies: text in, text or scores out. */
function textCard(model) {
  const { section, line, measured } = card(model, `language model; ${model.untorch.max_positions} tokens at most`);
  const text = element("textarea", { rows: 3, placeholder: "Once upon a time", ariaLabel: "prompt" });
  const run = element("button", { type: "submit", className: "main", textContent: "Go on" });
  const result = element("pre", { hidden: true });
  const form = element("form", {}, text, run, line, result);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    run.disabled = true;
    try {
      const begin = performance.now();
      const scores = model.untorch.task === "classify";
      const { outputs: [output] } = await inferTexts(model, [text.value], scores ? {} : { max_tokens: 200 });
      measured(performance.now() - begin);
      result.textContent = scores ? show({ ...output, values: output.data }) : output.data[0];
    } catch (error) {
      result.textContent = error.message;
    }
    result.hidden = false;
    run.disabled = false;
  });
  section.append(form);
  return section;
}

/** A conversation, with the answer as it comes. */
function chatCard(model) {
  const { section, line, measured } = card(model, `language model; ${model.untorch.max_positions} tokens at most`);
  const turns = element("div"), messages = [];
  const text = element("textarea", { rows: 2, placeholder: "Say something", ariaLabel: "message" });
  const send = element("button", { type: "submit", className: "main", textContent: "Send" });
  const stop = element("button", { type: "button", textContent: "Stop", disabled: true });
  const clear = element("button", { type: "button", textContent: "New conversation" });
  const form = element("form", {}, text, send, " ", stop, " ", clear, line);
  let controller = null;
  stop.addEventListener("click", () => controller?.abort());
  clear.addEventListener("click", () => { controller?.abort(); messages.length = 0; turns.replaceChildren(); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!text.value.trim()) return;
    messages.push({ role: "user", content: text.value });
    turns.append(element("div", { className: "turn user", textContent: text.value }));
    text.value = "";
    const answer = element("div", { className: "turn assistant" });
    turns.append(answer);
    controller = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    const begin = performance.now();
    try {
      const response = await request("v1/chat/completions", {
        method: "POST", signal: controller.signal, headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ model: model.name, messages, stream: true }),
      });
      let first = true;
      for await (const chunk of events(response.body)) {
        const part = chunk.choices?.[0]?.delta?.content;
        if (!part) continue;
        if (first) measured(performance.now() - begin); // the time to the first token
        first = false;
        answer.textContent += part;
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.textContent += error.message;
        answer.classList.add("error");
      }
    }
    messages.push({ role: "assistant", content: answer.textContent });
    send.disabled = false;
    stop.disabled = true;
  });
  section.append(turns, form);
  return section;
}

/** The JSON documents of a stream of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += value ?? "";
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
    if (done) return;
  }
}

load();
