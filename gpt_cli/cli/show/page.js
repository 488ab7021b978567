
"use strict";
// Draw the view that the page contains as JSON. Tokens and prompts are untrusted: they are inserted
// as text, never as HTML.

// The colours are those of a terminal: shares by their square root, since most are small; bits in steps.
const VIRIDIS = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"].map(rgb);
const SHADES = Array.from({ length: 256 }, (_, i) => between(VIRIDIS, i / 255));
const STEPS = [1, 2, 4, 8, 16];
const OR_RD = ["#fef0d9", "#fdcc8a", "#fc8d59", "#e34a33", "#b30000"].map(rgb);
const ONE = 65535; // the weight 1
const main = document.querySelector("main");

// --- attention ----------------------------------------------------------------------------------

function attention({ tokens, layers, heads, weights }) {
  const last = tokens.length - 1;
  let [l, h, row] = [0, 0, last]; // l and h are indices into `layers` and `heads`

  function matrix(l, h) {
    if (typeof weights[l][h] === "string") weights[l][h] = unpacked(weights[l][h]);
    return weights[l][h];
  }
  const share = (i, j) => matrix(l, h)[(i * (i + 1)) / 2 + j] / ONE;

  function chooseHead(newL, newH) {
    [l, h] = [newL, newH];
    title.textContent = `Layer h.${layers[l]}, head ${heads[h]}`;
    grid.mark(l, h);
    choice.mark(l, h);
    plane.draw(matrix(l, h), title.textContent);
    chooseRow(row);
  }
  function chooseRow(i) {
    choosePair(i, strongest(i)[0]);
  }
  function choosePair(i, j) {
    row = i;
    text.mark(i, j, share);
    plane.mark(i, j);
    const most = strongest(i).map((j) => `${percent(share(i, j))} to ${j} “${label(tokens[j])}”`);
    panel.replaceChildren(
      el("p", {}, el("strong", {}, `${named(tokens, i)} → ${named(tokens, j)}: ${percent(share(i, j))}`)),
      el("p", { class: "more" }, `most attention: ${most.join(", ")}`),
    );
  }
  function strongest(i) {
    const places = Array.from({ length: i + 1 }, (_, j) => j);
    return places.sort((a, b) => share(i, b) - share(i, a)).slice(0, 5);
  }

  const title = el("h2");
  const grid = headGrid(layers, heads, tokens.length, matrix, chooseHead);
  const choice = headPickers(layers, heads, chooseHead);
  const text = tokenFlow(tokens, chooseRow);
  const plane = attentionMap(tokens, choosePair);
  const panel = el("output", { class: "panel" });
  const several = layers.length * heads.length > 1;
  main.append(
    el("div", { class: "attention" },
      el("section", { class: "choice" }, choice.box, several ? grid.box : ""),
      el("section", { class: "chosen" }, title, shadeLegend(), text.box, plane.box)),
    panel,
  );
  chooseHead(0, 0);
}

function unpacked(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return new Uint16Array(bytes.buffer); // all browsers run on little-endian machines
}

/** Draw a triangle of weights, `size` pixels wide. A pixel for several weights shows the maximum. */
function drawWeights(canvas, matrix, T, size) {
  const most = new Uint16Array(size * size);
  for (let i = 0, k = 0; i < T; i++) {
    const start = Math.floor((i * size) / T) * size;
    for (let j = 0; j <= i; j++, k++) {
      const place = start + Math.floor((j * size) / T);
      most[place] = Math.max(most[place], matrix[k]);
    }
  }
  canvas.width = canvas.height = size;
  const image = new ImageData(size, size);
  for (let y = 0; y < size; y++) {
    for (let x = 0; x <= y; x++) {
      image.data.set([...shade(most[y * size + x] / ONE), 255], 4 * (y * size + x));
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Return a grid of small maps, with a row for each layer and a column for each head. */
function headGrid(layers, heads, T, matrix, choose) {
  const maps = layers.map((layer) => heads.map((head) => (
    el("button", { "aria-label": `layer ${layer}, head ${head}`, tabindex: -1 }, el("canvas")))));
  const buttons = maps.flat();
  function place(button) {
    const i = buttons.indexOf(button);
    return [Math.floor(i / heads.length), i % heads.length];
  }
  const box = el("div", { class: "heads", role: "group", "aria-label": "maps of the heads" },
    el("span"), ...heads.map((head) => el("span", {}, String(head))),
    ...layers.flatMap((layer, l) => [el("span", {}, `h.${layer}`), ...maps[l]]));
  box.style.setProperty("--heads", heads.length);
  explore(box, "button", ["focusin", "click"], (button) => choose(...place(button)), (button, key) => {
    const [l, h] = place(button);
    const [down, right] = ARROWS[key] ?? [NaN, NaN];
    return maps[l + down]?.[h + right];
  });
  // One layer per frame, so that the page responds before all are drawn.
  function draw(l) {
    maps[l].forEach((button, h) => drawWeights(button.firstChild, matrix(l, h), T, Math.min(T, 48)));
    if (l + 1 < layers.length) requestAnimationFrame(() => draw(l + 1));
  }
  requestAnimationFrame(() => draw(0));
  function mark(l, h) {
    buttons.forEach((button) => button.setAttribute("aria-pressed", button === maps[l][h]));
  }
  return { box: el("div", { class: "scroll" }, box), mark };
}

function headPickers(layers, heads, choose) {
  const picker = (names) => el("select", {}, ...names.map((name, i) => el("option", { value: i }, name)));
  const layer = picker(layers.map((number) => `h.${number}`));
  const head = picker(heads.map(String));
  const box = el("div", { class: "pickers" },
    el("label", {}, "Layer", layer), el("label", {}, "Head", head));
  box.addEventListener("change", () => choose(Number(layer.value), Number(head.value)));
  return { box, mark: (l, h) => { layer.value = l; head.value = h; } };
}

/** Return the text; the colours of its tokens show the attention of the chosen token. */
function tokenFlow(tokens, choose) {
  const chips = tokens.map((token, i) =>
    el("span", { class: "token", role: "option", tabindex: -1, "data-i": i }, label(token)));
  const box = el("div", { class: "flow", role: "listbox", "aria-label": "the text" });
  chips.forEach((chip, i) => box.append(chip, ...(tokens[i].token.includes("\n") ? [el("br")] : [])));
  explore(box, ".token", HOVER, (chip) => choose(Number(chip.dataset.i)), (chip, key) => inText(chips, chip, key));
  function mark(row, column, share) {
    chips.forEach((chip, j) => {
      paint(chip, j <= row ? shade(share(row, j)) : null);
      chip.dataset.percent = j <= row ? percent(share(row, j)) : "";
      chip.classList.toggle("later", j > row);
      chip.setAttribute("aria-selected", j === row);
    });
  }
  return { box, mark };
}

/** Return the map of a head: each token (row) attends to tokens (columns). */
function attentionMap(tokens, choose) {
  const T = tokens.length;
  const canvas = el("canvas", { role: "img", tabindex: 0 });
  const [across, down] = [el("div", { class: "cross" }), el("div", { class: "cross" })];
  const names = ["down", "across"].map((way) =>
    el("div", { class: `labels ${way}`, "aria-hidden": true },
      ...(T <= 40 ? tokens.map((token) => el("span", { class: "token" }, label(token))) : [])));
  const box = el("div", { class: T > 20 ? "map many" : "map" }, ...names, el("div", { class: "plane" }, canvas, across, down));
  box.style.setProperty("--tokens", T);
  let [row, column] = [0, 0];

  function go(i, j) {
    if (0 <= j && j <= i && i < T) choose(i, j);
  }
  for (const kind of ["pointermove", "pointerdown"]) {
    canvas.addEventListener(kind, (event) => {
      const size = canvas.clientWidth / T;
      go(Math.floor(event.offsetY / size), Math.floor(event.offsetX / size));
    });
  }
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in ARROWS)) return;
    event.preventDefault();
    const [below, right] = ARROWS[event.key];
    go(row + below, Math.min(column + right, row + below));
  });
  function mark(i, j) {
    names.forEach((labels, way) => {
      labels.children[[row, column][way]]?.classList.remove("here");
      labels.children[[i, j][way]]?.classList.add("here");
    });
    [row, column] = [i, j];
    const part = (count) => `${(100 * count) / T}%`;
    Object.assign(across.style, { top: part(i), left: 0, height: part(1), width: part(i + 1) });
    Object.assign(down.style, { top: part(j), left: part(j), height: part(T - j), width: part(1) });
  }
  function draw(matrix, title) {
    canvas.setAttribute("aria-label", `${title}: a row for each token; arrow keys move`);
    drawWeights(canvas, matrix, T, T);
  }
  return { box, mark, draw };
}

// --- lens ---------------------------------------------------------------------------------------

function lens({ tokens, layers, predictions }) {
  const cells = predictions.map((places, l) => places.map((found, t) => {
    const cell = el("td", { class: "token", tabindex: -1, "data-l": l, "data-t": t }, label(found[0]));
    cell.classList.toggle("right", found[0].id === tokens[t + 1]?.id);
    paint(cell, shade(Math.exp(found[0].logprob)));
    return cell;
  }));
  const names = tokens.map((token) => el("th", { class: "token", scope: "col" }, label(token)));
  const table = el("table", { class: "lens", role: "grid" },
    el("thead", {}, el("tr", {}, el("th"), ...names)),
    el("tbody", {}, ...layers.map((layer, l) => el("tr", {}, el("th", { scope: "row" }, layer), ...cells[l]))));
  const box = el("div", { class: "scroll" }, table);
  const panel = el("output", { class: "panel" });
  main.append(box, shadeLegend(" ✓ the next token of the text"), panel);

  let chosen = cells.at(-1).at(-1);
  function choose(cell) {
    chosen.setAttribute("aria-selected", false);
    chosen = cell;
    chosen.setAttribute("aria-selected", true);
    const [l, t] = [Number(cell.dataset.l), Number(cell.dataset.t)];
    const next = tokens[t + 1];
    panel.replaceChildren(
      el("p", {}, el("strong", {}, `${layers[l]}, after ${named(tokens, t)}`),
        next ? `: the next token is “${label(next)}”` : ": the text ends here"),
      el("ol", { class: "bars" }, ...predictions[l][t].map((token) => predicted(token, token.id === next?.id))),
    );
  }
  explore(table, "tbody td", HOVER, choose, (cell, key) => {
    const [down, right] = ARROWS[key] ?? [NaN, NaN];
    return cells[Number(cell.dataset.l) + down]?.[Number(cell.dataset.t) + right];
  });
  choose(chosen);
  box.scrollTo(box.scrollWidth, box.scrollHeight);
}

function predicted(token, right) {
  const probability = Math.exp(token.logprob);
  return el("li", {}, el("span", { class: right ? "token right" : "token" }, label(token)),
    bar(probability), el("span", { class: "number" }, percent(probability)));
}

// --- surprise -----------------------------------------------------------------------------------

function surprise({ tokens, perplexity }) {
  const pieces = characters(tokens);
  const spans = pieces.map(({ text, bits }, i) => {
    const span = el("span", { role: "option", tabindex: -1, "data-i": i }, printable(text));
    span.classList.toggle("ends", text.includes("\n"));
    paint(span, stepColour(bits));
    return span;
  });
  const text = el("div", { class: "text", role: "listbox", "aria-label": "the text", dir: "auto" }, ...spans);
  const details = el("div");
  const strip = bitsStrip(pieces);
  const bits = tokens.slice(1).map((token) => -token.logprob / Math.LN2);
  const mean = (bits.reduce((sum, bits) => sum + bits, 0) / bits.length).toFixed(2);
  const shownPerplexity = perplexity === null ? "infinite" : number(perplexity);
  main.append(
    el("p", {}, `${tokens.length.toLocaleString("en")} tokens (${bits.length.toLocaleString("en")} scored), ${mean} bits each, perplexity ${shownPerplexity}`),
    el("p", { class: "legend" },
      "bits: ", ...["<1", ...STEPS].map((step) => painted(String(step), stepColour(step)))),
    text,
    el("output", { class: "panel" }, details, strip.box),
  );

  let chosen = spans[0];
  function choose(i) {
    chosen.setAttribute("aria-selected", false);
    chosen = spans[i];
    chosen.setAttribute("aria-selected", true);
    strip.mark(i);
    const { ids, text, bits } = pieces[i];
    details.replaceChildren(
      el("p", {}, el("strong", {}, `“${shown(text)}”`, bits === null ? "" : `: ${bits.toFixed(2)} bits`)),
      el("p", { class: "more" }, `id ${ids.join(" + ")}; `,
        bits === null ? "the first token has no prediction" : `probability ${chance(2 ** -bits)}`),
    );
  }
  explore(text, "span", HOVER, (span) => choose(Number(span.dataset.i)), (span, key) => inText(spans, span, key));
  strip.box.addEventListener("pointerover", (event) => strip.choose(event, choose));
  strip.box.addEventListener("click", () => chosen.scrollIntoView({ block: "center" }));
  choose(strip.highest);
}

/** Merge tokens that share a character, and add up their bits. */
function characters(tokens) {
  const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  const pieces = [];
  let [bytes, ids, bits] = [[], [], null];
  for (const token of tokens) {
    bytes.push(...token.bytes);
    ids.push(token.id);
    if (token.logprob !== null) bits -= token.logprob / Math.LN2;
    try {
      pieces.push({ text: decoder.decode(new Uint8Array(bytes)), ids, bits });
    } catch {
      continue; // the character continues in the next token
    }
    [bytes, ids, bits] = [[], [], null];
  }
  return pieces;
}

/** Return a bar for each token. In a long text, a bar shows the maximum of several tokens. */
function bitsStrip(pieces) {
  const count = Math.min(pieces.length, 300);
  const column = (i) => Math.floor((i * count) / pieces.length);
  const tops = [];
  pieces.forEach(({ bits }, i) => {
    if (tops[column(i)] === undefined || bits > pieces[tops[column(i)]].bits) tops[column(i)] = i;
  });
  const most = Math.max(...tops.map((i) => pieces[i].bits));
  const columns = tops.map((i) => {
    const fill = el("i");
    fill.style.height = `${(100 * pieces[i].bits) / most}%`;
    paint(fill, stepColour(pieces[i].bits));
    return el("span", { "data-i": i }, fill);
  });
  const name = `bits of each token, at most ${most.toFixed(1)}`;
  const box = el("div", { class: "strip", role: "img", "aria-label": name }, ...columns);
  let here = columns[0];
  function mark(i) {
    here.classList.remove("here");
    here = columns[column(i)];
    here.classList.add("here");
  }
  function choose(event, then) {
    const found = event.target.closest("[data-i]");
    if (found) then(Number(found.dataset.i));
  }
  return { box, mark, choose, highest: tops.find((i) => pieces[i].bits === most) };
}

function stepColour(bits) {
  return OR_RD[STEPS.filter((step) => bits >= step).length - 1] ?? null;
}

// --- tree ---------------------------------------------------------------------------------------

function tree({ prompt, branches }) {
  const found = new Map(); // from each line to its branch and parent line
  const panel = el("output", { class: "panel" });

  /** Return the lines of some branches. Without a choice, they are neither indented nor foldable. */
  function list(branches, parent) {
    const fork = branches.length > 1;
    return el("ul", { class: fork ? "fork" : "" }, ...branches.map((branch) => {
      const own = Math.exp(branch.token.logprob);
      const line = el("button", { class: "line", tabindex: -1 },
        el("span", { class: "token" }, label(branch.token)), bar(own),
        el("span", { class: "number" }, percent(own)), el("span", { class: "number" }, percent(branch.probability)));
      found.set(line, { branch, parent });
      const item = el("li", {}, line);
      if (branch.branches.length > (fork ? 0 : 1)) line.setAttribute("aria-expanded", true);
      if (branch.branches.length) item.append(list(branch.branches, line));
      return item;
    }));
  }
  function path(line) {
    return line ? [...path(found.get(line).parent), line] : [];
  }
  function fold(line, open) {
    if (!line.hasAttribute("aria-expanded")) return;
    line.setAttribute("aria-expanded", open);
    line.nextSibling.hidden = !open;
  }
  function choose(line) {
    box.querySelectorAll(".path").forEach((other) => other.classList.remove("path", "here"));
    path(line).forEach((other) => other.classList.add("path"));
    line.classList.add("here");
    const { branch } = found.get(line);
    const bytes = path(line).flatMap((other) => found.get(other).branch.token.bytes);
    const text = new TextDecoder().decode(new Uint8Array(bytes));
    const [own, all] = [Math.exp(branch.token.logprob), branch.probability].map(percent);
    panel.replaceChildren(
      el("p", {}, el("span", { class: "before" }, ending(prompt)), el("span", { class: "after" }, text)),
      el("p", { class: "more" }, `probability ${own} after the tokens before it, ${all} for the path from the prompt`),
    );
  }
  function next(line, key) {
    const lines = [...found.keys()].filter((line) => line.offsetParent);
    if (key === "ArrowRight" || key === "ArrowLeft") fold(line, key === "ArrowRight");
    return lines[lines.indexOf(line) + (ARROWS[key]?.[0] || NaN)];
  }

  const heading = el("div", { class: "line head" }, el("span"), el("span"),
    el("span", { class: "number" }, "token"), el("span", { class: "number" }, "path"));
  const box = el("div", { class: "tree" }, heading, list(branches, null));
  main.append(el("p", { class: "before" }, ending(prompt)), el("div", { class: "scroll" }, box), panel);
  explore(box, "button", HOVER, choose, next);
  box.addEventListener("click", ({ target }) => {
    const line = target.closest("button");
    if (line) fold(line, line.getAttribute("aria-expanded") === "false");
  });
  choose(box.querySelector("button"));
}

function ending(text) {
  return text.length > 120 ? `…${text.slice(-120)}` : text;
}

// --- shared -------------------------------------------------------------------------------------

function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// The steps of a key: down and to the right.
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

const HOVER = ["pointerover", "focusin", "click"]; // also a tap

/** Choose the item of an event, or the next item after a key; the Tab key stops at one of them. */
function explore(box, selector, events, choose, next) {
  let stop = box.querySelector(selector);
  stop.tabIndex = 0;
  for (const kind of events) {
    box.addEventListener(kind, (event) => {
      const item = event.target.closest(selector);
      if (!item) return;
      stop.tabIndex = -1;
      stop = item;
      stop.tabIndex = 0;
      choose(item);
    });
  }
  box.addEventListener("keydown", (event) => {
    const item = event.target.closest(selector);
    if (!item || !(event.key in ARROWS)) return;
    event.preventDefault();
    next(item, event.key)?.focus();
  });
}

/** Return the item after a key: the next one in the text, or the nearest one on the next line. */
function inText(items, item, key) {
  const [down, right] = ARROWS[key];
  let i = items.indexOf(item) + down + right;
  if (right) return items[i];
  while (items[i]?.offsetTop === item.offsetTop) i += down;
  const line = items[i]?.offsetTop;
  const far = (i) => (items[i]?.offsetTop === line ? Math.abs(items[i].offsetLeft - item.offsetLeft) : Infinity);
  while (far(i + down) <= far(i) && items[i + down]) i += down;
  return items[i];
}

/** Return a token as visible text on one line; incomplete characters are shown as bytes. */
function label({ token, bytes }) {
  if (!token.includes("\ufffd")) return shown(token);
  const character = (byte) => (byte < 128 ? String.fromCharCode(byte) : `\\x${byte.toString(16)}`);
  return shown(bytes.map(character).join(""));
}

function shown(text) {
  return text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥")
    .replace(/[\p{C}\p{Z}]/gu, (sign) => `\\u${sign.codePointAt().toString(16).padStart(4, "0")}`);
}

/** Return text with its control characters made visible, such as those that change its direction. */
function printable(text) {
  return text.replace(/[\u202a-\u202e\u2066-\u2069]|(?![\n\t])\p{Cc}/gu, shown);
}

const named = (tokens, i) => `token ${i} “${label(tokens[i])}”`;
const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: 5 });
const percent = (share) => `${(100 * share).toFixed(1)}%`;

function chance(probability) {
  if (probability >= 0.0005) return percent(probability);
  return probability < 1e-9 ? probability.toExponential(1) : `1 in ${number(Math.round(1 / probability))}`;
}

function bar(share) {
  const fill = el("i");
  fill.style.width = `${100 * share}%`;
  paint(fill, shade(share));
  return el("span", { class: "bar" }, fill);
}

function shadeLegend(more = "") {
  const shares = [0, 0.04, 0.16, 0.36, 0.64, 1];
  return el("p", { class: "legend" }, ...shares.map((share) => painted(`${100 * share}%`, shade(share))), more);
}

function painted(text, colour) {
  const node = el("span", {}, text);
  paint(node, colour);
  return node;
}

/** Set the colour of a node, and black or white for its text, whichever has the higher contrast. */
function paint(node, colour) {
  node.style.backgroundColor = colour ? `rgb(${colour})` : "";
  node.style.color = colour ? (luminance(colour) > 0.179 ? "#000" : "#fff") : "";
}

function luminance(colour) {
  const [r, g, b] = colour.map((c) => (c > 10 ? ((c / 255 + 0.055) / 1.055) ** 2.4 : c / 3294));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function shade(share) {
  return SHADES[Math.round(255 * Math.sqrt(share))];
}

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function between(colours, share) {
  const i = Math.min(Math.floor(share * (colours.length - 1)), colours.length - 2);
  const part = share * (colours.length - 1) - i;
  return colours[i].map((c, k) => Math.round(c + part * (colours[i + 1][k] - c)));
}

const data = JSON.parse(document.getElementById("data").textContent);
({ attention, lens, surprise, tree })[data.view](data);
