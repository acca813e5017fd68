"use strict";
// The causal transformer of icrm: each image reads those before it. The same numbers as cxda_jax/nets/transformer.py gives.

class Sequence {
  /** sizes: { layers, width, heads, context }. tensors: all weights of the model, by name. */
  constructor(sizes, tensors) {
    Object.assign(this, sizes);
    this.tensors = tensors;
  }

  /** What read() keeps of images: for each layer their keys and values. */
  empty() {
    const lists = () => Array.from({ length: this.layers }, () => []);
    return { keys: lists(), values: lists() };
  }

  /** A weight, or that of one layer. */
  part(name, layer) {
    const all = this.tensors[`transformer/${name}`];
    return layer === undefined ? all : all.subarray((layer * all.length) / this.layers, ((layer + 1) * all.length) / this.layers);
  }

  /** x times a kernel plus its bias. */
  dense(name, layer, x) {
    const bias = this.part(`${name}/bias`, layer);
    return times(x, this.part(`${name}/kernel`, layer), bias.length).map((y, k) => y + bias[k]);
  }

  norm(name, layer, x) {
    return layerNorm(x, this.part(`${name}/scale`, layer), this.part(`${name}/bias`, layer));
  }

  /**
   * An image's features behind the images of `cache`, and its weights on them [heads][images], the means over the layers.
   * keep: the image joins them.
   */
  read(token, cache, keep = false) {
    const { layers, width, heads } = this;
    const count = cache.keys[0].length;
    const position = this.part("position").subarray(count * width, (count + 1) * width);
    const size = width / heads;
    const weights = Array.from({ length: heads }, () => new Float64Array(count));
    let x = this.dense("read_in", undefined, token).map((y, k) => y + position[k]);
    for (let layer = 0; layer < layers; layer++) {
      const made = this.dense("blocks/attend", layer, this.norm("blocks/norm1", layer, x));
      const [query, key, value] = [0, 1, 2].map((i) => made.slice(i * width, (i + 1) * width));
      const [keys, values] = [[...cache.keys[layer], key], [...cache.values[layer], value]];
      const found = new Float32Array(width);
      for (let head = 0; head < heads; head++) {
        const [from, to] = [head * size, (head + 1) * size];
        const row = softmax(keys.map((other) => dot(query, other, from, to) / Math.sqrt(size)));
        for (let n = 0; n <= count; n++) for (let j = from; j < to; j++) found[j] += row[n] * values[n][j];
        for (let n = 0; n < count; n++) weights[head][n] += row[n] / layers;
      }
      const attended = this.dense("blocks/out", layer, found);
      x = x.map((y, k) => y + attended[k]);
      const hidden = this.dense("blocks/hidden", layer, this.norm("blocks/norm2", layer, x)).map(gelu);
      const added = this.dense("blocks/shrink", layer, hidden);
      x = x.map((y, k) => y + added[k]);
      if (keep) {
        cache.keys[layer].push(key);
        cache.values[layer].push(value);
      }
    }
    return { features: this.norm("norm", undefined, x), weights: weights.map((row) => [...row]) };
  }
}

function gelu(x) {
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}
