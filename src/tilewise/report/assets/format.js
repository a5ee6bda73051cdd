/* Small things that all the rest uses: elements, numbers with units, degrees. */
const SVG = "http://www.w3.org/2000/svg";
const LETTERS = "ndhwcf";
const WORDS = { n: "samples", d: "depth", h: "height", w: "width", c: "channels", f: "filters" };
const PHASES = ["forward", "backward"];
const KINDS = ["compute", "halo", "exchange", "sync"];
const KIND_WORDS = {
  compute: "compute", halo: "halo not hidden", exchange: "exchange", sync: "gradient sums",
};

function set(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(2)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}
const el = (tag, attributes, ...children) => set(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  set(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

function digits(value, number = 3) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e5) return value.toExponential(2);
  return String(Number(value.toPrecision(number)));
}
function seconds(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1) return `${digits(value)} s`;
  if (size >= 1e-3) return `${digits(value * 1e3)} ms`;
  return `${digits(value * 1e6)} µs`;
}
function bytes(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024) return `${digits(value)} ${unit}`;
    value /= 1024;
  }
  return `${digits(value)} TiB`;
}
function count(value) {
  if (!value) return "0";
  for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (value >= size) return digits(value / size) + unit;
  }
  return digits(value);
}
const FORMATS = { s: seconds, bytes, x: (value) => `${digits(value)}×`, "": (value) => digits(value, 4) };
const format = (unit) => FORMATS[unit] || FORMATS[""];
const percent = (value) => `${value >= 0 ? "+" : "−"}${digits(Math.abs(value) * 100, 3)} %`;
const extents = (shape) => (shape && shape.length ? shape.join(" × ") : "scalar");

function degrees(text) {
  const found = {};
  for (const term of text.split(/\s+/)) {
    const match = /^([a-z])(\d+)$/.exec(term);
    if (match && Number(match[2]) > 1) found[match[1]] = Number(match[2]);
  }
  return found;
}
function spoken(text) {
  const parts = Object.entries(degrees(text)).map(([letter, size]) => `${WORDS[letter]} in ${size}`);
  return parts.length ? parts.join(", ") : "not split";
}
function layerSeconds(layer) {
  if (layer.compute_s === undefined) return null;
  return layer.compute_s + layer.halo_s + layer.exchange_s;
}
function table(heads, rows, caption) {
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": caption || "Table" },
    el("table", {},
      el("thead", {}, el("tr", {}, heads.map(([text, number]) =>
        el("th", { scope: "col", class: number ? "num" : null }, text)))),
      el("tbody", {}, rows.map((row) => {
        const cells = Array.isArray(row) ? row : row.cells;
        return el("tr", { class: row.chosen ? "chosen" : null }, cells.map((cell, index) =>
          el("td", { class: heads[index][1] ? "num" : heads[index][2] || null }, cell)));
      }))));
}

const tip = el("div", { class: "tip", hidden: true, role: "presentation" });
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const y = event.clientY + box.height + 24 > window.innerHeight
    ? event.clientY - box.height - 12 : event.clientY + 14;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}
const hideTip = () => { tip.hidden = true; };
