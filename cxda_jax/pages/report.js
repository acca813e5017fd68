// Sortable tables and the attention explorer of a report.

// Tables

function cellKey(cell, numeric) {
  const text = (numeric ? cell?.dataset.value : cell?.dataset.value || cell?.textContent)?.trim();
  if (!text || (numeric && !Number.isFinite(Number(text)))) return null;
  return numeric ? Number(text) : text;
}

/** Sorts the body's rows by a column; equal rows keep their order and missing values come last either way. */
function sortRows(body, column, numeric, direction) {
  const keyed = [...body.rows].map((row) => [cellKey(row.cells[column], numeric), row]);
  const compare = numeric ? (a, b) => a - b : (a, b) => a.localeCompare(b, "en", { numeric: true });
  keyed.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : direction * compare(a, b)));
  body.append(...keyed.map(([, row]) => row));
}

function setUpTable(table) {
  const head = table.tHead?.rows[table.tHead.rows.length - 1];
  for (const [column, cell] of [...(head?.cells ?? [])].entries()) {
    if ("unsorted" in cell.dataset) continue;
    const bodies = [...table.tBodies];
    const numeric = bodies.some((body) => [...body.rows].some((row) => cellKey(row.cells[column], true) !== null));
    if (numeric) for (const row of [head, ...bodies.flatMap((body) => [...body.rows])]) row.cells[column]?.classList.add("number");
    const button = make("button", { type: "button", children: [...cell.childNodes] });
    if (!cell.textContent.trim() && !button.textContent.trim()) button.setAttribute("aria-label", `column ${column + 1}`);
    button.addEventListener("click", () => {
      const up = cell.getAttribute("aria-sort") !== "ascending";
      for (const other of head.cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      for (const body of bodies) sortRows(body, column, numeric, up ? 1 : -1);
    });
    cell.append(button);
  }
}

// Attention explorer

const COLOURS = 10;
const SHAPES = ["round", "square", "cut"];

/** A, B, ... Z, A2, B2, ... */
const letter = (i) => String.fromCharCode(65 + (i % 26)) + (i < 26 ? "" : Math.floor(i / 26) + 1);
const ratio = (x) => `${x.toFixed(2)} x`;
const percent = (x) => `${Math.round(100 * x)} %`;

/** Little-endian uint16 numbers in base64. */
function decode(data) {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  return Array.from({ length: bytes.length / 2 }, (_, i) => bytes[2 * i] + 256 * bytes[2 * i + 1]);
}

/** A domain by letter, colour, shape and name; the query's own has a star. */
function domainMark(task, i) {
  const shape = SHAPES[Math.floor(i / COLOURS) % SHAPES.length];
  const children = [make("b", { text: letter(i) }), ` ${task.domains[i]}`];
  if (i === 0) children.unshift(make("span", { class: "star", text: "★", role: "img", "aria-label": "own domain" }), " ");
  return make("span", { class: `domain colour-${i % COLOURS} ${shape}`, children });
}

/** Image i of a task's sheet: support images first, then queries. */
function picture(task, i, wanted) {
  const { width, height, columns, tiny } = task.sheet;
  const exact = wanted / Math.max(width, height);
  const scale = tiny ? Math.max(1, Math.round(exact)) : exact;
  const element = make("span", { class: tiny ? "picture tiny" : "picture", "aria-hidden": "true" });
  const x = (i % columns) * (width + 2) + 1;
  const y = Math.floor(i / columns) * (height + 2) + 1;
  element.style.width = `${width * scale}px`;
  element.style.height = `${height * scale}px`;
  element.style.backgroundPosition = `${-x * scale}px ${-y * scale}px`;
  element.style.backgroundSize = `${columns * (width + 2) * scale}px auto`;
  return element;
}

class Explorer {
  constructor(tasks) {
    this.tasks = tasks;
    this.query = 0;
    const root = byId("explorer");
    const control = (name, label) => {
      const select = make("select", { id: name });
      select.addEventListener("change", () => (name === "task" ? this.openTask() : this.show()));
      this[name] = select;
      return make("label", { children: [`${label} `, select] });
    };
    this.queries = make("div", { id: "queries", role: "listbox", "aria-label": "Queries", "aria-orientation": "horizontal" });
    this.queries.addEventListener("keydown", (event) => this.onKey(event));
    this.chosen = make("div", { id: "chosen" });
    this.said = make("p", { id: "said", role: "status", "aria-live": "polite" });
    this.ranking = make("ol", { id: "ranking", role: "list", "aria-label": "Support images by weight" });
    root.append(
      make("div", { class: "controls", children: [control("task", "Task")] }),
      make("h3", { text: "Queries" }),
      this.queries,
      this.chosen,
      make("h3", { text: "Support images by weight" }),
      make("div", { class: "controls", children: [control("head", "Attention head"), control("domain", "Show")] }),
      this.said,
      this.ranking,
    );
    this.task.append(...tasks.map((task, i) => make("option", { value: i, text: task.name })));
    this.task.parentElement.hidden = !tasks[0].name;
    root.hidden = false;
    this.openTask();
  }

  get current() {
    return this.tasks[Number(this.task.value)];
  }

  openTask() {
    const task = this.current;
    const { heads, data, scale } = task.weights;
    task.numbers ??= decode(data).map((number) => number * scale);
    if (task.sheet.data) byId("explorer").style.setProperty("--sheet", `url(${task.sheet.data})`);
    const kept = Number(this.head.value || 0) <= heads ? this.head.value || "0" : "0";
    const names = Array.from({ length: heads + 1 }, (_, h) => (h ? `head ${h}` : `mean over ${heads} heads`));
    this.head.replaceChildren(...names.map((text, value) => make("option", { value, text })));
    this.head.value = kept;
    const held = task.domains.map((_, i) => task.support.domains.filter((d) => d === i).length);
    const everything = make("option", { value: "", text: `all ${task.support.count} images` });
    const options = held.map((count, value) =>
      make("option", { value, text: `${value ? "" : "★ "}${letter(value)} ${task.domains[value]} (${count})` }),
    );
    this.domain.replaceChildren(everything, ...options);
    this.domain.parentElement.hidden = !task.domains.length;
    this.queries.replaceChildren(...Array.from({ length: task.query.count }, (_, i) => this.option(task, i)));
    this.choose(0, false);
  }

  option(task, i) {
    const label = task.query.labels[i];
    const answers = task.query.answers.map(([, given]) => given[i]);
    const right = answers.filter((answer) => answer === label).length;
    const kind = label === undefined ? "answered" : right === answers.length ? "right" : right ? "mixed" : "wrong";
    const said = label === undefined ? [...new Set(answers)].join(" → ") : `${right} of ${answers.length} right`;
    const words = answers.length ? said : "";
    const children = [picture(task, task.support.count + i, 48), make("span", { text: `${i + 1}` })];
    if (words) children.push(make("span", { class: kind, text: words }));
    const title = label ?? task.query.files[i];
    const name = `query ${i + 1}, ${label === undefined ? "file" : "label"} ${title}${words && `, ${words}`}`;
    const option = make("div", { role: "option", "aria-label": name, title, children });
    option.addEventListener("click", () => this.choose(i));
    return option;
  }

  onKey(event) {
    const [before, after, last] = [this.query - 1, this.query + 1, this.queries.children.length - 1];
    const targets = { ArrowLeft: before, ArrowUp: before, ArrowRight: after, ArrowDown: after, Home: 0, End: last };
    if (!(event.key in targets) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.choose(Math.min(last, Math.max(0, targets[event.key])));
  }

  choose(i, focus = true) {
    this.query = i;
    for (const [j, option] of [...this.queries.children].entries()) {
      option.setAttribute("aria-selected", String(i === j));
      option.tabIndex = i === j ? 0 : -1;
    }
    if (focus) this.queries.children[i].focus();
    this.showQuery();
    this.show();
  }

  showQuery() {
    const { current: task, query } = this;
    const label = task.query.labels[query];
    const facts = [];
    const tell = (name, ...children) => facts.push(make("dt", { text: name }), make("dd", { children }));
    if (label !== undefined) tell("True label", label);
    if (task.domains.length) tell("Domain", domainMark(task, 0));
    for (const [method, answers] of task.query.answers) {
      const right = answers[query] === label;
      const verdict = make("span", { class: right ? "right" : "wrong", text: right ? "✓ right" : "✗ wrong" });
      tell(method, ...(label === undefined ? [answers[query]] : [verdict, `: ${answers[query]}`]));
    }
    if (task.query.files.length) tell("File", task.query.files[query]);
    this.chosen.replaceChildren(picture(task, task.support.count + query, 160), make("dl", { children: facts }));
  }

  /** What the query gives each support image under the chosen head, as a multiple of uniform attention. */
  multiples() {
    const { current: task, query } = this;
    const { count } = task.support;
    const { heads } = task.weights;
    const chosen = Number(this.head.value) ? [Number(this.head.value) - 1] : Array.from({ length: heads }, (_, h) => h);
    const one = (i) => chosen.reduce((sum, h) => sum + task.numbers[(query * heads + h) * count + i], 0);
    return Array.from({ length: count }, (_, i) => (one(i) / chosen.length) * count);
  }

  show() {
    const { domains, count } = this.current.support;
    const weights = this.multiples();
    const order = weights.map((_, i) => i).sort((a, b) => weights[b] - weights[a]);
    const shown = order.filter((i) => this.domain.value === "" || domains[i] === Number(this.domain.value));
    const rank = new Map(order.map((i, place) => [i, place + 1]));
    this.ranking.replaceChildren(...shown.map((i) => this.card(i, rank.get(i), weights[i], weights[order[0]])));
    const own = order.filter((i) => domains[i] === 0);
    const share = own.reduce((sum, i) => sum + weights[i], 0) / count;
    const head = this.head.selectedOptions[0].textContent;
    const part = shown.length < count ? ` ${shown.length} of ${count} images shown.` : "";
    const gets = ` The own domain, ${percent(own.length / count)} of the images, gets ${percent(share)} of the weight.`;
    this.said.textContent =
      `Query ${this.query + 1}, ${head}: highest weight ${ratio(weights[order[0]])}.${domains.length ? gets : ""}${part}`;
  }

  card(i, rank, weight, highest) {
    const task = this.current;
    const bar = make("span", { class: "bar", "aria-hidden": "true", children: [make("span")] });
    bar.firstChild.style.width = `${(100 * weight) / (highest || 1)}%`;
    const children = [make("span", { class: "rank", text: rank }), picture(task, i, 64), make("strong", { text: ratio(weight) })];
    const { domains, labels, files } = task.support;
    children.push(bar);
    if (domains.length) children.push(domainMark(task, domains[i]));
    if (labels.length) children.push(make("span", { text: labels[i] }));
    if (files.length) children.push(make("span", { class: "file", text: files[i] }));
    const title = files.length ? files[i] : `support image ${i + 1}`;
    return make("li", { class: domains[i] === 0 ? "own" : "", "data-index": i, title, children });
  }
}

document.querySelectorAll("table.sortable").forEach(setUpTable);
const tasks = JSON.parse(byId("attended").textContent);
if (tasks.length) new Explorer(tasks);
