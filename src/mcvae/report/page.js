"use strict";

// Sorting: a column's button sorts its table, numbers by value, what is missing last.
const value = (cell) => (cell.dataset.value === undefined ? cell.textContent.trim() : cell.dataset.value);

function compare(a, b, sign) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const [x, y] = [Number(a), Number(b)];
  return sign * (Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : x - y);
}

function sort(button) {
  const head = button.closest("th");
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const body = head.closest("table").tBodies[0];
  const key = (row) => value(row.cells[head.cellIndex]);
  body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b), sign)));
}

for (const button of document.querySelectorAll(".sortable thead button")) {
  button.addEventListener("click", () => sort(button));
}

// Values: the pointer finds the nearest point of a chart, arrow keys walk along a line and between lines.
const tip = document.getElementById("tip");

function explore(figure) {
  const series = JSON.parse(figure.dataset.points);
  const picture = figure.querySelector("svg");
  const ring = figure.querySelector(".ring");
  let line = 0;
  let index = -1;

  function show() {
    const [x, y, words] = series[line][index];
    ring.setAttribute("cx", x);
    ring.setAttribute("cy", y);
    tip.textContent = words;
    tip.hidden = false;
    const box = picture.getBoundingClientRect();
    const scale = box.width / picture.viewBox.baseVal.width;
    const left = box.left + x * scale - tip.offsetWidth / 2;
    const above = box.top + y * scale - tip.offsetHeight - 14;
    tip.style.left = `${Math.max(4, Math.min(left, document.documentElement.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${above < 4 ? box.top + y * scale + 14 : above}px`;
  }

  function hide() {
    ring.setAttribute("cx", -99);
    tip.hidden = true;
  }

  function point(event) {
    const box = picture.getBoundingClientRect();
    const scale = box.width / picture.viewBox.baseVal.width;
    const [px, py] = [(event.clientX - box.left) / scale, (event.clientY - box.top) / scale];
    let best = Infinity;
    series.forEach((points, i) =>
      points.forEach(([x, y], j) => {
        const distance = (x - px) ** 2 + (y - py) ** 2;
        if (distance < best) [best, line, index] = [distance, i, j];
      }),
    );
    show();
  }

  function press(event) {
    if (event.key === "Escape") return hide();
    const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0;
    const across = { ArrowDown: 1, ArrowUp: -1 }[event.key] ?? 0;
    if (!along && !across && event.key !== "Home" && event.key !== "End") return undefined;
    event.preventDefault();
    line = (line + across + series.length) % series.length;
    const last = series[line].length - 1;
    index = event.key === "Home" ? 0 : event.key === "End" ? last : Math.max(0, Math.min(last, index + along));
    return show();
  }

  picture.addEventListener("pointermove", point);
  picture.addEventListener("pointerdown", point);
  picture.addEventListener("pointerleave", hide);
  figure.addEventListener("keydown", press);
  figure.addEventListener("blur", hide);
}

document.querySelectorAll(".chart").forEach(explore);

// On paper nothing can be opened.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => d.setAttribute("open", "")));
