/* Draw a chart: lines, bars, or a timeline. All are redrawn when their width changes. */
const KIND_COLOURS = {
  compute: "--kind-compute", forward: "--kind-compute", backward: "--kind-backward",
  optimizer: "--kind-optimizer", halo: "--kind-halo", exchange: "--kind-exchange",
  sync: "--kind-sync", chosen: "--accent", fits: "--kind-optimizer", "too large": "--bad",
  "own share": "--kind-compute", "what splitting adds": "--kind-exchange",
  "one device": "--kind-optimizer", "data parallel": "--kind-halo", split: "--kind-compute", input: "--dim-w",
};
const colourOf = (kind) => `var(${KIND_COLOURS[kind] || "--dim-none"})`;
const seriesColour = (index) => `var(--series-${index % 8})`;

function drawChart(chart, onLayer) {
  const place = el("div", { class: chart.kind === "timeline" ? "scroll" : null });
  const figure = el("figure", { class: `figure${chart.kind === "timeline" ? " wide" : ""}`, id: `chart-${chart.id}`, "data-subject": chart.subject },
    el("figcaption", {}, chart.title), place);
  const draw = { lines: drawLines, bars: drawBars, timeline: drawTimeline }[chart.kind];
  let width = 0;
  const redraw = (now) => {
    if (now > 40 && Math.abs(now - width) > 2) {
      width = now;
      place.replaceChildren(draw(chart, width, onLayer, figure));
    }
  };
  new ResizeObserver((entries) => redraw(entries[0].contentRect.width)).observe(place);
  figure.append(keys(chart));
  for (const note of chart.notes) figure.append(el("p", { class: "note" }, note));
  if (chart.sources.length) {
    figure.append(el("ul", { class: "sources" }, chart.sources.map((text) => el("li", {}, text))));
  }
  figure.append(dataTable(chart));
  return figure;
}

function keys(chart) {
  if (chart.kind === "lines") {
    let colour = 0;
    const items = chart.series.map((one) => {
      const style = one.look === "ideal" ? "border-top-style: dashed; color: var(--soft)"
        : `${one.look === "published" ? "border-top-style: dotted; " : ""}color: ${seriesColour(colour++)}`;
      return el("li", {}, el("span", { class: one.look === "points" ? "dot-key" : "line-key", style }), one.label);
    });
    return el("ul", { class: "keys" }, items);
  }
  const kinds = [...new Set(chart.bars.map((bar) => bar.kind))];
  const items = kinds.length < 2 ? [] : kinds.map((kind) =>
    el("li", {}, el("span", { class: "swatch", style: `background: ${colourOf(kind)}` }), KIND_WORDS[kind] || kind));
  for (const mark of chart.marks) {
    items.push(el("li", {}, el("span", { class: "line-key", style: "border-top-style: dotted; color: var(--bad)" }),
      `${mark.label}: ${format(chart.x_unit)(mark.value)}`));
  }
  return items.length ? el("ul", { class: "keys" }, items) : el("span");
}

function dataTable(chart) {
  const details = el("details", {}, el("summary", {}, "Numbers"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    const x = format(chart.x_unit), y = format(chart.y_unit);
    if (chart.kind === "lines") {
      const rows = chart.series.flatMap((one) => one.points.map((point, index) =>
        [one.names[index] ? `${one.label}, ${one.names[index]}` : one.label, x(point[0]), y(point[1])]));
      details.append(table([["series"], [chart.x_label, true], [chart.y_label, true]], rows, chart.title));
    } else {
      const rows = chart.bars.map((bar) => [bar.layer || bar.lane, bar.kind, x(bar.start), x(bar.end), bar.note]);
      details.append(table([["", false, "name"], ["kind"], ["from", true], ["to", true], ["note"]], rows, chart.title));
    }
  });
  return details;
}

function scale(values, low, high, log, zero) {
  let least = Math.min(...values), most = Math.max(...values);
  if (log) {
    least = Math.log(least); most = Math.log(most);
    const room = Math.max((most - least) * 0.06, 0.05);
    least -= room; most += room;
    const map = (value) => low + (high - low) * (Math.log(value) - least) / (most - least);
    return Object.assign(map, { least: Math.exp(least), most: Math.exp(most), log });
  }
  if (zero) least = Math.min(0, least);
  const room = (most - least || Math.abs(most) || 1) * 0.06;
  most += room;
  if (!zero) least -= room;
  const map = (value) => low + (high - low) * (value - least) / (most - least);
  return Object.assign(map, { least, most, log });
}

function ticks(map, unit, wanted) {
  const base = unit === "bytes" ? 2 : 10;
  if (map.log) {
    const found = [];
    const decades = Math.log10(map.most / map.least);
    const steps = base === 2 ? [1] : decades > 3 ? [1] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
    const from = Math.floor(Math.log(map.least) / Math.log(base));
    const to = Math.ceil(Math.log(map.most) / Math.log(base));
    for (let power = from; power <= to; power++) {
      for (const step of steps) {
        const value = step * base ** power;
        if (value >= map.least && value <= map.most) found.push(value);
      }
    }
    /* Between few round powers, round steps say more. */
    if (found.length < 3) return ticks({ least: map.least, most: map.most, log: false }, unit, wanted);
    const every = Math.ceil(found.length / wanted);
    return found.filter((_, index) => index % every === 0);
  }
  const span = map.most - map.least;
  let step = (base === 2 ? 2 ** Math.floor(Math.log2(span / wanted)) : 10 ** Math.floor(Math.log10(span / wanted)));
  for (const more of base === 2 ? [1, 2, 4] : [1, 2, 5, 10]) {
    if (span / (step * more) <= wanted) { step *= more; break; }
  }
  const found = [];
  for (let value = Math.ceil(map.least / step) * step; value <= map.most; value += step) {
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  }
  return found;
}

function drawLines(chart, width) {
  const height = Math.max(250, Math.min(360, width * 0.6));
  const left = 68, right = width - 14, top = 12, bottom = height - 42;
  const every = chart.series.flatMap((one) => one.points);
  const xs = every.map((p) => p[0]), ys = every.map((p) => p[1]);
  for (const mark of chart.marks) (mark.axis === "x" ? xs : ys).push(mark.value);
  const x = scale(xs, left, right, chart.log_x, false);
  const y = scale(ys, bottom, top, chart.log_y, chart.zero_y);
  const fx = format(chart.x_unit), fy = format(chart.y_unit);
  const lines = every.length ? summary(chart, fx, fy) : "no data";
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${chart.title}. ${lines}` });
  let counts = chart.log_x && !chart.x_unit ? [...new Set(xs)].sort((a, b) => a - b) : ticks(x, chart.x_unit, Math.max(3, width / 90));
  counts = counts.filter((value, index) => index === 0 || x(value) - x(counts[index - 1]) > 22);
  for (const value of counts) {
    plot.append(svg("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: bottom }),
      svg("text", { x: x(value), y: bottom + 17, "text-anchor": "middle" }, fx(value)));
  }
  for (const value of ticks(y, chart.y_unit, 6)) {
    plot.append(svg("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, fy(value)));
  }
  plot.append(svg("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, chart.x_label),
    svg("text", { transform: `translate(12 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, chart.y_label));
  for (const mark of chart.marks) {
    const at = mark.axis === "x" ? { x1: x(mark.value), x2: x(mark.value), y1: top, y2: bottom }
      : { x1: left, x2: right, y1: y(mark.value), y2: y(mark.value) };
    const near = mark.axis === "x" && x(mark.value) > (left + right) / 2;
    plot.append(svg("line", { class: "mark", ...at }), svg("text", {
      class: "mark-text", x: mark.axis === "x" ? x(mark.value) + (near ? -5 : 5) : right - 4,
      y: mark.axis === "x" ? top + 10 : y(mark.value) - 4,
      "text-anchor": mark.axis === "x" ? (near ? "end" : "start") : "end",
    }, mark.label));
  }
  let colour = 0;
  const spots = [], taken = [], free = labelPlacer(taken, left, right, top);
  const curves = chart.series.filter((one) => one.look === "line").length;
  let drawn = 0;
  for (const one of chart.series) {
    const points = one.points.map((p) => [x(p[0]), y(p[1])]);
    /* Earlier curves are wider, so that those that lie on each other can all be seen. */
    const thick = one.look === "line" ? 2 + Math.min(1.8 * (curves - ++drawn), 7) : 2;
    const ink = one.look === "ideal" ? "var(--soft)" : seriesColour(colour++);
    if (one.look !== "points") {
      let path = "";
      points.forEach(([px, py], index) => {
        if (index && one.look === "stairs") path += `H${px.toFixed(1)}`;
        path += `${index ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
      });
      plot.append(svg("path", {
        d: path, class: one.look === "ideal" ? "ideal" : "line", stroke: ink,
        "stroke-dasharray": one.look === "published" ? "2 4" : null,
        style: one.look === "line" ? `stroke-width: ${thick}px` : null,
      }));
    }
    points.forEach(([px, py], index) => {
      spots.push({ px, py, name: one.names[index], text: `${one.label}${one.names[index] ? `, ${one.names[index]}` : ""}\n${chart.x_label} ${fx(one.points[index][0])}, ${chart.y_label} ${fy(one.points[index][1])}` });
      if (one.look === "published") {
        plot.append(svg("path", { d: `M${px - 5} ${py - 5}l10 10m0 -10l-10 10`, stroke: ink, "stroke-width": 2.2, fill: "none" }));
      } else if (one.look === "points" || (one.look !== "ideal" && points.length <= 40)) {
        plot.append(svg("circle", { cx: px, cy: py, r: one.look === "points" ? 5 : 3.5, fill: ink }));
      }
    });
  }
  for (const spot of spots) taken.push([spot.px - 5, spot.py - 5, spot.px + 5, spot.py + 5]);
  for (const spot of spots) {
    const at = spot.name && free(spot);
    if (at) plot.append(svg("text", at, spot.name));
  }
  const ring = svg("circle", { r: 7, fill: "none", stroke: "var(--accent)", "stroke-width": 2, visibility: "hidden" });
  plot.append(ring);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const mx = event.clientX - box.left, my = event.clientY - box.top;
    let best = null, least = 60 ** 2;
    for (const spot of spots) {
      const far = (spot.px - mx) ** 2 + (spot.py - my) ** 2;
      if (far < least) { least = far; best = spot; }
    }
    if (!best) { hideTip(); ring.setAttribute("visibility", "hidden"); return; }
    set(ring, { cx: best.px, cy: best.py, visibility: "visible" }, []);
    showTip(event, best.text);
  });
  plot.addEventListener("pointerleave", () => { hideTip(); ring.setAttribute("visibility", "hidden"); });
  return plot;
}

/* Where a point's name can stand without covering anything; null where it cannot. */
function labelPlacer(taken, left, right, top) {
  return ({ px, py, name }) => {
    const wide = name.length * 6.3;
    for (const [x, y, anchor] of [[px + 8, py + 4, "start"], [px - 8, py + 4, "end"], [px + 6, py - 8, "start"], [px - 6, py - 8, "end"], [px + 6, py + 16, "start"], [px - 6, py + 16, "end"]]) {
      const from = anchor === "start" ? x : x - wide, box = [from, y - 10, from + wide, y + 3];
      const clear = from > left && from + wide < right && y - 10 > top
        && taken.every((other) => box[2] < other[0] || other[2] < box[0] || box[3] < other[1] || other[3] < box[1]);
      if (clear) { taken.push(box); return { x, y, "text-anchor": anchor }; }
    }
    return null;
  };
}

function summary(chart, fx, fy) {
  return chart.series.slice(0, 8).map((one) => {
    const first = one.points[0], last = one.points[one.points.length - 1];
    return `${one.label}: ${chart.y_label} ${fy(first[1])} at ${chart.x_label} ${fx(first[0])}, ${fy(last[1])} at ${fx(last[0])}`;
  }).join("; ");
}

function drawBars(chart, width, onLayer) {
  const lanes = [...new Set(chart.bars.map((bar) => bar.lane))];
  const longest = Math.max(...lanes.map((lane) => lane.length));
  const left = Math.min(Math.max(90, longest * 6.9 + 12), width * 0.45), right = width - 84, pitch = 30;
  const height = lanes.length * pitch + 28;
  const most = Math.max(...chart.bars.map((bar) => bar.end)) || 1;
  const fx = format(chart.x_unit);
  const text = lanes.map((lane) => `${lane}: ${fx(Math.max(...chart.bars.filter((bar) => bar.lane === lane).map((bar) => bar.end)))}`).join("; ");
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${chart.title}. ${text}` });
  plot.append(svg("text", { x: left, y: height - 6 }, chart.x_label));
  const room = Math.floor((left - 12) / 6.6);
  lanes.forEach((lane, index) => {
    const y = 4 + index * pitch;
    const some = chart.bars.filter((bar) => bar.lane === lane);
    const short = lane.length > room ? `…${lane.slice(1 - room)}` : lane;
    plot.append(svg("text", { x: left - 8, y: y + 18, "text-anchor": "end" }, short));
    for (const bar of some) {
      const x = left + (right - left) * bar.start / most;
      const size = Math.max((right - left) * (bar.end - bar.start) / most, 1.5);
      plot.append(svg("rect", {
        x, y: y + 3, width: size, height: 21, rx: 3, fill: colourOf(bar.kind),
        onpointermove: (event) => showTip(event, `${lane}\n${fx(bar.end)}${bar.note ? `, ${bar.note}` : ""}`),
        onpointerleave: hideTip, onclick: bar.layer ? () => onLayer(bar.layer) : null,
        style: bar.layer ? "cursor: pointer" : null,
      }));
    }
    const end = Math.max(...some.map((bar) => bar.end));
    plot.append(svg("text", { x: left + (right - left) * end / most + 6, y: y + 18 }, fx(end)));
  });
  return plot;
}

/* The ends of a layer's path that still say which one it is: a number alone does not. */
function tails(path) {
  const parts = path.split(".");
  return parts.map((_, index) => parts.slice(index).join(".")).slice(1).filter((text) => /[a-z]/i.test(text));
}

function drawTimeline(chart, width, onLayer, figure) {
  const lanes = [...new Set(chart.bars.map((bar) => bar.lane))];
  const left = 104, pitch = 40, top = 8;
  const height = top + lanes.length * pitch + 34;
  const most = Math.max(...chart.bars.map((bar) => bar.end), ...chart.marks.map((mark) => mark.value));
  const fx = format(chart.x_unit);
  let zoom = figure.querySelector("input[type=range]");
  if (!zoom) {
    zoom = el("input", { type: "range", min: "1", max: "40", step: "0.5", value: "1", "aria-label": "Zoom of the timeline" });
    figure.insertBefore(el("label", { class: "inline" }, "Zoom", zoom), figure.children[1]);
  }
  const plot = svg("svg", { class: "plot", role: "img" });
  const draw = () => {
    const full = width * Number(zoom.value), right = full - 20;
    const x = (value) => left + (right - left) * value / most;
    plot.replaceChildren();
    set(plot, { viewBox: `0 0 ${full} ${height}`, height, style: `width: ${full}px`,
      "aria-label": `${chart.title}. ${lanes.map((lane) => `${lane} busy ${fx(chart.bars.filter((bar) => bar.lane === lane).reduce((sum, bar) => sum + bar.end - bar.start, 0))}`).join("; ")}; ends at ${fx(most)}` }, []);
    for (const value of ticks({ least: 0, most, log: false }, chart.x_unit, Math.max(3, full / 110))) {
      plot.append(svg("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: height - 26 }),
        svg("text", { x: x(value), y: height - 10, "text-anchor": "middle" }, fx(value)));
    }
    lanes.forEach((lane, index) => {
      plot.append(svg("text", { x: 4, y: top + index * pitch + 24 }, lane));
    });
    for (const bar of chart.bars) {
      const size = x(bar.end) - x(bar.start);
      if (size < 0.15) continue;
      const y = top + lanes.indexOf(bar.lane) * pitch + 5;
      plot.append(svg("rect", {
        x: x(bar.start), y, width: Math.max(size - (size > 3 ? 0.8 : 0), 0.4), height: pitch - 12, fill: colourOf(bar.kind),
        onpointermove: (event) => showTip(event, `${bar.layer}\n${bar.note ? `${bar.note}, ` : ""}${bar.kind}: ${fx(bar.end - bar.start)} from ${fx(bar.start)}`),
        onpointerleave: hideTip, onclick: () => onLayer(bar.layer), style: "cursor: pointer",
      }));
      const room = (size - 8) / 6.8;
      const name = [bar.layer, ...tails(bar.layer)].find((text) => text.length <= room);
      if (name) plot.append(svg("text", { x: x(bar.start) + 4, y: y + 18, style: "fill: var(--card); pointer-events: none" }, name));
    }
    for (const mark of chart.marks) {
      plot.append(svg("line", { class: "mark", x1: x(mark.value), x2: x(mark.value), y1: top, y2: height - 26 }));
    }
  };
  zoom.oninput = draw;
  draw();
  return plot;
}
