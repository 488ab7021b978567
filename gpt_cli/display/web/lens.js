// The lens: the next tokens that the layers would predict.

function lens({ tokens, layers, predictions }) {
  const cells = predictions.map((positions) => positions.map((candidates, t) => {
    const cell = el("td", { class: "token", tabindex: -1 }, label(candidates[0]));
    cell.classList.toggle("right", candidates[0].id === tokens[t + 1]?.id);
    paint(cell, shade(Math.exp(candidates[0].logprob)));
    return cell;
  }));
  const names = tokens.map((token) => el("th", { class: "token", scope: "col" }, label(token)));
  const table = el("table", { class: "lens", role: "grid" },
    el("thead", {}, el("tr", {}, el("th"), ...names)),
    el("tbody", {}, ...layers.map((layer, l) => el("tr", {}, el("th", { scope: "row" }, layer), ...cells[l]))));
  const box = el("div", { class: "scroll" }, table);
  const panel = el("output", { class: "panel" });
  main.append(box, shadeLegend(" ✓ the next token of the text"), panel);

  chooseCells(box, panel, cells, cells.at(-1).at(-1), (l, t) => {
    const next = tokens[t + 1];
    return [
      el("p", {}, el("strong", {}, `${layers[l]}, after ${named(tokens, t)}`),
        next ? `: the next token is “${label(next)}”` : ": the text ends here"),
      el("ol", { class: "bars" }, ...predictions[l][t].map((token) => predicted(token, token.id === next?.id))),
    ];
  });
}

function predicted(token, right) {
  const probability = Math.exp(token.logprob);
  return el("li", {}, el("span", { class: right ? "token right" : "token" }, label(token)),
    bar(probability), el("span", { class: "number" }, percent(probability)));
}

show("Each cell is the next token that a layer (row, counted from 0) would predict after a token of "
  + "the text (column), if the model ended there.",
"Tab goes to the table; ← → ↑ ↓, Home and End choose a cell and show its alternatives.",
"Tap a cell for its alternatives.", lens);
