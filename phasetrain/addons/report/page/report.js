"use strict";
const SVG = "http://www.w3.org/2000/svg";
const tip = document.getElementById("tip");

document.getElementById("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.style.colorScheme || (dark ? "dark" : "light");
  document.documentElement.style.colorScheme = now === "dark" ? "light" : "dark";
});

function text(value) {
  if (value === null) return "not finite";
  if (Math.abs(value) >= 1e4 && Math.abs(value) < 1e9) return Math.round(value).toLocaleString("en");
  return value.toPrecision(4);
}

// Index of the value of a rising list that is nearest to `wanted`.
function nearest(list, wanted) {
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - list[low - 1] <= list[low] - wanted ? low - 1 : low;
}

for (const chart of document.querySelectorAll("figure.chart")) {
  const picture = chart.querySelector('svg[role="img"]');
  const data = JSON.parse(chart.querySelector("script").textContent);
  const [left, top, width, height] = data.scales.box;
  const [first, last] = data.scales.x;
  const names = data.scales.names && new Map(data.scales.names);
  const groups = [...picture.querySelectorAll("g[data-line]")];
  const cursor = document.createElementNS(SVG, "path");
  cursor.setAttribute("class", "cursor");

  for (const button of chart.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      groups[Number(button.dataset.line)].classList.toggle("off", !on);
    });
  }

  function epoch(at) {
    return data.scales.epoch ? `, epoch ${Number((at / data.scales.epoch).toFixed(2))}` : "";
  }

  function row(line, number, place) {
    const found = document.createElement("div");
    const dot = document.createElement("i");
    const name = document.createElement("span");
    const value = document.createElement("b");
    dot.className = [...groups[number].classList].find((one) => /^s\d$/.test(one));
    name.textContent = line.label;
    value.textContent = text(line.y[place]);
    if (line.low && line.low[place] !== null) {
      value.textContent += ` (${text(line.low[place])} to ${text(line.high[place])})`;
    }
    found.append(dot, name, value);
    return found;
  }

  picture.addEventListener("pointermove", (event) => {
    const frame = picture.getBoundingClientRect();
    const across = (event.clientX - frame.left) * picture.viewBox.baseVal.width / frame.width;
    const wanted = first + (last - first) * Math.min(1, Math.max(0, (across - left) / width));
    const shown = data.lines.map((line, number) => [line, number, nearest(line.x, wanted)])
      .filter(([, number]) => !groups[number].classList.contains("off"));
    if (!shown.length) return;
    const at = shown.map(([line, , place]) => line.x[place])
      .reduce((one, other) => Math.abs(one - wanted) <= Math.abs(other - wanted) ? one : other);
    cursor.setAttribute("d", `M${left + width * (at - first) / (last - first)} ${top}v${height}`);
    picture.append(cursor);
    const head = document.createElement("div");
    head.textContent = names ? names.get(at) : `update ${at.toLocaleString("en")}` + epoch(at);
    const rows = shown.map(([line, number]) => [line, number, nearest(line.x, at)])
      .filter(([line, , place]) => Math.abs(line.x[place] - at) <= (last - first) / 50);
    tip.replaceChildren(head, ...rows.map((one) => row(...one)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const tipLeft = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
    tip.style.left = `${Math.max(4, tipLeft)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4))}px`;
  });

  picture.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cursor.remove();
  });
}
