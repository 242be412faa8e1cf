// Tensors in the browser: bytes of the protocol's datatypes, .npy files, images and sound as numbers.

export const BYTES = {
  BOOL: 1, UINT8: 1, INT8: 1, UINT16: 2, INT16: 2, FP16: 2, BF16: 2, UINT32: 4, INT32: 4, FP32: 4, UINT64: 8, INT64: 8,
  FP64: 8,
};

export const product = (shape) => shape.reduce((all, size) => all * size, 1);

function float32Bits(value) {
  const view = new DataView(new ArrayBuffer(4));
  view.setFloat32(0, value);
  return view.getUint32(0);
}

function toHalf(value) {
  const bits = float32Bits(value), sign = (bits >>> 16) & 0x8000, magnitude = Math.abs(value);
  if (Number.isNaN(value)) return sign | 0x7e00;
  if (magnitude >= 65520) return sign | 0x7c00;
  if (magnitude < 2 ** -14) return sign | roundEven(magnitude * 2 ** 24);
  const exponent = Math.floor(Math.log2(magnitude));
  return sign | (((exponent + 15) << 10) + roundEven((magnitude / 2 ** exponent - 1) * 1024));
}

function roundEven(value) {
  const low = Math.floor(value), rest = value - low;
  return rest > 0.5 || (rest === 0.5 && low % 2) ? low + 1 : low;
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}

function toBfloat16(value) {
  const bits = float32Bits(value);
  if (Number.isNaN(value)) return 0x7fc0;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

function fromBfloat16(bits) {
  const view = new DataView(new ArrayBuffer(4));
  view.setUint32(0, bits << 16);
  return view.getFloat32(0);
}

const WRITE = {
  BOOL: (view, at, value) => view.setUint8(at, value ? 1 : 0),
  UINT8: (view, at, value) => view.setUint8(at, value), INT8: (view, at, value) => view.setInt8(at, value),
  UINT16: (view, at, value) => view.setUint16(at, value, true), INT16: (view, at, value) => view.setInt16(at, value, true),
  UINT32: (view, at, value) => view.setUint32(at, value, true), INT32: (view, at, value) => view.setInt32(at, value, true),
  UINT64: (view, at, value) => view.setBigUint64(at, BigInt(value), true),
  INT64: (view, at, value) => view.setBigInt64(at, BigInt(value), true),
  FP16: (view, at, value) => view.setUint16(at, toHalf(value), true),
  BF16: (view, at, value) => view.setUint16(at, toBfloat16(value), true),
  FP32: (view, at, value) => view.setFloat32(at, value, true), FP64: (view, at, value) => view.setFloat64(at, value, true),
};
const READ = {
  BOOL: (view, at) => view.getUint8(at) !== 0, UINT8: (view, at) => view.getUint8(at), INT8: (view, at) => view.getInt8(at),
  UINT16: (view, at) => view.getUint16(at, true), INT16: (view, at) => view.getInt16(at, true),
  UINT32: (view, at) => view.getUint32(at, true), INT32: (view, at) => view.getInt32(at, true),
  UINT64: (view, at) => Number(view.getBigUint64(at, true)), INT64: (view, at) => Number(view.getBigInt64(at, true)),
  FP16: (view, at) => fromHalf(view.getUint16(at, true)), BF16: (view, at) => fromBfloat16(view.getUint16(at, true)),
  FP32: (view, at) => view.getFloat32(at, true), FP64: (view, at) => view.getFloat64(at, true),
};

/** The bytes of numbers in row-major order. */
export function encode(values, datatype) {
  const size = BYTES[datatype], bytes = new Uint8Array(values.length * size), view = new DataView(bytes.buffer);
  const integer = /INT/.test(datatype);
  for (let i = 0; i < values.length; i++) WRITE[datatype](view, i * size, integer ? Math.round(values[i]) : values[i]);
  return bytes;
}

/** The numbers of a tensor's bytes. */
export function decode(bytes, datatype) {
  if (datatype === "BYTES") {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength), texts = [];
    for (let at = 0; at < bytes.byteLength;) {
      const length = view.getUint32(at, true);
      texts.push(new TextDecoder().decode(bytes.subarray(at + 4, at + 4 + length)));
      at += 4 + length;
    }
    return texts;
  }
  const size = BYTES[datatype], view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Array.from({ length: bytes.byteLength / size }, (_, i) => READ[datatype](view, i * size));
}

/** Shape and numbers of a JSON text: nested lists of one depth. */
export function parseNumbers(text) {
  const value = JSON.parse(text), shape = [];
  for (let inner = value; Array.isArray(inner); inner = inner[0]) shape.push(inner.length);
  const flat = Array.isArray(value) ? value.flat(Infinity) : [value];
  if (flat.length !== product(shape)) throw new Error("the lists have different lengths");
  if (!flat.every((item) => typeof item === "number" || typeof item === "boolean")) throw new Error("expected numbers");
  return { shape, values: flat.map(Number) };
}

const NPY = {
  b1: "BOOL", u1: "UINT8", i1: "INT8", u2: "UINT16", i2: "INT16", u4: "UINT32", i4: "INT32", u8: "UINT64", i8: "INT64",
  f2: "FP16", f4: "FP32", f8: "FP64",
};

/** Shape and numbers of a .npy file: little-endian, row-major. */
export function parseNpy(buffer) {
  const bytes = new Uint8Array(buffer), view = new DataView(buffer);
  if (String.fromCharCode(...bytes.subarray(1, 6)) !== "NUMPY") throw new Error("this is no .npy file");
  const wide = bytes[6] > 1, begin = wide ? 12 : 10;
  const end = begin + (wide ? view.getUint32(8, true) : view.getUint16(8, true));
  const header = new TextDecoder().decode(bytes.subarray(begin, end));
  const kind = /'descr':\s*'([<|=>])(\w\d)'/.exec(header), shape = /'shape':\s*\(([^)]*)\)/.exec(header);
  if (!kind || kind[1] === ">" || !(kind[2] in NPY) || !shape) throw new Error(`this .npy file is not supported: ${header}`);
  if (/'fortran_order':\s*True/.test(header)) throw new Error("this .npy file is column-major: save a row-major copy");
  return {
    shape: shape[1].split(",").map((size) => size.trim()).filter(Boolean).map(Number),
    values: decode(bytes.subarray(end), NPY[kind[2]]),
  };
}

/** Where channels, height and width are in a shape such as [1, 3, 224, 224] or [-1, 224, 224, 3]; null: no image. */
export function imageLayout(shape) {
  const sizes = shape.length === 4 ? shape.slice(1) : shape;
  if (sizes.length !== 3) return null;
  const channels = (size) => size === 3 || size === 1;
  if (channels(sizes[0])) return { channels: sizes[0], height: sizes[1], width: sizes[2], first: true };
  if (channels(sizes[2])) return { channels: sizes[2], height: sizes[0], width: sizes[1], first: false };
  return null;
}

const MEAN = [0.485, 0.456, 0.406], DEVIATION = [0.229, 0.224, 0.225];

/** RGBA pixels as numbers: 0 to 255 for integers, else 0 to 1, or with ImageNet's mean and deviation. */
export function pixelsToNumbers(pixels, layout, integer, normalize) {
  const { channels, first } = layout, count = pixels.length / 4, values = new Float32Array(count * channels);
  for (let i = 0; i < count; i++) {
    for (let channel = 0; channel < channels; channel++) {
      const at = 4 * i;
      let value = channels === 1 ? 0.299 * pixels[at] + 0.587 * pixels[at + 1] + 0.114 * pixels[at + 2] : pixels[at + channel];
      if (!integer) value /= 255;
      if (!integer && normalize && channels === 3) value = (value - MEAN[channel]) / DEVIATION[channel];
      values[first ? channel * count + i : i * channels + channel] = value;
    }
  }
  return values;
}

/** The cosine of each pair of vectors, which lie one behind the other: a list of rows. */
export function cosines(numbers, width) {
  const vectors = Array.from({ length: numbers.length / width }, (_, i) => numbers.slice(i * width, (i + 1) * width));
  const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
  const lengths = vectors.map((vector) => Math.sqrt(dot(vector, vector)) || 1);
  return vectors.map((a, i) => vectors.map((b, j) => dot(a, b) / (lengths[i] * lengths[j])));
}
