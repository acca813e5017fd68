"use strict";
// An adapter by itself, for what a classifier says of images: { logits, style }, two arrays of numbers. Beside it lies shares.js.
//   const buffer = adapter.remember(images);
//   const { logits, weights } = adapter.answer(buffer, image);

class Adapter extends Shares {
  /** model: { steps, most, tensors: [name, start, length], weights: base64 of float32, temperatures: [images, temperature] }. */
  constructor(model) {
    const weights = fromBase64(model.weights);
    const tensors = {};
    for (const [name, start, length] of model.tensors) tensors[name] = new Float32Array(weights, 4 * start, length);
    super({ maps: [], steps: model.steps, most: model.most }, { tensors });
    this.temperatures = model.temperatures;
  }

  /** The buffer of images. */
  remember(images) {
    return images.map(({ logits, style }) => this.keyed(logits, style));
  }

  /** The adapted logits of an image, and its weights [1][images of the buffer]. */
  answer(buffer, { logits, style }) {
    const found = this.attend(buffer, this.keyed(logits, style));
    const temperature = this.temperatureFor(buffer.length);
    return { logits: found.logits.map((x) => x / temperature), weights: found.weights };
  }

  /** Linear in log(1 + count) between those that were measured. */
  temperatureFor(count) {
    const known = this.temperatures;
    const next = known.findIndex(([size]) => size > count);
    if (next < 0) return known[known.length - 1][1];
    const [[low, cool], [high, warm]] = [known[next - 1], known[next]];
    return cool + ((warm - cool) * Math.log((1 + count) / (1 + low))) / Math.log((1 + high) / (1 + low));
  }
}
