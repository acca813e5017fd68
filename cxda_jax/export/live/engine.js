"use strict";
// The network of a model without any library: encode a buffer of images, then answer for one image.
// An image is a Float32Array [height, width, channels] of numbers in 0..1. Maps have the same order.

const KERNEL = 5; // the sides of a convolution's kernel
const EPSILON = 1e-5;

class Engine {
  /**
   * model: what the page holds of it; see describe() in web.py.
   * weights: an ArrayBuffer of float32 numbers.
   * program: the bytes of kernel.wat, or null for plain JavaScript.
   */
  constructor(model, weights, program) {
    this.model = model;
    this.tensors = {};
    for (const [name, start, length] of model.tensors) this.tensors[name] = new Float32Array(weights, 4 * start, length);
    this.layers = this.planLayers();
    const heap = this.layers.reduce((most, layer) => Math.max(most, layer.end), 0);
    const pages = Math.ceil((4 * heap) / 65536);
    this.convolve = convolvePlainly;
    this.kind = "plain JavaScript";
    if (program) {
      try {
        const memory = new WebAssembly.Memory({ initial: pages });
        const { exports } = new WebAssembly.Instance(new WebAssembly.Module(program), { page: { memory } });
        this.heap = new Float32Array(memory.buffer);
        this.convolve = (heap, image, weights, out, rows, columns, imageRow, imagePixel, outPixel, run) =>
          exports.convolve(4 * image, 4 * weights, 4 * out, rows, columns, 4 * imageRow, 4 * imagePixel, 4 * outPixel, KERNEL, 4 * run);
        this.kind = "WebAssembly";
      } catch {
        // a browser without WebAssembly's vectors: the same in JavaScript
      }
    }
    this.heap ??= new Float32Array(pages * 16384);
    for (const layer of this.layers) this.placeWeights(layer);
    this.running = this.layers.map(({ mean, variance }) => ({ mean, variance }));
    this.sequence = model.sequence ? new Sequence(model.sequence, this.tensors) : null;
    this.shares = model.shares ? new Shares(model.shares, this) : null;
    this.learned = model.learned ? this.remember(this.tensors["attention/tokens"], model.learned) : null;
  }

  /** The sizes of the layers, and where in the heap each one's weights, input and output lie. */
  planLayers() {
    const layers = [];
    let [height, width, channels] = this.model.shape;
    let end = 0;
    for (const [i, { pad, pool }] of this.model.layers.entries()) {
      const tensor = (name) => this.tensors[`trunk/${name}`];
      const bias = tensor(`conv${i}/bias`);
      const layer = {
        pad, pool, channels, bias, out: bias.length, blocks: Math.ceil(bias.length / 4),
        height, width, imageHeight: height + 2 * pad, imageWidth: width + 2 * pad,
        kernel: tensor(`conv${i}/kernel`), scale: tensor(`bn${i}/scale`), shift: tensor(`bn${i}/bias`),
        mean: tensor(`bn${i}/mean`), variance: tensor(`bn${i}/var`),
      };
      layer.rows = layer.imageHeight - KERNEL + 1;
      layer.columns = layer.imageWidth - KERNEL + 1;
      layer.weights = end;
      end += layer.blocks * 4 * KERNEL * KERNEL * channels;
      [height, width] = [layer.rows, layer.columns].map((side) => (pool ? side >> 1 : side));
      channels = layer.out;
      layers.push(layer);
    }
    for (const layer of layers) {
      // All layers share the places of input and output. Groups of four pixels read and write past the end of the last row.
      layer.image = end;
      layer.target = end + Math.max(...layers.map((l) => (l.imageHeight * l.imageWidth + 3) * l.channels));
      layer.end = layer.target + (layer.rows * layer.columns + 3) * 4 * layer.blocks;
    }
    this.mapShape = [height, width, channels];
    return layers;
  }

  /** Kernels [5, 5, channels, out] into the heap as [blocks, 5, 5, channels, 4]. */
  placeWeights({ kernel, out, blocks, channels, weights }) {
    const numbers = KERNEL * KERNEL * channels;
    for (let block = 0; block < blocks; block++)
      for (let i = 0; i < numbers; i++)
        for (let k = 0; k < 4 && 4 * block + k < out; k++)
          this.heap[weights + (block * numbers + i) * 4 + k] = kernel[i * out + 4 * block + k];
  }

  /** The image as the network sees it. */
  normalise(pixels) {
    const { mean, std } = this.model;
    return Float32Array.from(pixels, (x, i) => (x - mean[i % mean.length]) / std[i % std.length]);
  }

  /** What the convolution of layer i makes of a map, before normalisation. */
  convolved(i, map) {
    const layer = this.layers[i];
    const { heap } = this;
    const { pad, width, height, channels, imageWidth, imageHeight, image, target, rows, columns, blocks, out, bias } = layer;
    heap.fill(0, image, image + (imageHeight * imageWidth + 3) * channels);
    for (let y = 0; y < height; y++)
      heap.set(map.subarray(y * width * channels, (y + 1) * width * channels), image + ((y + pad) * imageWidth + pad) * channels);
    const run = KERNEL * channels;
    for (let block = 0; block < blocks; block++) {
      const weights = layer.weights + block * KERNEL * run * 4;
      this.convolve(heap, image, weights, target + 4 * block, rows, columns, imageWidth * channels, channels, 4 * blocks, run);
    }
    const made = new Float32Array(rows * columns * out);
    for (let pixel = 0; pixel < rows * columns; pixel++)
      for (let k = 0; k < out; k++) made[pixel * out + k] = heap[target + pixel * 4 * blocks + k] + bias[k];
    return made;
  }

  /** What convolved() gives, normalised by these statistics. In a layer without pooling, ReLU follows. */
  normalised(i, raw, { mean, variance }) {
    const { scale, shift, out, pool } = this.layers[i];
    const factor = scale.map((x, k) => x / Math.sqrt(variance[k] + EPSILON));
    const offset = shift.map((x, k) => x - mean[k] * factor[k]);
    const map = new Float32Array(raw.length);
    const least = pool ? -Infinity : 0;
    for (let j = 0; j < raw.length; j++) map[j] = Math.max(least, raw[j] * factor[j % out] + offset[j % out]);
    return map;
  }

  /** The rest of layer i: pooling and ReLU, if it pools. */
  pooled(i, map) {
    const { out, pool, rows, columns } = this.layers[i];
    if (!pool) return map;
    const [height, width] = [rows >> 1, columns >> 1];
    const pooled = new Float32Array(height * width * out);
    for (let y = 0; y < height; y++)
      for (let x = 0; x < width; x++)
        for (let k = 0; k < out; k++) {
          const at = (2 * y * columns + 2 * x) * out + k;
          const below = at + columns * out;
          pooled[(y * width + x) * out + k] = Math.max(0, map[at], map[at + out], map[below], map[below + out]);
        }
    return pooled;
  }

  finished(i, raw, statistics) {
    return this.pooled(i, this.normalised(i, raw, statistics));
  }

  /** The map of an image, given what the first convolution made of it. */
  mapOf(first, statistics) {
    let map = this.finished(0, first, statistics[0]);
    for (let i = 1; i < this.layers.length; i++) map = this.finished(i, this.convolved(i, map), statistics[i]);
    return map;
  }

  /**
   * Adapts to images. A generator, which stops after each image and each layer, so that a page can do other things meanwhile;
   * what it returns goes to predict().
   */
  *adapt(images) {
    if (this.shares) return yield* this.shares.adapt(images);
    const { share, memory } = this.model;
    const count = images.length;
    const part = !count ? 0 : share.prior ? count / (count + share.prior) : share.momentum;
    const raws = [];
    const firsts = [];
    if (part || memory)
      for (const pixels of images) {
        firsts.push(this.convolved(0, this.normalise(pixels)));
        yield;
      }
    let own = this.running;
    if (part) {
      own = [];
      for (let i = 0; i < this.layers.length; i++) {
        for (let n = 0; n < count; n++) {
          raws[n] = i ? this.convolved(i, this.finished(i - 1, raws[n], own[i - 1])) : firsts[n];
          yield;
        }
        own.push(moments(raws, this.layers[i].out));
      }
    }
    const blend = (a, b) => a.map((x, k) => (1 - part) * x + part * b[k]);
    const statistics = this.running.map((old, i) => ({
      mean: blend(old.mean, own[i].mean),
      variance: blend(old.variance, own[i].variance),
    }));
    if (!memory) return { statistics, memory: null, count };
    const [height, width, channels] = this.mapShape;
    const dim = height * width * channels;
    const tokens = new Float32Array(count * dim);
    for (let n = 0; n < count; n++) {
      tokens.set(this.mapOf(firsts[n], memory === "own" && part ? own : statistics), n * dim);
      yield;
    }
    if (!this.sequence) return { statistics, memory: this.remember(tokens, count), count };
    const cache = this.sequence.empty();
    for (let n = Math.max(0, count - this.sequence.context); n < count; n++) {
      this.sequence.read(tokens.subarray(n * dim, (n + 1) * dim), cache, true);
      yield;
    }
    return { statistics, memory: cache, count };
  }

  /** Keys and values [count, inner] of tokens. */
  remember(tokens, count) {
    const inner = this.tensors["attention/key/kernel"].length / (tokens.length / Math.max(1, count) || 1);
    const keys = [];
    const values = [];
    for (let n = 0; n < count; n++) {
      const x = this.layerNorm("norm", tokens.subarray((n * tokens.length) / count, ((n + 1) * tokens.length) / count));
      keys.push(times(x, this.tensors["attention/key/kernel"], inner));
      values.push(times(x, this.tensors["attention/value/kernel"], inner));
    }
    return { keys, values };
  }

  layerNorm(name, x) {
    return layerNorm(x, ...["scale", "bias"].map((part) => this.tensors[`attention/${name}/${part}`]));
  }

  /** Logits of an image, and weights [heads][images of the buffer]. */
  predict(adapted, pixels) {
    if (this.shares) return this.shares.predict(adapted, pixels);
    const map = this.mapOf(this.convolved(0, this.normalise(pixels)), adapted.statistics);
    if (this.sequence) {
      const { features, weights } = this.sequence.read(map, adapted.memory);
      const unread = new Array(adapted.count - weights[0].length).fill(0); // images beyond the longest sequence
      return { logits: this.dense("fc", features), weights: adapted.count ? weights.map((row) => [...unread, ...row]) : [] };
    }
    const { token, weights } = adapted.memory ? this.recall(map, adapted) : { token: map, weights: [] };
    return { logits: this.classify(token), weights };
  }

  /** Logits of a map. */
  classify(map) {
    const [height, width, channels] = this.mapShape;
    const pooled = new Float32Array(channels);
    for (let j = 0; j < map.length; j++) pooled[j % channels] += map[j] / (height * width);
    const hidden = this.dense("hidden", pooled).map((x) => Math.max(0, x));
    return this.dense("logits", hidden);
  }

  /** A token plus what it finds in the memory and in the learned tokens. */
  recall(token, { memory, count }) {
    const { heads, shared_norm: shared, width } = this.model.attention;
    const learned = this.learned ? this.model.learned : 0;
    const keys = [...(learned ? this.learned.keys : []), ...memory.keys];
    const values = [...(learned ? this.learned.values : []), ...memory.values];
    if (!keys.length) return { token, weights: [] };
    const inner = keys[0].length;
    const query = times(this.layerNorm(shared ? "norm" : "norm_query", token), this.tensors["attention/query/kernel"], inner);
    const found = new Float32Array(inner);
    const weights = [];
    for (let head = 0; head < heads; head++) {
      const [from, to] = [(head * inner) / heads, ((head + 1) * inner) / heads];
      const scores = keys.map((key) => dot(query, key, from, to) / Math.sqrt(width));
      const row = softmax(scores);
      for (let n = 0; n < row.length; n++) for (let j = from; j < to; j++) found[j] += row[n] * values[n][j];
      weights.push(row.slice(learned, learned + count));
    }
    const moved = times(found, this.tensors["attention/out/kernel"], token.length);
    return { token: token.map((x, j) => x + moved[j]), weights };
  }

  dense(name, x) {
    const [kernel, bias] = ["kernel", "bias"].map((part) => this.tensors[`head/${name}/${part}`]);
    return times(x, kernel, bias.length).map((y, k) => y + bias[k]);
  }
}

/** As kernel.wat; places and distances count numbers of the heap. */
function convolvePlainly(heap, image, weights, out, rows, columns, imageRow, imagePixel, outPixel, run) {
  for (let y = 0; y < rows; y++)
    for (let x = 0; x < columns; x++) {
      let a = 0, b = 0, c = 0, d = 0, weight = weights;
      for (let row = 0; row < KERNEL; row++) {
        const start = image + (y + row) * imageRow + x * imagePixel;
        for (let at = start; at < start + run; at++, weight += 4) {
          const value = heap[at];
          a += value * heap[weight];
          b += value * heap[weight + 1];
          c += value * heap[weight + 2];
          d += value * heap[weight + 3];
        }
      }
      const target = out + (y * columns + x) * outPixel;
      heap[target] = a;
      heap[target + 1] = b;
      heap[target + 2] = c;
      heap[target + 3] = d;
    }
}

/** Mean and biased variance of each channel of maps. */
function moments(maps, channels) {
  const count = (maps.length * maps[0].length) / channels;
  const mean = new Float64Array(channels);
  const variance = new Float64Array(channels);
  for (const map of maps) for (let j = 0; j < map.length; j++) mean[j % channels] += map[j] / count;
  for (const map of maps) for (let j = 0; j < map.length; j++) variance[j % channels] += (map[j] - mean[j % channels]) ** 2 / count;
  return { mean: Float32Array.from(mean), variance: Float32Array.from(variance) };
}

function dot(a, b, from, to) {
  let sum = 0;
  for (let j = from; j < to; j++) sum += a[j] * b[j];
  return sum;
}

function layerNorm(x, scale, shift) {
  const mean = x.reduce((sum, v) => sum + v, 0) / x.length;
  const variance = x.reduce((sum, v) => sum + (v - mean) ** 2, 0) / x.length;
  return x.map((v, k) => ((v - mean) / Math.sqrt(variance + EPSILON)) * scale[k] + shift[k]);
}

/** Runs a generator to its end at once. */
function finish(work) {
  for (;;) {
    const { done, value } = work.next();
    if (done) return value;
  }
}
