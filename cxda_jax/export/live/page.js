// The live page: a pad to draw on, recorded hands, the buffer, and the answers before and after adapting.
// An item is an image: its strokes if it was drawn, its pixels, and its label if it is known.

const percent = (x) => `${(100 * x).toFixed(1)} %`;
const images = (count) => `${count} ${count === 1 ? "image" : "images"}`;
const SLICE = 12; // milliseconds of work before the page can do other things
const FILLED = 40; // drawings of a recorded hand that go into the buffer; the rest are questions
const MOST = 500; // images in the buffer
const FIRST = 1; // which recorded hand the page opens with: it gains as much as the median of all

const began = performance.now();
const model = JSON.parse(byId("model").textContent);
const engine = new Engine(model, fromBase64(byId("weights").textContent), fromBase64(model.kernel));
const side = model.shape[0];
const before = finish(engine.adapt([]));

let strokes = []; // on the pad, in its own units
let query = null;
let buffer = []; // the newest last
let questions = [];
let wanted = ""; // the class that the visitor is asked to draw
let used = 0; // so many of the newest images
let after = before;
let seenBy = []; // the images that `after` is adapted to
let changes = 0;

const best = (logits) => model.classes[logits.indexOf(Math.max(...logits))];

/** Lets the browser do what waits. */
function pause() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(0);
  });
}

// Images

function itemOf(bytes, label = "", drawn = null) {
  return { bytes, pixels: Float32Array.from(bytes, (x) => x / 255), label, strokes: drawn };
}

function drawnItem(drawn, label = "") {
  return itemOf(draw(drawn, side), label, drawn);
}

function paint(canvas, bytes) {
  canvas.width = canvas.height = side;
  const data = new ImageData(side, side);
  bytes.forEach((x, i) => data.data.set([x, x, x, 255], 4 * i));
  canvas.getContext("2d").putImageData(data, 0, 0);
}

function picture(item) {
  const canvas = make("canvas", { class: "picture", "aria-hidden": "true" });
  paint(canvas, item.bytes);
  return canvas;
}

/** A file as the model's training had its images: padded, cropped or squashed to a square, and grey. */
async function fileItem(file) {
  const image = await createImageBitmap(file);
  const canvas = make("canvas", { width: side, height: side });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = `rgb(${model.background.join(" ")})`;
  context.fillRect(0, 0, side, side);
  context.imageSmoothingQuality = "high";
  const choose = { pad: Math.min, crop: Math.max }[model.fit];
  const ratio = choose && choose(side / image.width, side / image.height);
  const [width, height] = choose ? [image.width * ratio, image.height * ratio] : [side, side];
  context.drawImage(image, (side - width) / 2, (side - height) / 2, width, height);
  const { data } = context.getImageData(0, 0, side, side);
  return itemOf(Uint8Array.from({ length: side * side }, (_, i) => Math.round(0.299 * data[4 * i] + 0.587 * data[4 * i + 1] + 0.114 * data[4 * i + 2])));
}

// The pad

const pad = byId("pad");
const ink = pad.getContext("2d");

function paintPad() {
  ink.clearRect(0, 0, pad.width, pad.height);
  ink.lineWidth = pad.width / 20;
  ink.lineCap = ink.lineJoin = "round";
  ink.strokeStyle = ink.fillStyle = "#1d2228";
  if (query && !query.strokes) {
    ink.imageSmoothingEnabled = false;
    const small = picture(query);
    ink.drawImage(small, 0, 0, pad.width, pad.height);
  }
  for (const stroke of strokes) {
    ink.beginPath();
    ink.moveTo(...stroke[0]);
    for (const point of stroke.length > 1 ? stroke.slice(1) : stroke) ink.lineTo(...point);
    ink.stroke();
  }
}

/** Strokes of any unit, in the middle of the pad. */
function onPad(drawn) {
  const points = drawn.flat();
  const [left, top, right, bottom] = [Math.min, Math.max].flatMap((end) => [0, 1].map((axis) => end(...points.map((p) => p[axis]))));
  const scale = (0.72 * pad.width) / Math.max(right - left, bottom - top, 1e-6);
  return drawn.map((stroke) => stroke.map(([x, y]) => [(x - (left + right) / 2) * scale + pad.width / 2, (y - (top + bottom) / 2) * scale + pad.height / 2]));
}

function setUpPad() {
  let drawing = null; // the pointer that draws
  const place = ({ clientX, clientY }) => {
    const box = pad.getBoundingClientRect();
    return [((clientX - box.left - pad.clientLeft) * pad.width) / pad.clientWidth, ((clientY - box.top - pad.clientTop) * pad.height) / pad.clientHeight];
  };
  pad.addEventListener("pointerdown", (event) => {
    if (drawing !== null || event.button !== 0) return;
    event.preventDefault();
    drawing = event.pointerId;
    pad.setPointerCapture(drawing);
    if (query && (!query.strokes || query.recorded)) strokes = [];
    query = null;
    strokes.push([place(event)]);
    paintPad();
  });
  pad.addEventListener("pointermove", (event) => {
    if (event.pointerId !== drawing) return;
    const moved = event.getCoalescedEvents?.() ?? [];
    for (const each of moved.length ? moved : [event]) strokes.at(-1).push(place(each));
    paintPad();
  });
  const end = (event) => {
    if (event.pointerId !== drawing) return;
    drawing = null;
    ask(drawnItem(strokes, wanted));
  };
  pad.addEventListener("pointerup", end);
  pad.addEventListener("pointercancel", end);
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"])
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      pad.classList.toggle("over", kind === "dragenter" || kind === "dragover");
      if (kind === "drop") openFiles(event.dataTransfer.files);
    });
}

/** The first image is asked about; if there are several, all others go into the buffer. */
async function openFiles(list) {
  const found = [];
  for (const file of list) {
    try {
      found.push(await fileItem(file));
    } catch {
      byId("said").textContent = `${file.name} is no image that this browser can read.`;
    }
  }
  if (!found.length) return;
  ask(found[0]);
  if (found.length > 1) remember(found.slice(1));
}

// Answers

function ask(item, recorded = false) {
  query = item;
  if (item) item.recorded = recorded;
  strokes = item?.strokes ? (recorded ? onPad(item.strokes) : item.strokes) : [];
  paintPad();
  if (item) paint(byId("seen"), item.bytes);
  else byId("seen").getContext("2d").clearRect(0, 0, side, side);
  for (const option of byId("questions").children) option.setAttribute("aria-selected", String(option.item === item));
  byId("add").disabled = byId("clear").disabled = !item;
  answer();
}

function odds(logits) {
  return softmax([...logits]);
}

/** The likeliest classes, and whether the first is right. */
function showAnswer(box, shares, label) {
  const order = shares.map((_, k) => k).sort((a, b) => shares[b] - shares[a]).slice(0, 3);
  const name = make("div", { class: "name", text: model.classes[order[0]] });
  if (label) {
    const right = model.classes[order[0]] === label;
    name.append(make("span", { class: `mark ${right ? "right" : "wrong"}`, text: right ? "✓ right" : `✗ it is ${label}` }));
  }
  const rows = order.flatMap((k) => {
    const bar = make("i");
    bar.style.width = `${100 * shares[k]}%`;
    return [make("span", { text: model.classes[k] }), make("span", { class: "bar", "aria-hidden": "true", children: [bar] }), make("span", { text: percent(shares[k]) })];
  });
  box.replaceChildren(name, make("div", { class: "odds", children: rows }));
  return `${model.classes[order[0]]}, ${percent(shares[order[0]])}`;
}

/** Mean weight over the heads, for each image that the answer is adapted to. */
function attention(weights) {
  return seenBy.map((_, n) => weights.reduce((sum, head) => sum + head[n], 0) / weights.length);
}

function answer() {
  byId("count").textContent = images(seenBy.length);
  if (!query) {
    for (const id of ["before", "after"]) byId(id).replaceChildren(make("p", { class: "hint", text: "Nothing is drawn." }));
    byId("said").textContent = "Draw a character, or choose a recorded drawing.";
    showWeights([]);
    return;
  }
  const start = performance.now();
  const [first, second] = [before, after].map((adapted) => engine.predict(adapted, query.pixels));
  live.predictMs = (performance.now() - start) / 2;
  live.logits = { before: [...first.logits], after: [...second.logits] };
  query.right = [first, second].map(({ logits }) => best(logits) === query.label);
  const told = [["before", first], ["after", second]].map(([id, found]) => showAnswer(byId(id), odds(found.logits), query.label));
  byId("said").textContent = `Before: ${told[0]}. After, with ${images(seenBy.length)}: ${told[1]}.`;
  showWeights(second.weights.length ? attention(second.weights) : []);
  showSpeed();
}

function showSpeed() {
  const encoded = live.encodeMs === undefined ? "" : `encoding ${images(live.encoded)} took ${live.encodeMs.toFixed(0)} ms, `;
  byId("speed").textContent = `Here, in ${engine.kind}: ${encoded}an answer ${live.predictMs.toFixed(1)} ms.`;
}

/** A wide border marks an image of the buffer that the answer looked at. */
function showWeights(weights) {
  const most = Math.max(...weights, 0);
  for (const button of byId("buffer").children) {
    const weight = weights[seenBy.indexOf(button.item)] ?? 0;
    button.style.setProperty("--weight", most ? weight / most : 0);
    button.classList.toggle("most", weight > 0 && weight === most);
    const told = weights.length && seenBy.includes(button.item) ? `, attention ${percent(weight)}` : "";
    button.setAttribute("aria-label", `Image ${buffer.indexOf(button.item) + 1} of the buffer${told}. Press to remove it`);
  }
  const looked = `A wide border marks what the answer looked at, and the star marks the most (${percent(most)}).`;
  const elsewhere = model.learned || model.shares ? "what it learned in training" : model.sequence ? "the drawing itself" : "";
  const rest = elsewhere ? ` ${percent(1 - weights.reduce((a, b) => a + b, 0))} of its attention is on ${elsewhere}.` : "";
  const legend = !model.memory ? "This method does not look at single images." : weights.length && seenBy.length ? looked + rest : "";
  byId("legend").textContent = `${legend} Press an image to remove it.`.trim();
}

// The buffer

/** Encodes the images that are used, some at a time. A later change makes it stop. */
async function encode() {
  const mine = ++changes;
  const chosen = buffer.slice(buffer.length - used);
  const work = engine.adapt(chosen.map((item) => item.pixels));
  let spent = 0;
  for (;;) {
    const start = performance.now();
    let step;
    do step = work.next();
    while (!step.done && performance.now() - start < SLICE);
    spent += performance.now() - start;
    if (step.done) {
      [after, seenBy] = [step.value, chosen];
      [live.encodeMs, live.encoded] = [spent, chosen.length];
      break;
    }
    await pause();
    if (mine !== changes) return;
  }
  answer();
  live.encodedChange = mine;
  await score(mine);
}

/** How many of the visitor's drawings were right when they were drawn, and whether the earlier ones helped. */
function scoreOwn() {
  const own = buffer.filter((item) => item.label && item.right);
  if (!own.length) return wanted || !buffer.length ? "" : "The page does not know what you drew, so it cannot say whether it helps.";
  const [first, second] = [0, 1].map((i) => own.filter((item) => item.right[i]).length);
  const gain = second - first;
  const changed = own.filter(({ right }) => right[0] !== right[1]).length;
  const verdict = gain > 0 ? "helped" : gain < 0 ? "did harm" : "did not help";
  const chance = gain && (Math.abs(gain) - 1) ** 2 <= 4 * changed ? ", but this may be chance" : ""; // McNemar's test, 95 %
  return `Of your ${images(own.length)}, ${first} were right before and ${second} after. So far your drawings ${verdict}${chance}.`;
}

/** How many recorded questions are right before and after. */
async function score(mine) {
  const asked = questions.filter((item) => !buffer.includes(item));
  byId("score").textContent = byId("hand").value ? "" : scoreOwn();
  if (!asked.length) return;
  const right = [0, 0];
  for (const item of asked) {
    for (const [i, adapted] of [before, after].entries()) {
      const { logits } = engine.predict(adapted, item.pixels);
      right[i] += best(logits) === item.label;
    }
    await pause();
    if (mine !== changes) return;
  }
  byId("score").textContent = `Of the ${asked.length} recorded drawings, ${right[0]} are right before and ${right[1]} after.`;
}

function showBuffer() {
  const focused = [...byId("buffer").children].indexOf(document.activeElement);
  const tiles = buffer.map((item, i) => {
    const button = make("button", { type: "button", tabindex: -1, children: [picture(item)] });
    button.item = item;
    button.classList.toggle("unused", i < buffer.length - used);
    return button;
  });
  byId("buffer").replaceChildren(...tiles);
  const next = tiles[Math.min(Math.max(focused, 0), tiles.length - 1)];
  if (next) next.tabIndex = 0;
  if (focused >= 0) (next ?? byId("hand")).focus();
  Object.assign(byId("size"), { max: buffer.length, value: used, disabled: !buffer.length });
  byId("used").textContent = `${used} of ${images(buffer.length)}`;
  byId("empty").disabled = !buffer.length;
}

function change(images, count) {
  buffer = images.slice(-MOST);
  used = Math.min(count, buffer.length);
  showBuffer();
  return encode();
}

/** Takes images in; all stay used, or as many as the slider says. */
function remember(items) {
  return change([...buffer, ...items], used === buffer.length ? used + items.length : used);
}

/** Arrow keys, Home and End move between the children of a box, of which Tab reaches one. */
function rove(box, chosen) {
  box.addEventListener("keydown", (event) => {
    const all = [...box.children];
    const at = all.indexOf(document.activeElement);
    const steps = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 };
    const next = all[steps[event.key]];
    if (event.key in steps) event.preventDefault();
    if (!next) return;
    for (const each of all) each.tabIndex = each === next ? 0 : -1;
    next.focus();
    chosen?.(next);
  });
}

// Recorded hands

const hands = JSON.parse(byId("hands").textContent).hands.map(({ name, labels, strokes: packed, button }) => {
  const drawings = drawingsOf(new Uint8Array(fromBase64(packed)));
  const label = (i) => (model.classes.includes(labels[i]) ? labels[i] : "");
  return { name, button, items: () => drawings.map((drawing, i) => drawnItem(drawing, label(i))) };
});

/** Names the next class to draw, if the visitor writes and wants to be asked. */
function want() {
  const kind = new RegExp(byId("kind").value);
  const named = byId("hand").value ? [] : model.classes.filter((name) => kind.test(name));
  wanted = named[Math.floor(Math.random() * named.length)] ?? "";
  const sorts = { "digit ": /^\d$/, "small ": /^[a-z]$/, "capital ": /^[A-Z]$/ };
  const sort = Object.keys(sorts).find((name) => sorts[name].test(wanted)) ?? "";
  byId("wanted").textContent = wanted && `Draw: ${sort}${wanted}`;
}

function choose(value) {
  byId("hand").value = value;
  return chooseHand();
}

/** Shows a part of the page, if it is out of sight. */
function bring(id) {
  byId(id).scrollIntoView({ block: "nearest", behavior: calm() ? "auto" : "smooth" });
}

/** Whether the visitor wants less motion. */
function calm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/** A recorded drawing that adapting corrects, if there is one. */
function corrected() {
  const told = (item, adapted) => best(engine.predict(adapted, item.pixels).logits) === item.label;
  return questions.find((item) => !told(item, before) && told(item, after));
}

async function chooseHand() {
  const hand = hands[byId("hand").value];
  byId("guide").hidden = Boolean(hand);
  want();
  const items = hand?.items() ?? [];
  questions = items.slice(FILLED);
  const options = questions.map((item, i) => {
    const option = make("div", { role: "option", tabindex: i ? -1 : 0, "aria-label": `Drawing ${i + 1}, ${item.label || "no label"}`, children: [picture(item)] });
    option.item = item;
    option.addEventListener("click", () => ask(item, true));
    return option;
  });
  byId("questions").replaceChildren(...options);
  byId("asking").querySelector(".hint").hidden = byId("questions").hidden = !options.length;
  const done = change(items.slice(0, FILLED), FILLED);
  ask(questions[0] ?? null, true);
  const asked = questions;
  await done;
  const example = asked === questions && query === asked[0] && corrected();
  if (example) ask(example, true);
}

// The tour

/** Plays until somebody presses anything. Who wants less motion sees the buffer fill at once, and no scrolling. */
async function tour() {
  const stop = new AbortController();
  const { signal } = stop;
  for (const kind of ["pointerdown", "keydown"]) document.addEventListener(kind, () => stop.abort(), { signal, capture: true });
  const tell = (seconds, id, text) => {
    signal.throwIfAborted();
    byId("tour").textContent = text;
    byId(id).scrollIntoView({ behavior: calm() ? "auto" : "smooth" });
    return new Promise((resolve, reject) => {
      signal.addEventListener("abort", reject);
      setTimeout(resolve, seconds * live.second);
    });
  };
  byId("tour").hidden = !(byId("play").hidden = true);
  try {
    await choose(FIRST);
    const told = (item, adapted) => best(engine.predict(adapted, item.pixels).logits);
    const item = query;
    await change(buffer, 0);
    await tell(8, "answers", `The model never saw this hand. The buffer is empty. For ${item.label} it says ${told(item, after)}.`);
    for (const count of calm() ? [FILLED] : [1, 2, 5, 10, 20, FILLED]) {
      await change(buffer, count);
      await tell(3, "answers", `With ${images(count)} of this hand in the buffer, without labels, the model says ${told(item, after)}.`);
    }
    await tell(10, "answers", `${byId("score").textContent} Adapting helps some answers and harms others.`);
    await choose(hands.findIndex(({ button }) => button));
    await tell(12, "answers", `Another hand writes digits only, so the buffer holds no letters. ${byId("score").textContent}`);
    await choose("");
    await tell(10, "asking", "Your turn: draw what the page asks for, and add it. The page says whether your drawings help.");
  } catch (reason) {
    if (!signal.aborted) throw reason;
  } finally {
    stop.abort();
    byId("tour").hidden = !(byId("play").hidden = false);
    if (byId("hand").value) change(buffer, buffer.length);
  }
}

function setUp() {
  for (const [i, { name, button }] of hands.entries()) {
    byId("hand").append(make("option", { value: i, text: `${name}, recorded` }));
    if (!button) continue;
    byId("myself").before(make("button", { type: "button", text: button }));
    byId("myself").previousSibling.addEventListener("click", () => choose(i).then(() => bring("answers")));
  }
  byId("hand").append(make("option", { value: "", text: "Myself: start with an empty buffer" }));
  byId("hand").value = Math.min(FIRST, hands.length - 1);
  for (const id of ["hand", "kind"]) byId(id).addEventListener("change", chooseHand);
  byId("myself").addEventListener("click", () => choose("").then(() => byId("asking").scrollIntoView()));
  byId("play").addEventListener("click", tour);
  byId("size").addEventListener("input", () => change(buffer, Number(byId("size").value)));
  byId("empty").addEventListener("click", () => change([], 0));
  byId("clear").addEventListener("click", () => ask(null));
  byId("add").addEventListener("click", () => {
    const added = query;
    want();
    ask(null);
    remember([added]);
  });
  byId("files").addEventListener("change", async () => {
    await openFiles(byId("files").files);
    byId("files").value = "";
  });
  byId("buffer").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const kept = buffer.filter((item) => item !== button.item);
    change(kept, button.classList.contains("unused") ? used : used - 1);
  });
  rove(byId("buffer"));
  rove(byId("questions"), (option) => ask(option.item, true));
  setUpPad();
  for (const [name, value] of model.facts) byId("facts").append(make("dt", { text: name }), make("dd", { text: value }));
}

// For the console, and for tests. A second of the tour has 1000 ms.
const live = { engine, second: 1000, state: () => ({ query, buffer, questions, used, encodedChange: live.encodedChange, changes }) };

byId("dead").remove();
setUp();
chooseHand().then(() => (live.ready = true));
live.loadMs = performance.now() - began;
