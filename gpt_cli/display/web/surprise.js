// Surprise: the bits of the tokens of a text, as colours in steps.

const STEPS = Object.keys(COLOURS.bits).map(Number);
const STEP_COLOURS = Object.values(COLOURS.bits).map(rgb);

function surprise({ tokens, perplexity }) {
  const pieces = characters(tokens);
  // At a line break, a coloured space before a word would stay at the end of the line.
  const spaces = pieces.map(({ text }) => text.match(/^( +(?=[^ ]))?/)[0]);
  const spans = pieces.map(({ text, bits }, i) => {
    const word = printable(text.slice(spaces[i].length));
    const span = el("span", { role: "option", tabindex: -1, "data-i": i }, word);
    span.classList.toggle("ends", text.includes("\n"));
    paint(span, stepColour(bits));
    return span;
  });
  const text = el("div", { class: "text", role: "listbox", "aria-label": "the text", dir: "auto" },
    ...spans.flatMap((span, i) => [spaces[i], span]));
  const details = el("div");
  const strip = bitsStrip(pieces);
  const bits = tokens.filter(({ logprob }) => logprob !== null).map((token) => -token.logprob / Math.LN2);
  const mean = (bits.reduce((sum, bits) => sum + bits, 0) / bits.length).toFixed(2);
  const shownPerplexity = perplexity === null ? "infinite" : number(perplexity);
  main.append(
    el("p", {}, `${tokens.length.toLocaleString("en")} tokens (${bits.length.toLocaleString("en")} scored), ${mean} bits each, perplexity ${shownPerplexity}`),
    el("p", { class: "legend" },
      "bits: ", ...["<1", ...STEPS].map((step) => painted(String(step), stepColour(step))), " or more"),
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
  let bytes = [];
  let ids = [];
  let bits = null;
  for (const token of tokens) {
    bytes.push(...bytesOf(token));
    ids.push(token.id);
    if (token.logprob !== null) bits -= token.logprob / Math.LN2;
    try {
      pieces.push({ text: decoder.decode(new Uint8Array(bytes)), ids, bits });
    } catch {
      continue; // the character continues in the next token
    }
    bytes = [];
    ids = [];
    bits = null;
  }
  return pieces;
}

/** Return bars of tokens. In a long text, a bar shows the maximum of several tokens. */
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
    const bar = event.target.closest("[data-i]");
    if (bar) then(Number(bar.dataset.i));
  }
  return { box, mark, choose, highest: tops.find((i) => pieces[i].bits === most) };
}

function stepColour(bits) {
  return STEP_COLOURS[STEPS.filter((step) => bits >= step).length - 1] ?? null;
}

show("The redder a token, the less the model expected it after the tokens before it: 1 bit is a "
  + "probability of 1/2, and 10 bits is about 1/1000.",
"Tab goes to the text; ← → ↑ ↓, Home and End choose a token. A click on a bar goes to its token.",
"Tap a token, or a bar to go to its token.", surprise);
