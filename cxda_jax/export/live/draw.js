"use strict";
// Pen strokes as an image, the same numbers as draw() in cxda_jax/data/readers/unipen.py gives, in float32 as there.

const FINER = 2; // a pixel is the mean of so many by so many

/**
 * strokes: lists of points [x, y], y down, in any unit. side: pixels of the image's sides.
 * Returns a Uint8Array [side, side], dark ink on white. The ink fills a box of 20 of 28 pixels on its longer side.
 */
function draw(strokes, side) {
  const f = Math.fround;
  const pen = (2 * side) / 28;
  const size = (20 * side) / 28 - pen;
  const points = strokes.flat();
  const ends = [0, 1].map((axis) => points.reduce(([low, high], p) => [Math.min(low, f(p[axis])), Math.max(high, f(p[axis]))], [Infinity, -Infinity]));
  const middle = ends.map(([low, high]) => f(f(low + high) / 2));
  const factor = f(size / Math.max(f(ends[0][1] - ends[0][0]), f(ends[1][1] - ends[1][0]), 1e-6));
  const placed = strokes.map((stroke) => stroke.map((p) => [0, 1].map((axis) => f(f(f(f(p[axis]) - middle[axis]) * factor) + f(side / 2)))));
  const lines = placed.flatMap((p) => (p.length > 1 ? p.slice(1).map((end, i) => [p[i], end]) : [[p[0], p[0]]]));
  const fine = side * FINER;
  // The first fine pixel that the ink of a line reaches, and the one behind the last.
  const reached = (a, b) => [Math.floor(FINER * (Math.min(a, b) - pen) - 1), Math.ceil(FINER * (Math.max(a, b) + pen) + 1)].map((at) => Math.min(fine, Math.max(0, at)));
  const nearest = new Float32Array(fine * fine).fill(Infinity); // squared distances from the middle of each fine pixel
  for (const [[x, y], [endX, endY]] of lines) {
    const [alongX, alongY] = [f(endX - x), f(endY - y)];
    const length = Math.max(f(f(alongX * alongX) + f(alongY * alongY)), f(1e-12));
    const [[left, right], [top, bottom]] = [reached(x, endX), reached(y, endY)];
    for (let row = top; row < bottom; row++) {
      const toY = f(f((row + 0.5) / FINER) - y);
      for (let column = left; column < right; column++) {
        const toX = f(f((column + 0.5) / FINER) - x);
        const share = Math.min(1, Math.max(0, f(f(f(toX * alongX) + f(toY * alongY)) / length)));
        const [offX, offY] = [f(toX - f(share * alongX)), f(toY - f(share * alongY))];
        const square = f(f(offX * offX) + f(offY * offY));
        const at = row * fine + column;
        if (square < nearest[at]) nearest[at] = square;
      }
    }
  }
  // The share of a fine pixel that a wide line covers.
  const ink = nearest.map((square) => Math.min(1, Math.max(0, f(0.5 + f(FINER * f(f(pen / 2) - f(Math.sqrt(square))))))));
  const image = new Uint8Array(side * side);
  for (let row = 0; row < side; row++)
    for (let column = 0; column < side; column++) {
      const at = FINER * (row * fine + column);
      const mean = f(f(f(ink[at] + ink[at + 1]) + f(ink[at + fine] + ink[at + fine + 1])) / 4);
      image[row * side + column] = roundHalfEven(f(255 * f(1 - mean)));
    }
  return image;
}

function roundHalfEven(x) {
  const low = Math.floor(x);
  return x - low === 0.5 ? low + (low % 2) : Math.round(x);
}

/** The drawings of a recorded hand: for each its strokes, as lists of points. See read_hands() in web.py. */
function drawingsOf(bytes) {
  const drawings = [];
  for (let at = 0; at < bytes.length; ) {
    const strokes = [];
    for (let left = bytes[at++]; left > 0; left--) {
      const stroke = [];
      for (let points = bytes[at++]; points > 0; points--, at += 2) stroke.push([bytes[at], bytes[at + 1]]);
      strokes.push(stroke);
    }
    drawings.push(strokes);
  }
  return drawings;
}
