"use strict";
// Views of a figure: the one whose data-… match all that is chosen.
for (const figure of document.querySelectorAll(".figure")) {
  const inputs = [...figure.querySelectorAll("input[data-choice]")];
  const views = [...figure.querySelectorAll(".view")];
  const show = () => {
    const chosen = Object.fromEntries(inputs.filter((i) => i.checked).map((i) => [i.dataset.choice, i.value]));
    const fits = (view) => Object.entries(chosen).every(([name, value]) => view.dataset[name] === value);
    for (const view of views) view.hidden = inputs.length > 0 && !fits(view);
    // An option without a view beside the others that are chosen cannot be taken.
    for (const input of inputs) {
      const other = { ...chosen, [input.dataset.choice]: input.value };
      input.disabled = !views.some((v) => Object.entries(other).every(([name, value]) => v.dataset[name] === value));
    }
    if (views.length && views.every((view) => view.hidden)) {
      const first = views[0].dataset;
      for (const input of inputs) input.checked = first[input.dataset.choice] === input.value;
      show();
    }
  };
  figure.addEventListener("change", show);
  show();
}

// Notes on points; a browser's own are slow, and phones have none.
const tip = document.getElementById("tip");
for (const title of document.querySelectorAll("svg title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
const point = (event) => {
  const marked = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.hidden = !marked;
  if (!marked) return;
  tip.textContent = marked.dataset.tip;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4)) + "px";
  tip.style.top = Math.max(4, event.clientY - box.height - 12) + "px";
};
document.addEventListener("pointerover", point);
document.addEventListener("click", point);

// A key of a legend under the pointer leaves only its series in full strength.
for (const svg of document.querySelectorAll("svg.chart")) {
  const dim = (number) => {
    for (const part of svg.querySelectorAll("[data-series]"))
      part.classList.toggle("dim", number !== null && part.dataset.series !== number);
  };
  for (const key of svg.querySelectorAll(".key")) {
    key.addEventListener("pointerenter", () => dim(key.dataset.series));
    key.addEventListener("pointerleave", () => dim(null));
  }
}

// The table of clients.
const table = JSON.parse(document.getElementById("data").textContent);
if (table) {
  const at = Object.fromEntries(table.columns.map((column, place) => [column.key, place]));
  const body = document.querySelector("#client-table tbody");
  const field = (id) => document.getElementById(id);
  const PAGE = 25;
  let sorted = { key: null, down: false }, limit = PAGE;
  for (const [id, key] of [["method", "method"], ["group", "clients"]])
    for (const value of new Set(table.lines.map((line) => line[at[key]]))) field(id).append(new Option(value, value));

  const text = (value, column) => {
    if (value === null) return "–";
    if (column.key === "change") return (value > 0 ? "+" : "") + value.toFixed(1);
    return ["global", "personal", "tuned", "chosen"].includes(column.key) ? value.toFixed(1) : String(value);
  };
  const compare = (a, b) => {
    if (a === null || b === null) return (a === null) - (b === null); // unknown last, whichever way
    const order = typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
    return sorted.down ? -order : order;
  };
  const draw = () => {
    const find = field("find").value.trim().toLowerCase();
    const words = table.columns.filter((column) => !column.number).map((column) => at[column.key]);
    let lines = table.lines.filter(
      (line) =>
        (!find || words.some((place) => String(line[place]).toLowerCase().includes(find))) &&
        (!field("method").value || line[at.method] === field("method").value) &&
        (!field("group").value || line[at.clients] === field("group").value) &&
        (!field("hurt").checked || (line[at.change] !== null && line[at.change] < 0))
    );
    if (sorted.key !== null) lines.sort((a, b) => compare(a[at[sorted.key]], b[at[sorted.key]]));
    field("count").textContent = `${lines.length.toLocaleString("en")} of ${table.lines.length.toLocaleString("en")} lines`;
    field("more").hidden = lines.length <= limit;
    body.replaceChildren(
      ...lines.slice(0, limit).map((line) => {
        const row = document.createElement("tr");
        table.columns.forEach((column, place) => {
          const cell = document.createElement("td");
          cell.textContent = text(line[place], column);
          cell.dataset.label = column.title;
          if (!column.number) cell.className = "text";
          if (line[place] === null) cell.className = "none";
          if (column.key === "change" && line[place] < 0) cell.className = "hurt";
          row.append(cell);
        });
        return row;
      })
    );
  };
  for (const button of document.querySelectorAll("#client-table thead button"))
    button.addEventListener("click", () => {
      sorted = { key: button.dataset.key, down: sorted.key === button.dataset.key && !sorted.down };
      for (const head of document.querySelectorAll("#client-table thead th")) head.setAttribute("aria-sort", "none");
      button.parentNode.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      draw();
    });
  for (const id of ["find", "method", "group", "hurt"])
    field(id).addEventListener("input", () => { limit = PAGE; draw(); });
  document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
  field("more").addEventListener("click", () => { limit += 4 * PAGE; draw(); });
  draw();
}

// A page that `personafl watch` serves looks whether there is more.
if ("live" in document.body.dataset) {
  let known = null;
  setInterval(async () => {
    try {
      const version = await (await fetch("version")).text();
      if (known !== null && version !== known) location.reload();
      known = version;
    } catch { /* the server has ended; what is here stays */ }
  }, 2000);
}
