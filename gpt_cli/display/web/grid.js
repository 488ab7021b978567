// The grid: what parts of the model (cells) do to a logit, or to the difference of two.

const SIGNED = COLOURS.signed.map(rgb);

const LEADS = {
  attribution: "The bluer a cell, the more its part speaks for the answer; the redder, the more it speaks against it.",
  patch: "The bluer a cell, the more its activation leads to the answer of the clean text; the redder, the more away from it.",
  ablate: "The redder a cell, the more the answer loses without its part; the bluer, the more it gains.",
};

function grid({ axes, title, notes, rows, columns, values }) {
  const most = Math.max(...values.flat().map(Math.abs)) || 1;
  const digits = Math.min(Math.max(2 - Math.floor(Math.log10(most)), 0), 2);
  const signed = (value, digits) => `${value < 0 && Number(value.toFixed(digits)) !== 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;
  const column = (name) => (Number.isNaN(Number(name)) ? name : `${axes[1]} ${name}`); // not "head mlp"
  const colour = (value) => between(SIGNED, (value / most + 1) / 2);
  const cells = values.map((row, i) => row.map((value, j) => {
    const cell = el("td", { role: "gridcell", tabindex: -1, "data-i": i, "data-j": j }, signed(value, digits));
    paint(cell, colour(value));
    return cell;
  }));
  const table = el("table", { class: "grid", role: "grid" },
    el("thead", {}, el("tr", {}, el("th"), ...columns.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows.map((name, i) => el("tr", {}, el("th", { scope: "row" }, printable(name)), ...cells[i]))));
  const box = el("div", { class: "scroll" }, table);
  const panel = el("output", { class: "panel" });
  const steps = [-1, -0.5, 0, 0.5, 1].map((share) => painted(signed(share * most, digits), colour(share * most)));
  const heading = printable(title).replaceAll("“ ", "“\u00a0"); // no line break within “ Emma”
  main.append(el("h2", {}, heading), ...notes.map((note) => el("p", { class: "note" }, printable(note))),
    box, el("p", { class: "legend" }, ...steps), panel);

  const order = cells.flat().sort((a, b) => Math.abs(value(b)) - Math.abs(value(a)));
  function value(cell) {
    return values[Number(cell.dataset.i)][Number(cell.dataset.j)];
  }
  chooseCells(box, panel, cells, order[0], (i, j) => [
    el("p", {}, el("strong", {}, `${axes[0]} ${printable(rows[i])}, ${column(columns[j])}: ${signed(values[i][j], digits + 2)}`)),
    el("p", { class: "more" }, `number ${order.indexOf(cells[i][j]) + 1} of ${order.length} by size`),
  ]);
}

show(LEADS[DATA.view],
"Tab goes to the table; ← → ↑ ↓, Home and End choose a cell.",
"Tap a cell for its value.", grid);
