/* The network as a graph, and as a strip; both show the same layers and the same colours. */
const NODE = { width: 198, tall: 42, low: 26, gap: 14, lane: 226, gutter: 13 };

const cutLetters = (text) => Object.entries(degrees(text)).sort((a, b) => LETTERS.indexOf(a[0]) - LETTERS.indexOf(b[0]));

class Network {
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.graph = byId("graph");
    this.strip = byId("strip");
    this.zoom = 1;
    this.paint = "split";
    this.unfold = false;
    this.query = "";
    byId("zoom-in").addEventListener("click", () => this.setZoom(this.zoom * 1.25));
    byId("zoom-out").addEventListener("click", () => this.setZoom(this.zoom / 1.25));
    byId("zoom-fit").addEventListener("click", () => this.fit());
    this.graph.addEventListener("keydown", (event) => this.key(event));
    this.graph.addEventListener("click", (event) => {
      const node = event.target.closest(".node");
      if (node) { this.onSelect(node.dataset.name); node.focus({ preventScroll: true }); }
    });
  }

  show(view, other) {
    this.view = view;
    this.other = other;
    this.layers = new Map(view.layers.map((layer) => [layer.name, layer]));
    this.draw();
    this.drawStrip();
  }

  /* The node that a layer is drawn with. */
  nodeOf(name) { return this.unfold ? name : this.view.into[name]; }

  draw() {
    const drawing = this.view.drawings[this.unfold ? "all" : "folded"];
    const left = 16 + drawing.gutters * NODE.gutter;
    const tall = Array(drawing.rows).fill(NODE.low);
    for (const [name, [row]] of Object.entries(drawing.places)) {
      if (this.layers.get(name).own || !this.unfold) tall[row] = NODE.tall;
    }
    const tops = [];
    let y = 14;
    for (const height of tall) { tops.push(y); y += height + NODE.gap; }
    this.width = left + drawing.lanes * NODE.lane;
    this.height = y + 8;
    this.boxes = new Map();
    for (const [name, [row, lane]] of Object.entries(drawing.places)) {
      this.boxes.set(name, { x: left + lane * NODE.lane, y: tops[row], height: tall[row], row, lane });
    }
    const members = new Map();
    for (const layer of this.view.layers) {
      const owner = this.nodeOf(layer.name);
      if (!members.has(owner)) members.set(owner, []);
      members.get(owner).push(layer);
    }
    this.members = members;
    this.picture = svg("svg", { viewBox: `0 0 ${this.width} ${this.height}` });
    this.edges = [];
    this.sources = new Map(); this.readers = new Map();
    const lines = svg("g", { "aria-hidden": "true" });
    for (const [source, target, way, slot] of drawing.edges) {
      const path = svg("path", { class: "edge", d: this.route(source, target, way, slot) });
      this.edges.push({ source, target, path });
      this.link(this.readers, source, target);
      this.link(this.sources, target, source);
      lines.append(path);
    }
    this.picture.append(lines);
    this.nodes = new Map();
    for (const name of this.boxes.keys()) {
      const node = this.node(name);
      this.nodes.set(name, node);
      this.picture.append(node);
    }
    this.graph.replaceChildren(this.picture);
    this.fit();
    this.mark();
  }

  link(map, from, to) {
    if (!map.has(from)) map.set(from, []);
    map.get(from).push(to);
  }

  route(source, target, way, slot) {
    const a = this.boxes.get(source), b = this.boxes.get(target);
    const ax = a.x + NODE.width / 2, bx = b.x + NODE.width / 2, ay = a.y + a.height, by = b.y;
    if (way === "skip") {
      const x = this.boxes.size ? 10 + Math.min(a.x, b.x) - 16 - slot * NODE.gutter : 0;
      const my = a.y + a.height / 2, ny = b.y + b.height / 2;
      return `M${a.x} ${my}C${x} ${my} ${x} ${my} ${x} ${my + 14}V${ny - 14}C${x} ${ny} ${x} ${ny} ${b.x} ${ny}`;
    }
    if (ax === bx) return `M${ax} ${ay}V${by}`;
    const room = NODE.gap + 6;
    if (way === "branch") {
      return `M${ax} ${ay}C${ax} ${ay + room} ${bx} ${ay} ${bx} ${ay + room}V${by}`;
    }
    return `M${ax} ${ay}V${by - room}C${ax} ${by} ${bx} ${by - room} ${bx} ${by}`;
  }

  node(name) {
    const box = this.boxes.get(name), layer = this.layers.get(name), cut = cutLetters(layer.degrees);
    const small = box.height < NODE.tall || (this.unfold && !layer.own);
    const height = small && this.unfold ? NODE.low : box.height;
    const group = svg("g", {
      class: `node${cut.length ? "" : " uncut"}`, tabindex: "-1", role: "button", "data-name": name,
      transform: `translate(${box.x} ${box.y + (box.height - height) / 2})`,
      "aria-label": this.label(name),
    }, svg("title", {}, `${name}\n${layer.kind}, ${layer.degrees}`));
    group.append(svg("rect", { class: "box", width: NODE.width, height, rx: 7 }));
    group.append(this.tint(name, NODE.width, height));
    const more = this.members.get(name).length - 1;
    const room = 24;
    const short = name.length > room ? `…${name.slice(1 - room)}` : name;
    if (small && this.unfold) {
      group.append(svg("text", { x: 9, y: 17 }, name.length > 17 ? `…${name.slice(-16)}` : name), svg("text", { class: "small", x: NODE.width - 8, y: 17, "text-anchor": "end" }, layer.kind.slice(0, 10)));
    } else {
      group.append(svg("text", { x: 9, y: 16, style: "font-weight: 600" }, short),
        svg("text", { class: "small", x: 9, y: 31 }, layer.degrees === "1" ? "not split" : layer.degrees),
        svg("text", { class: "small", x: NODE.width - 8, y: 31, "text-anchor": "end" }, `${layer.kind.slice(0, 14)}${more ? ` +${more}` : ""}`));
    }
    return group;
  }

  label(name) {
    const layer = this.layers.get(name), time = this.sum(name, layerSeconds);
    const parts = [name, layer.kind, spoken(layer.degrees)];
    if (time !== null) parts.push(seconds(time));
    return parts.join(", ");
  }

  sum(name, value) {
    let total = null;
    for (const layer of this.members.get(name) || [this.layers.get(name)]) {
      const one = value(layer);
      if (one !== null && one !== undefined) total = (total || 0) + one;
    }
    return total;
  }

  /* How a node is filled: slices for its degrees, or one colour by a number. */
  tint(name, width, height) {
    const group = svg("g", { "clip-path": "inset(1px round 6px)" });
    const layer = this.layers.get(name);
    if (this.paint === "split") {
      const cut = cutLetters(layer.degrees), weights = cut.map(([, size]) => 1 + Math.log2(size));
      const total = weights.reduce((a, b) => a + b, 0);
      let x = 0;
      cut.forEach(([letter], index) => {
        const size = width * weights[index] / total;
        group.append(svg("rect", { x, width: size, height, fill: `var(--dim-${letter})`, style: "opacity: var(--tint)" }),
          svg("rect", { x, y: height - 5, width: size, height: 5, fill: `var(--dim-${letter})` }));
        x += size;
      });
      return group;
    }
    const share = this.share(name);
    if (share > 0) {
      const colour = this.paint === "change" ? "var(--dim-c)" : this.paint === "bytes" ? "var(--kind-halo)" : "var(--kind-compute)";
      group.append(svg("rect", { width, height, fill: colour, style: `opacity: ${(0.08 + 0.62 * Math.sqrt(share)).toFixed(3)}` }));
    }
    return group;
  }

  share(name) {
    if (this.paint === "change") {
      const theirs = this.other && this.other.get(name);
      return theirs && theirs.degrees !== this.layers.get(name).degrees ? 1 : 0;
    }
    const value = this.paint === "bytes" ? (layer) => layer.bytes : layerSeconds;
    if (this.most === undefined || this.mostOf !== this.paint + this.unfold + this.view.label) {
      this.most = Math.max(...[...this.boxes.keys()].map((one) => this.sum(one, value) || 0));
      this.mostOf = this.paint + this.unfold + this.view.label;
    }
    return this.most ? (this.sum(name, value) || 0) / this.most : 0;
  }

  drawStrip() {
    const shown = this.view.layers, n = shown.length;
    const times = shown.map((layer) => layerSeconds(layer) || 0), most = Math.max(...times);
    const picture = svg("svg", { viewBox: `0 0 ${n} 64`, preserveAspectRatio: "none", role: "img",
      "aria-label": `All ${n} layers in order, coloured by how they are split; height is time` });
    this.marks = new Map();
    shown.forEach((layer, index) => {
      const cut = cutLetters(layer.degrees);
      const height = most ? 10 + 52 * Math.sqrt(times[index] / most) : 40;
      const total = cut.reduce((sum, [, size]) => sum + 1 + Math.log2(size), 0);
      let y = 64 - height;
      const group = svg("g", {});
      if (!cut.length) group.append(svg("rect", { x: index, y, width: 0.92, height, fill: "var(--dim-none)" }));
      for (const [letter, size] of cut) {
        const part = height * (1 + Math.log2(size)) / total;
        group.append(svg("rect", { x: index, y, width: 0.92, height: part, fill: `var(--dim-${letter})` }));
        y += part;
      }
      this.marks.set(layer.name, group);
      picture.append(group);
    });
    this.needle = svg("rect", { y: 0, width: 1, height: 64, fill: "var(--accent)", opacity: 0.35, visibility: "hidden" });
    picture.append(this.needle);
    const layerAt = (event) => {
      const box = picture.getBoundingClientRect();
      return shown[Math.min(n - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * n)))];
    };
    picture.addEventListener("click", (event) => this.onSelect(layerAt(event).name));
    picture.addEventListener("pointermove", (event) => {
      const layer = layerAt(event);
      showTip(event, `${layer.name}\n${layer.degrees}${layerSeconds(layer) === null ? "" : `, ${seconds(layerSeconds(layer))}`}`);
    });
    picture.addEventListener("pointerleave", hideTip);
    this.strip.replaceChildren(picture);
  }

  select(name, { reveal = true, focus = false } = {}) {
    this.chosen = name;
    this.mark();
    const owner = this.nodeOf(name), node = this.nodes.get(owner);
    if (reveal && node) this.reveal(owner);
    if (focus && node) node.focus({ preventScroll: true });
  }

  reveal(owner) {
    const box = this.boxes.get(owner), z = this.zoom, view = this.graph;
    const y = box.y * z, x = box.x * z;
    if (y < view.scrollTop + 30 || y + box.height * z > view.scrollTop + view.clientHeight - 30) {
      view.scrollTop = y - view.clientHeight / 2;
    }
    if (x < view.scrollLeft || x + NODE.width * z > view.scrollLeft + view.clientWidth) {
      view.scrollLeft = x - view.clientWidth / 2;
    }
  }

  mark() {
    if (!this.nodes) return;
    const owner = this.chosen && this.layers.has(this.chosen) ? this.nodeOf(this.chosen) : null;
    const first = this.nodes.keys().next().value;
    for (const [name, node] of this.nodes) {
      node.classList.toggle("chosen", name === owner);
      node.setAttribute("tabindex", name === (owner || first) ? "0" : "-1");
      node.setAttribute("aria-pressed", String(name === owner));
      const fits = !this.query || this.members.get(name).some((layer) => matches(layer, this.query));
      node.classList.toggle("dim", !fits);
    }
    for (const edge of this.edges) {
      edge.path.classList.toggle("near", edge.source === owner || edge.target === owner);
    }
    const index = this.view.layers.findIndex((layer) => layer.name === this.chosen);
    if (this.needle) set(this.needle, { x: index, visibility: index < 0 ? "hidden" : "visible" }, []);
  }

  setQuery(query) { this.query = query; this.mark(); }

  setPaint(paint, other) {
    this.paint = paint;
    this.other = other;
    this.draw();
  }

  setUnfold(unfold) { this.unfold = unfold; this.draw(); if (this.chosen) this.reveal(this.nodeOf(this.chosen)); }

  setZoom(zoom) {
    this.zoom = Math.min(2.5, Math.max(0.08, zoom));
    set(this.picture, { width: this.width * this.zoom, height: this.height * this.zoom }, []);
  }

  fit() { this.setZoom(Math.min(1.15, Math.max(0.5, (this.graph.clientWidth - 20) / this.width))); }

  key(event) {
    const node = event.target.closest(".node");
    if (!node) return;
    const name = node.dataset.name, box = this.boxes.get(name);
    const order = [...this.boxes.keys()];
    const beside = (step) => order.filter((one) => this.boxes.get(one).row === box.row)
      .sort((a, b) => this.boxes.get(a).lane - this.boxes.get(b).lane)
      .find((one) => step * (this.boxes.get(one).lane - box.lane) > 0);
    const goals = {
      ArrowDown: () => this.readers.get(name)?.[0] ?? order[order.indexOf(name) + 1],
      ArrowUp: () => this.sources.get(name)?.[0] ?? order[order.indexOf(name) - 1],
      ArrowRight: () => beside(1), ArrowLeft: () => beside(-1),
      Home: () => order[0], End: () => order[order.length - 1],
      Enter: () => name, " ": () => name,
    };
    if (!goals[event.key]) return;
    event.preventDefault();
    const goal = goals[event.key]();
    if (goal) { this.onSelect(goal); this.nodes.get(goal).focus({ preventScroll: true }); }
  }
}

function matches(layer, query) {
  const text = `${layer.name} ${layer.kind} ${layer.degrees}`.toLowerCase();
  return query.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}
