
// What the scripts of all views share. A page has this script, after COLOURS of colours.py, and the
// one of its view. Tokens and prompts are untrusted: they are inserted as text, never as HTML.

const SHADES = Array.from({ length: 256 }, (_, i) => between(COLOURS.shares.map(rgb), i / 255));
const DATA = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");

/** Show the introduction of a view, with what keys do, or taps, and draw the data of the page. */
function show(lead, keys, taps, draw) {
  document.querySelector("header p").textContent = lead;
  const help = matchMedia("(hover: none)").matches ? taps : keys;
  document.querySelector("header").append(el("p", { class: "keys" }, help));
  draw(DATA);
}

function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// The steps of a key: down and to the right.
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const ENDS = { Home: 0, End: -1 }; // indices of items

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
    if (!item || !(event.key in ARROWS || event.key in ENDS)) return;
    event.preventDefault();
    const end = () => [...box.querySelectorAll(selector)].filter((item) => item.offsetParent).at(ENDS[event.key]);
    (event.key in ENDS ? end() : next(item, event.key))?.focus();
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

/** Return the bytes of a token, or those of its name if it has none. */
function bytesOf({ token, bytes }) {
  return bytes.length ? bytes : [...new TextEncoder().encode(token)];
}

function shown(text) {
  return text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥")
    .replace(/[\p{C}\p{Z}]/gu, (sign) => `\\u${sign.codePointAt().toString(16).padStart(4, "0")}`);
}

/** Return text with its control characters made visible, such as those that change its direction. */
function printable(text) {
  return text.replace(/[\u202a-\u202e\u2066-\u2069]|(?![\n\t])\p{Cc}/gu, shown);
}

/** Choose cells of the table in a box, the first one at once; the panel shows `describe(row, column)`. */
function chooseCells(box, panel, cells, first, describe) {
  const positions = new Map(cells.flatMap((row, i) => row.map((cell, j) => [cell, [i, j]])));
  let chosen = first;
  function choose(cell) {
    chosen.setAttribute("aria-selected", false);
    chosen = cell;
    chosen.setAttribute("aria-selected", true);
    panel.replaceChildren(...describe(...positions.get(cell)));
  }
  explore(box.firstElementChild, "tbody td", HOVER, choose, (cell, key) => {
    const [row, column] = positions.get(cell);
    const [down, right] = ARROWS[key] ?? [NaN, NaN];
    return cells[row + down]?.[column + right];
  });
  choose(first);
  fitWindow(box, first);
  hintMore(box);
}

/** Scroll a box to a cell, and limit its height, so that the panel below it covers no row. */
function fitWindow(box, cell) {
  const fit = () => {
    const others = document.body.scrollHeight - box.offsetHeight;
    box.style.maxHeight = `${Math.max(0.4 * innerHeight, innerHeight - others)}px`;
    box.scrollTo(cell.offsetLeft - box.clientWidth / 2, cell.offsetTop - box.clientHeight / 2);
  };
  new ResizeObserver(fit).observe(box); // a frame of a notebook gets its size later
}

/** Fade the right edge of a box while there is more to scroll to. */
function hintMore(box) {
  const draw = () => box.classList.toggle("more-right", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  box.addEventListener("scroll", draw);
  new ResizeObserver(draw).observe(box);
}

const named = (tokens, i) => `token ${i} “${label(tokens[i])}”`;

// As `_number` of views.py and `_percent` of terminal.py write them.
const number = (value) => (
  value < 1e10 ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : value.toExponential(3));
const percent = (share) => (share > 0 && share < 0.0005 ? "<0.1%" : `${(100 * share).toFixed(1)}%`);

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
