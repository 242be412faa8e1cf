// Front ends in the browser: the fields of a task, and what its results look like.

/** An element with properties and children. Text is never read as HTML. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

const ACCEPTS = { image: "image/*", audio: "audio/*" };
const JSON_HEADERS = { "Content-Type": "application/json" };

/** The fields of a task, and ``read``, which gives the request and the picture that it is about. */
export function frontEndForm(frontEnd) {
  if (frontEnd.task === "reranking") return rerankingForm();
  if (frontEnd.input === "text") return textForm();
  const file = element("input", { type: "file", accept: ACCEPTS[frontEnd.input], required: true, ariaLabel: frontEnd.input });
  const fields = [file];
  const labels = element("input", { ariaLabel: "candidate labels", placeholder: "a cat, a dog" });
  if (frontEnd.options.includes("candidate_labels")) fields.push(element("label", {}, " labels ", labels));
  const read = () => {
    const query = new URLSearchParams();
    if (labels.value) query.set("candidate_labels", labels.value);
    const [body] = file.files;
    const type = body.type.startsWith(`${frontEnd.input}/`) ? body.type : "application/octet-stream";
    return { body, headers: { "Content-Type": type }, query, picture: frontEnd.input === "image" ? body : null };
  };
  return { fields, read };
}

function textForm() {
  const text = element("textarea", { rows: 2, required: true, ariaLabel: "text" });
  const read = () => ({ body: JSON.stringify({ inputs: text.value }), headers: JSON_HEADERS, query: "", picture: null });
  return { fields: [text], read };
}

function rerankingForm() {
  const query = element("input", { required: true, ariaLabel: "query", placeholder: "query" });
  const documents = element("textarea", { rows: 4, required: true, ariaLabel: "documents", placeholder: "a document a line" });
  const read = () => {
    const inputs = { query: query.value, documents: documents.value.split("\n").filter((line) => line.trim()) };
    return { body: JSON.stringify({ inputs }), headers: JSON_HEADERS, query: "", picture: null };
  };
  return { fields: [query, documents], read };
}

/** Elements that show a response. */
export async function showResult(frontEnd, response, picture) {
  if (response.headers.get("Content-Type").startsWith("image/")) {
    return [element("img", { className: "picture", src: URL.createObjectURL(await response.blob()), alt: "the result" })];
  }
  const result = await response.json();
  if (frontEnd.task === "image-segmentation") return result.map(maskFigure);
  const rows = Array.isArray(result) ? result.flat() : [];
  if (!rows.length || typeof rows[0] !== "object") return [element("pre", { textContent: plainText(result) })];
  const shown = [element("table", { className: "results" }, ...rows.map(resultRow))];
  if (picture) shown.unshift(await drawBoxes(picture, rows));
  return shown;
}

function plainText(result) {
  if (typeof result?.text === "string") return result.text;
  if (!Array.isArray(result) || !result.length) return JSON.stringify(result);
  return `${result.length} numbers\n  ${result.slice(0, 16).map((one) => one.toFixed(4)).join(", ")}${result.length > 16 ? ", …" : ""}`;
}

function resultRow(one) {
  const name = one.label ?? one.entity_group ?? one.entity ?? one.document ?? one.token_str ?? "";
  const word = one.word === undefined ? [] : [element("td", { textContent: one.word })];
  return element("tr", {}, element("td", { textContent: name }), ...word,
    element("td", { textContent: one.score.toFixed(4) }), element("td", {}, element("meter", { value: one.score })));
}

function maskFigure(one) {
  const image = element("img", { src: `data:image/png;base64,${one.mask}`, alt: `mask of ${one.label}` });
  return element("figure", {}, image, element("figcaption", { textContent: one.label }));
}

/** The picture, with the boxes of objects. */
async function drawBoxes(picture, rows) {
  const bitmap = await createImageBitmap(picture);
  const canvas = element("canvas", { className: "picture", width: bitmap.width, height: bitmap.height });
  const context = canvas.getContext("2d"), unit = Math.max(bitmap.width, bitmap.height) / 200;
  context.drawImage(bitmap, 0, 0);
  context.strokeStyle = context.fillStyle = "#2563eb";
  context.lineWidth = Math.max(1, unit);
  context.font = `${Math.max(8, 7 * unit)}px sans-serif`;
  for (const { label, box } of rows) {
    if (!box) continue;
    context.strokeRect(box.xmin, box.ymin, box.xmax - box.xmin, box.ymax - box.ymin);
    context.fillText(label, box.xmin + unit, Math.max(box.ymin - unit, 7 * unit));
  }
  return canvas;
}
