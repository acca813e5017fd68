"use strict";
// Runs the engine of a page in Node, as `node check.js PAGE QUESTIONS`: the page's own scripts on given images, with WebAssembly
// and without. It writes one line of JSON.

const fs = require("node:fs");
const vm = require("node:vm");

const [page, questions] = process.argv.slice(2).map((path) => fs.readFileSync(path, "utf8"));
const held = (id) => page.match(new RegExp(`<script[^>]* id="${id}">([^]*?)</script>`))[1];
vm.runInThisContext(`${held("engine")}\n${held("drawing")}\nObject.assign(globalThis, { Engine, draw, finish, fromBase64 });`);

const { images, queries, fills, strokes } = JSON.parse(questions);
const model = JSON.parse(held("model"));
const [weights, program] = [fromBase64(held("weights")), fromBase64(model.kernel)];
const floats = (text) => Float32Array.from(new Uint8Array(fromBase64(text)), (x) => x / 255);
const [support, asked] = [images, queries].map((list) => list.map(floats));
const answers = {};
for (const used of [program, null]) {
  const engine = new Engine(model, weights, used);
  answers[engine.kind] = fills.map((fill) => {
    const adapted = finish(engine.adapt(support.slice(0, fill)));
    const found = asked.map((image) => engine.predict(adapted, image));
    return { logits: found.map((x) => [...x.logits]), weights: found.map((x) => x.weights) };
  });
}
const drawn = strokes.map((drawing) => Buffer.from(draw(drawing, model.shape[0])).toString("base64"));
console.log(JSON.stringify({ answers, drawn, node: process.version }));
