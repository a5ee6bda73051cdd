/* Draw who holds what of a tensor: blocks, one rank's slab, and how far its windows reach. */
const startOf = (extent, parts, index) => Math.floor(index * extent / parts);

function partsOf(axes, dims) {
  const parts = Array(dims).fill(1);
  for (const [size, dim] of axes) if (dim >= 0) parts[dim] *= size;
  return parts;
}
function coordsOf(axes, dims, rank) {
  const digits = [];
  for (const [size] of [...axes].reverse()) {
    digits.unshift(rank % size);
    rank = Math.floor(rank / size);
  }
  const coords = Array(dims).fill(0);
  axes.forEach(([size, dim], index) => {
    if (dim >= 0) coords[dim] = coords[dim] * size + digits[index];
  });
  return coords;
}
const ranksOf = (axes) => axes.reduce((product, [size]) => product * size, 1);
const replicasOf = (axes) => axes.reduce((product, [size, dim]) => dim < 0 ? product * size : product, 1);

/* A rank that lies in the middle of a layout, where halos are on all sides. */
const middleRank = (axes) => axes.reduce((rank, [size]) => rank * size + Math.floor(size / 2), 0);

/* One entry for each dim: its letter, extent, parts, and this rank's block and reach. */
function slabOf(tensor, rank) {
  const dims = tensor.shape.length;
  const parts = partsOf(tensor.axes, dims), coords = coordsOf(tensor.axes, dims, rank);
  return tensor.shape.map((extent, dim) => {
    const start = startOf(extent, parts[dim], coords[dim]);
    const stop = startOf(extent, parts[dim], coords[dim] + 1);
    const reach = tensor.reach && tensor.reach[dim] ? tensor.reach[dim][coords[dim]] : [[start, stop]];
    const letter = (tensor.dims || "")[dim] || ".";
    return { letter, extent, parts: parts[dim], index: coords[dim], start, stop, reach };
  });
}

function hatch() {
  return svg("defs", {}, svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 6, height: 6, fill: "var(--kind-halo)", opacity: 0.22 }),
    svg("line", { x1: 0, y1: 0, x2: 0, y2: 6, stroke: "var(--kind-halo)", "stroke-width": 2.4 })));
}

function slabPicture(tensor, rank, title) {
  const dims = slabOf(tensor, rank);
  const space = dims.filter((one) => "dhw".includes(one.letter));
  const flat = dims.filter((one) => !"dhw".includes(one.letter));
  const plane = space.length ? space : flat.slice(0, 2);
  const beside = dims.filter((one) => !plane.includes(one));
  const text = `${title}: ${whereText(dims, tensor).join("; ")}`;
  const barHeight = beside.length * 34;
  const picture = svg("svg", { viewBox: `0 0 300 ${barHeight + 232}`, role: "img", "aria-label": text, style: "width: 100%" }, hatch());
  beside.forEach((one, index) => picture.append(barOf(one, index * 34)));
  const body = svg("g", { transform: `translate(0 ${barHeight + 4})` });
  picture.append(body);
  if (plane.length === 3) cube(body, plane);
  else if (plane.length) sheet(body, plane);
  return el("figure", {}, el("figcaption", {}, `${title} (${extents(tensor.shape)})`), picture,
    el("ul", { class: "where" }, whereText(dims, tensor).map((line) => el("li", {}, line))));
}

/* The reach, with halos widened to a share of the dim that can be seen. */
function shownReach(one, least) {
  const more = one.extent * least;
  return one.reach.map(([a, b]) => [
    a < one.start && b > a ? Math.max(0, Math.min(a, one.start - more)) : a,
    b > one.stop && b > a ? Math.min(one.extent, Math.max(b, one.stop + more)) : b,
  ]);
}

const wordOf = (letter) => WORDS[letter] || "positions";

function whereText(dims, tensor) {
  const lines = dims.filter((one) => one.parts > 1 || hasHalo(one)).map((one) => {
    const own = one.stop > one.start ? span(one.start, one.stop) : "none";
    const cut = one.parts > 1 ? ` (part ${one.index + 1} of ${one.parts})` : "";
    return `${wordOf(one.letter)} ${own} of ${one.extent}${cut}${haloText(one)}`;
  });
  if (!lines.length) lines.push("the whole tensor");
  const copies = replicasOf(tensor.axes);
  if (copies > 1) lines.push(`${copies} ranks hold the same`);
  if (tensor.moved) lines.push("redistributed to lie like this");
  return lines;
}
const span = (start, stop) => stop - start > 1 ? `${start}–${stop - 1}` : String(start);
const hasHalo = (one) => one.reach.some(([a, b]) => b > a && (a < one.start || b > one.stop));
function haloText(one) {
  if (!hasHalo(one)) return "";
  const first = one.reach[0][0], last = one.reach[one.reach.length - 1][1];
  if (one.reach.length > 1) return `, reads also ${one.reach.map(([a, b]) => span(a, b)).join(", ")}`;
  const sides = [];
  if (first < one.start) sides.push(`${one.start - first} before`);
  if (last > one.stop) sides.push(`${last - one.stop} after`);
  return `, ${"cf".includes(one.letter) ? "gathers" : "halo"} ${sides.join(", ")}`;
}

function barOf(one, y) {
  const left = 4, right = 296, x = (value) => left + (right - left) * value / Math.max(one.extent, 1);
  const group = svg("g", {}, svg("text", { class: "slab-text", x: left, y: y + 11 },
    `${wordOf(one.letter)}: ${one.extent}${one.parts > 1 ? ` in ${one.parts} parts` : ""}`),
    svg("rect", { class: "slab-whole", x: left, y: y + 15, width: right - left, height: 12 }));
  for (const [a, b] of hasHalo(one) ? shownReach(one, 0.012) : []) {
    if (b > a) group.append(svg("rect", { class: "slab-halo", fill: "url(#hatch)", x: x(a), y: y + 15, width: x(b) - x(a), height: 12 }));
  }
  cuts(one).forEach((at) => group.append(svg("line", { class: "slab-cut", x1: x(at), x2: x(at), y1: y + 15, y2: y + 27 })));
  if (one.stop > one.start) {
    group.append(svg("rect", { class: "slab-mine", x: x(one.start), y: y + 15, width: Math.max(x(one.stop) - x(one.start), 2), height: 12 }));
  }
  return group;
}

/* Where cuts are drawn; where they would run together, only every so many. */
function cuts(one) {
  const every = Math.max(1, Math.ceil(one.parts / 64)), found = [];
  for (let index = every; index < one.parts; index += every) found.push(startOf(one.extent, one.parts, index));
  return found;
}

function sheet(body, plane) {
  const [rows, columns] = plane.length === 2 ? plane : [{ ...plane[0], extent: 1, parts: 1, start: 0, stop: 1, reach: [[0, 1]], letter: "" }, plane[0]];
  const ratio = Math.min(Math.max(columns.extent / Math.max(rows.extent, 1), 0.4), plane.length === 2 ? 2.5 : 6);
  const width = Math.min(250, 190 * ratio), height = Math.min(190, width / ratio);
  const left = 26, top = 16;
  const x = (value) => left + width * value / Math.max(columns.extent, 1);
  const y = (value) => top + height * value / Math.max(rows.extent, 1);
  body.append(svg("rect", { class: "slab-whole", x: left, y: top, width, height }));
  for (const [a, b] of shownReach(rows, 0.03)) for (const [c, d] of shownReach(columns, 0.03)) {
    if (b > a && d > c && (hasHalo(rows) || hasHalo(columns))) body.append(svg("rect", { class: "slab-halo", fill: "url(#hatch)", x: x(c), y: y(a), width: x(d) - x(c), height: y(b) - y(a) }));
  }
  cuts(columns).forEach((at) => body.append(svg("line", { class: "slab-cut", x1: x(at), x2: x(at), y1: top, y2: top + height })));
  cuts(rows).forEach((at) => body.append(svg("line", { class: "slab-cut", x1: left, x2: left + width, y1: y(at), y2: y(at) })));
  if (rows.stop > rows.start && columns.stop > columns.start) {
    body.append(svg("rect", { class: "slab-mine", x: x(columns.start), y: y(rows.start), width: Math.max(x(columns.stop) - x(columns.start), 2), height: Math.max(y(rows.stop) - y(rows.start), 2) }));
  }
  body.append(svg("text", { class: "slab-text", x: left + width / 2, y: 10, "text-anchor": "middle" }, `${wordOf(columns.letter)} ${columns.extent}`));
  if (rows.letter) body.append(svg("text", { class: "slab-text", transform: `translate(16 ${top + height / 2}) rotate(-90)`, "text-anchor": "middle" }, `${wordOf(rows.letter)} ${rows.extent}`));
}

function cube(body, [depth, rows, columns]) {
  const most = Math.max(depth.extent, rows.extent, columns.extent, 1), size = 104;
  const long = (one) => Math.max(size * one.extent / most, 26);
  const sx = long(columns), sy = long(rows), sz = long(depth);
  const at = (w, h, d) => {
    const a = sx * w / columns.extent, b = sy * h / rows.extent, c = sz * d / depth.extent;
    return [165 + (a - c) * 0.866 - (sx - sz) * 0.433, 12 + (a + c) * 0.5 + b];
  };
  const path = (points) => `M${points.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L")}Z`;
  const faces = ([w0, w1], [h0, h1], [d0, d1]) => [
    [at(w0, h0, d0), at(w1, h0, d0), at(w1, h0, d1), at(w0, h0, d1)],
    [at(w0, h0, d1), at(w1, h0, d1), at(w1, h1, d1), at(w0, h1, d1)],
    [at(w1, h0, d0), at(w1, h0, d1), at(w1, h1, d1), at(w1, h1, d0)],
  ];
  const W = columns.extent, H = rows.extent, D = depth.extent;
  const line = (a, b) => body.append(svg("line", { class: "slab-cut", x1: a[0], y1: a[1], x2: b[0], y2: b[1] }));
  for (const face of faces([0, W], [0, H], [0, D])) body.append(svg("path", { class: "slab-whole", d: path(face) }));
  cuts(columns).forEach((w) => { line(at(w, 0, 0), at(w, 0, D)); line(at(w, 0, D), at(w, H, D)); });
  cuts(rows).forEach((h) => { line(at(0, h, D), at(W, h, D)); line(at(W, h, D), at(W, h, 0)); });
  cuts(depth).forEach((d) => { line(at(0, 0, d), at(W, 0, d)); line(at(W, 0, d), at(W, H, d)); });
  for (const d of shownReach(depth, 0.05)) for (const h of shownReach(rows, 0.05)) for (const w of shownReach(columns, 0.05)) {
    if (d[1] > d[0] && h[1] > h[0] && w[1] > w[0] && [depth, rows, columns].some(hasHalo)) {
      for (const face of faces(w, h, d)) body.append(svg("path", { class: "slab-halo", fill: "url(#hatch)", "stroke-dasharray": "4 2", d: path(face) }));
    }
  }
  if ([depth, rows, columns].every((one) => one.stop > one.start)) {
    faces([columns.start, columns.stop], [rows.start, rows.stop], [depth.start, depth.stop]).forEach((face, index) =>
      body.append(svg("path", { d: path(face), fill: `color-mix(in srgb, var(--accent) ${[100, 84, 68][index]}%, black)`, stroke: "var(--card)", "stroke-width": 0.8 })));
  }
  const label = (text, [x, y], anchor) => body.append(svg("text", { class: "slab-text", x, y, "text-anchor": anchor }, text));
  const right = at(W / 2, H, D), leftSide = at(0, H / 2, D), behind = at(W, H, D / 2);
  label(`width ${W}`, [right[0] - 14, right[1] + 14], "end");
  label(`depth ${D}`, [behind[0] + 14, behind[1] + 14], "start");
  label(`height ${H}`, [leftSide[0] - 6, leftSide[1]], "end");
}
