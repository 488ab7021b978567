// The attention of heads: a map of all heads, and the weights of the chosen one.

const ONE = 65535; // the weight 1
const MEAN = "mean"; // before the heads of a layer, and before the layers

function mapName(layer, head) {
  if (layer === MEAN) return "mean of all heads";
  return `layer ${layer}, ${head === MEAN ? "mean of the heads" : `head ${head}`}`;
}

function attention({ tokens, layers, heads, weights }) {
  // The rows and the columns of the grid, and the weights in the same order.
  const rows = layers.length > 1 ? [MEAN, ...layers] : layers;
  const columns = heads.length > 1 ? [MEAN, ...heads] : heads;
  if (columns !== heads) weights.forEach((layer) => layer.unshift(null));
  if (rows !== layers) weights.unshift([]);
  let [l, h] = [0, 0]; // indices into `rows` and `columns`
  let row = tokens.length - 1;

  function matrix(l, h) {
    const layer = weights[l];
    if (rows[l] === MEAN) layer[h] ??= mean(layers.map((_, i) => matrix(i + 1, h)));
    else if (columns[h] === MEAN) layer[h] ??= mean(heads.map((_, i) => matrix(l, i + 1)));
    else if (typeof layer[h] === "string") layer[h] = unpacked(layer[h]);
    return layer[h];
  }
  const share = (i, j) => matrix(l, h)[(i * (i + 1)) / 2 + j] / ONE;

  function chooseHead(newL, newH) {
    [l, h] = [newL, newH];
    title.textContent = mapName(rows[l], columns[h]);
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
    const columns = Array.from({ length: i + 1 }, (_, j) => j);
    return columns.sort((a, b) => share(i, b) - share(i, a)).slice(0, 5);
  }

  const title = el("h2");
  const grid = headGrid(rows, columns, tokens.length, matrix, chooseHead);
  const choice = headPickers(rows, columns, chooseHead);
  const text = tokenFlow(tokens, chooseRow);
  const plane = attentionMap(tokens, choosePair);
  const panel = el("output", { class: "panel" });
  const several = layers.length * heads.length > 1;
  main.append(
    el("div", { class: "attention" },
      el("section", { class: "choice" }, choice.box, several ? grid.box : ""),
      el("section", { class: "chosen" }, title, shadeLegend(), text.box, plane.box),
      panel),
  );
  hintMore(grid.box);
  chooseHead(0, 0);
}

function unpacked(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return new Uint16Array(bytes.buffer); // all browsers run on little-endian machines
}

/** Return the mean of the weights of several heads. */
function mean(matrices) {
  const sum = (_, k) => matrices.reduce((total, matrix) => total + matrix[k], 0);
  return Float64Array.from(matrices[0], sum).map((total) => total / matrices.length); // not cut to integers
}

/** Draw a triangle of weights, `size` pixels wide. A pixel for several weights shows the maximum. */
function drawWeights(canvas, matrix, T, size) {
  const most = new Float64Array(size * size);
  for (let i = 0, k = 0; i < T; i++) {
    const start = Math.floor((i * size) / T) * size;
    for (let j = 0; j <= i; j++, k++) {
      const pixel = start + Math.floor((j * size) / T);
      most[pixel] = Math.max(most[pixel], matrix[k]);
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

/** Return a grid of small maps, with rows of layers and columns of heads. A mean of layers has one. */
function headGrid(layers, heads, T, matrix, choose) {
  const maps = layers.map((layer) => (layer === MEAN ? heads.slice(0, 1) : heads).map((head) => (
    el("button", { "aria-label": mapName(layer, head), tabindex: -1 }, el("canvas")))));
  const buttons = maps.flat();
  function position(button) {
    const l = maps.findIndex((row) => row.includes(button));
    return [l, maps[l].indexOf(button)];
  }
  const box = el("div", { class: "heads", role: "group", "aria-label": "maps of the heads" },
    el("span"), ...heads.map((head) => el("span", {}, String(head))),
    ...layers.flatMap((layer, l) => [el("span", { class: "row" }, layer === MEAN ? "all" : `layer ${layer}`), ...maps[l]]));
  box.style.setProperty("--heads", heads.length);
  explore(box, "button", ["focusin", "click"], (button) => choose(...position(button)), (button, key) => {
    const [l, h] = position(button);
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
  const layer = picker(layers.map((layer) => (layer === MEAN ? "all" : String(layer))));
  const head = picker(heads.map(String));
  const box = el("div", { class: "pickers" },
    el("label", {}, "Layer", layer), el("label", {}, "Head", head));
  box.addEventListener("change", () => {
    const l = Number(layer.value);
    choose(l, layers[l] === MEAN ? 0 : Number(head.value));
  });
  function mark(l, h) {
    [layer.value, head.value] = [l, h];
    head.disabled = layers[l] === MEAN;
  }
  return { box, mark };
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
    const { offsetTop: top, offsetHeight: height } = chips[row];
    const hidden = top + height <= box.scrollTop || top >= box.scrollTop + box.clientHeight;
    if (hidden) box.scrollTop = top - (box.clientHeight - height) / 2;
  }
  return { box, mark };
}

/** Return the map of a head: tokens (rows) attend to tokens (columns). */
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
    if (event.key === "Home") go(0, 0);
    else if (event.key === "End") go(T - 1, T - 1);
    else if (event.key in ARROWS) {
      const [below, right] = ARROWS[event.key];
      go(row + below, Math.min(column + right, row + below));
    } else return;
    event.preventDefault();
    across.scrollIntoView({ block: "nearest" });
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

show("How much each token attends to itself and to the tokens before it: in one head of one layer "
  + "(counted from 0), in the mean of a layer's heads, or in the mean of all.",
"Tab goes to the maps and to the text; ← → ↑ ↓, Home and End choose in each of them.",
"Tap a map, a token of the text, or a cell of the large map.", attention);
