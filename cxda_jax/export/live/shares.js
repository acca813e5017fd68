"use strict";
// The adapter of cxda_shares: the buffer says which classes there are, and how the network errs on such images. The numbers
// are those of cxda_jax/nets/shares.py. Below it are functions of all scripts.

const LARGEST = 5; // numbers of style are clipped there
const FLOOR = 1e-12;
const SMALLEST = 1e-6; // of what divides, or whose logarithm is taken, in evidence

class Shares {
  /** sizes: { maps, steps, most }: the layers whose maps make the style; the steps of EM; of more images in the buffer, so
   * many count for a query. engine: the network. */
  constructor(sizes, engine) {
    Object.assign(this, sizes);
    this.engine = engine;
  }

  part(name) {
    return this.engine.tensors[`adapter/${name}`];
  }

  /** The network's logits of an image, and its key. Its style is that of logits_and_style() in cxda_shares.py. */
  known(pixels) {
    const { engine } = this;
    let map = engine.normalise(pixels);
    const found = [moments([map], engine.model.shape[2])];
    for (const [i, statistics] of engine.running.entries()) {
      const made = engine.normalised(i, engine.convolved(i, map), statistics);
      if (this.maps.includes(i)) found.push(moments([made], engine.layers[i].out));
      map = engine.pooled(i, made);
    }
    return this.keyed([...engine.classify(map)], found.flatMap(({ mean, variance }) => [...mean, ...variance.map(Math.sqrt)]));
  }

  keyed(logits, style) {
    const [mean, std, kernel] = ["mean", "std", "kernel"].map((name) => this.part(name));
    const scaled = style.map((x, k) => Math.min(LARGEST, Math.max(-LARGEST, (x - mean[k]) / std[k])) / Math.sqrt(style.length));
    return { ...this.corrected(logits, style), key: [...times(scaled, kernel, kernel.length / style.length)] };
  }

  /** The logits after the correction by the image's own style, if there is one, and what common() reads. */
  corrected(logits, style) {
    const names = ["scale", "bias", "weights", "common", "mean", "std"];
    const [scale, bias, weights, common, mean, std] = names.map((name) => this.part(`own/${name}`));
    if (!scale) return { logits };
    const scaled = style.map((x, k) => Math.min(LARGEST, Math.max(-LARGEST, (x - mean[k]) / std[k])));
    const [moved, moves] = [weights, common].map((matrix) => times(scaled, matrix, logits.length));
    return { logits: logits.map((x, k) => x * scale[0] + bias[k] + moved[k]), moves: [...moves] };
  }

  /** Stops after each image. */
  *adapt(images) {
    const buffer = [];
    for (const pixels of images) {
      buffer.push(this.known(pixels));
      yield;
    }
    return buffer;
  }

  /** Logits of an image, and its weights [1][images of the buffer]. */
  predict(buffer, pixels) {
    return this.attend(buffer, this.known(pixels));
  }

  /** All images of the buffer have a weight. Of those that weigh the same, the first ones are chosen, as lax.top_k does. */
  attend(buffer, { logits, key }) {
    if (!buffer.length) return { logits, weights: [] };
    const [near, mass] = [this.part("near")[0], Math.exp(this.part("log_m")[0])];
    const weights = buffer.map((image) => Math.fround(sigmoid(near - image.key.reduce((sum, x, j) => sum + (x - key[j]) ** 2, 0))));
    const order = weights.map((_, i) => i);
    const chosen = order.length > this.most ? order.sort((i, j) => weights[j] - weights[i] || i - j).slice(0, this.most) : order;
    const total = weights.reduce((a, b) => a + b) + mass;
    return {
      logits: this.adapted(chosen.map((i) => buffer[i]), chosen.map((i) => weights[i]), logits),
      weights: [weights.map((a) => a / total)],
    };
  }

  adapted(buffer, weights, logits) {
    const [logT, logN, power] = ["log_t", "log_n", "strength"].map((name) => this.part(name)[0]);
    const sharpness = Math.exp(-logT);
    const count = weights.reduce((a, b) => a + b);
    const mean = times(weights, buffer.flatMap((image) => image.key), buffer[0].key.length).map((x) => x / (count + FLOOR));
    const [offset, trained] = [this.part("offset"), this.part("shares")];
    const part = count / (count + Math.exp(logN));
    let moved = times(mean, this.part("bias"), logits.length).map((x, k) => part * (x + offset[k]));
    const answers = (given) => given.map((x, k) => x * sharpness + moved[k]);
    const answered = () => buffer.map((image) => softmax(answers(image.logits)));
    let posteriors = answered();
    const after = buffer[0].moves ? Math.floor(this.steps / 2) : 0;
    let { ratio, counts } = this.estimated(posteriors, weights, trained, trained.map(() => 1), this.steps - after);
    if (buffer[0].moves) {
      const common = this.common(buffer, weights, counts);
      moved = moved.map((x, k) => x - sharpness * common[k]);
      posteriors = answered();
      ({ ratio } = this.estimated(posteriors, weights, trained, ratio, after));
    }
    const strength = 2 * sigmoid(power + this.belief(posteriors, weights, ratio, trained));
    const factors = ratio.map((x, k) => moved[k] + strength * Math.log(x));
    const least = this.part("log_floor") ? Math.max(...factors) + this.part("log_floor")[0] : -Infinity;
    return logits.map((x, k) => x * sharpness + Math.max(factors[k], least));
  }

  /** The shares of the classes by so many steps of EM from `ratio` on, as ratios to those in training, and how many images of each class they make. */
  estimated(posteriors, weights, trained, ratio, steps) {
    const mass = Math.exp(this.part("log_m")[0]);
    const count = weights.reduce((a, b) => a + b);
    let counts;
    for (let step = 0; step < steps; step++) {
      const rows = posteriors.flatMap((posterior) => {
        const odds = posterior.map((p, k) => p * ratio[k]);
        const sum = odds.reduce((a, b) => a + b) + FLOOR;
        return odds.map((x) => x / sum);
      });
      counts = times(weights, rows, ratio.length);
      ratio = counts.map((x, k) => (x / trained[k] + mass) / (count + mass));
    }
    return { ratio, counts };
  }

  /** What the common part of the styles moves, beyond what their classes explain. */
  common(buffer, weights, counts) {
    const all = times(weights, buffer.flatMap((image) => image.moves), counts.length);
    const explained = times(counts, this.part("own/content"), counts.length);
    const count = weights.reduce((a, b) => a + b) + Math.exp(this.part("log_l")[0]);
    return all.map((x, k) => (x - explained[k]) / count);
  }

  /** How far the evidence moves the strength of the shares, as in evidence() of shares.py; 0 where it is not weighed. */
  belief(posteriors, weights, ratio, trained) {
    const [kernel, bias, out] = ["evidence_kernel", "evidence_bias", "belief"].map((name) => this.part(name));
    if (!kernel) return 0;
    const [classes, whole] = [trained.length, Math.log(trained.length)];
    const count = weights.reduce((a, b) => a + b);
    const mean = (of) => posteriors.reduce((sum, p, i) => sum + weights[i] * of(p), 0) / Math.max(count, SMALLEST);
    const answer = times(weights, posteriors.flat(), classes).map((x) => x / Math.max(count, SMALLEST));
    const shares = trained.map((x, k) => x * ratio[k]);
    const apart = (q) => q.reduce((sum, x, k) => sum + x * Math.log(x / trained[k] + SMALLEST), 0) / whole;
    const likelier = mean((p) => Math.log(p.reduce((sum, x, k) => sum + x * ratio[k], 0) + SMALLEST));
    const squares = (p) => p.reduce((sum, x) => sum + x * x, 0);
    const found = [
      Math.log1p(count) - 3, 2 * apart(shares) - 1, (8 * likelier) / whole - 1, 4 * apart(answer), 4 * mean(squares) - 2,
      2 * squares(shares) - 1,
    ];
    return times(found, kernel, bias.length).reduce((sum, x, i) => sum + Math.tanh(x + bias[i]) * out[i], 0);
  }
}

function sigmoid(x) {
  return 1 / (1 + Math.exp(-x));
}

/** A vector times a matrix [length, columns]. */
function times(x, matrix, columns) {
  const made = new Float64Array(columns);
  for (let i = 0; i < x.length; i++) for (let j = 0; j < columns; j++) made[j] += x[i] * matrix[i * columns + j];
  return Float32Array.from(made);
}

function softmax(scores) {
  const most = scores.reduce((a, b) => Math.max(a, b));
  const odds = scores.map((x) => Math.exp(x - most));
  const sum = odds.reduce((a, b) => a + b);
  return odds.map((x) => x / sum);
}

/** The bytes of a text in base64. */
function fromBase64(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
}
