// The tree of the likeliest continuations.

function tree({ prompt, branches }) {
  const nodes = new Map(); // from lines to their branches and parent lines
  const panel = el("output", { class: "panel" });

  /** Return the lines of branches. The only branch has a mark, and is neither indented nor foldable. */
  function list(branches, parent) {
    const fork = branches.length > 1;
    return el("ul", { class: fork ? "fork" : "" }, ...branches.map((branch) => {
      const probability = Math.exp(branch.token.logprob);
      const line = el("button", { class: "line", tabindex: -1 },
        el("span", { class: "token" }, label(branch.token)), bar(probability),
        el("span", { class: "number" }, percent(probability)), el("span", { class: "number" }, percent(branch.probability)));
      nodes.set(line, { branch, parent });
      const item = el("li", {}, line);
      if (branch.branches.length > (fork ? 0 : 1)) line.setAttribute("aria-expanded", true);
      if (branch.branches.length) item.append(list(branch.branches, line));
      return item;
    }));
  }
  function path(line) {
    return line ? [...path(nodes.get(line).parent), line] : [];
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
    const { branch } = nodes.get(line);
    const bytes = path(line).flatMap((other) => bytesOf(nodes.get(other).branch.token));
    const text = new TextDecoder().decode(new Uint8Array(bytes));
    const [single, whole] = [Math.exp(branch.token.logprob), branch.probability].map(percent);
    panel.replaceChildren(
      el("p", {}, el("span", { class: "before" }, ending(prompt)), el("span", { class: "after" }, text)),
      el("p", { class: "more" }, `probability ${single} after the tokens before it, ${whole} for the path from the prompt`),
    );
  }
  function next(line, key) {
    const lines = [...nodes.keys()].filter((line) => line.offsetParent);
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

show("The likeliest continuations. Each token has its probability after the tokens before it, and the "
  + "probability of its path from the prompt. ↳ marks a token that continues the line above it.",
"Tab goes to the tree; ↑ ↓, Home and End choose a token; ← folds its branch, → unfolds it, and a click or Enter does either.",
"Tap a token to choose it, and to fold or unfold its branch.", tree);
