/* Two plans side by side: totals, and the layers that they split differently. */
class Comparison {
  constructor(plans, onSelect, onChange) {
    this.plans = plans;
    this.onSelect = onSelect;
    this.onChange = onChange;
    this.a = byId("compare-a");
    this.b = byId("compare-b");
    if (!this.a) return;
    for (const select of [this.a, this.b]) {
      plans.forEach((view, index) => select.append(el("option", { value: String(index) }, view.label)));
      select.addEventListener("change", () => this.draw());
    }
    this.b.value = "1";
    byId("swap").addEventListener("click", () => {
      [this.a.value, this.b.value] = [this.b.value, this.a.value];
      this.draw();
    });
    this.draw();
  }

  /* The plan to hold another one against. */
  against(index) {
    if (!this.a) return null;
    const other = Number(this.a.value) === index ? Number(this.b.value) : Number(this.a.value);
    return new Map(this.plans[other].layers.map((layer) => [layer.name, layer]));
  }

  draw() {
    const first = this.plans[Number(this.a.value)], second = this.plans[Number(this.b.value)];
    const theirs = new Map(second.layers.map((layer) => [layer.name, layer]));
    const common = first.layers.filter((layer) => theirs.has(layer.name));
    const root = byId("comparison");
    this.onChange();
    root.replaceChildren();
    if (2 * common.length < Math.min(first.layers.length, second.layers.length)) {
      root.append(el("p", { class: "note" }, `${first.label} and ${second.label} are plans of different networks: ${common.length || "no"} layers have the same name.`));
      return;
    }
    const differ = common.filter((layer) => layer.degrees !== theirs.get(layer.name).degrees);
    const sum = (view, kind) => view.known.costs ? view.layers.reduce((total, layer) => total + layer[kind], 0) : null;
    const ratio = (a, b) => a && b ? `${digits(b / a)}×` : "–";
    const rows = [["step", first.step_seconds, second.step_seconds, seconds], ["memory of the fullest device", first.peak_bytes, second.peak_bytes, bytes],
      ["devices", first.devices, second.devices, (value) => value ?? "–"],
      ...KINDS.map((kind) => [KIND_WORDS[kind], sum(first, `${kind}_s`), sum(second, `${kind}_s`), seconds]),
      ["bytes that all ranks send", sum(first, "bytes"), sum(second, "bytes"), bytes]];
    root.append(el("div", { class: "totals" },
      el("div", { class: "card" }, el("h3", {}, "Totals"), table([[""], [first.label, true], [second.label, true], ["ratio", true]],
        rows.map(([name, a, b, text]) => [name, text(a), text(b), ratio(a, b)]), "Totals of both plans")),
      el("div", { class: "card" }, el("h3", {}, "Where the time goes"), this.bars(first, second))));
    const only = first.layers.length + second.layers.length - 2 * common.length;
    root.append(el("p", { id: "difference" }, `${differ.length} of ${common.length} layers are split differently${only ? `; ${only} are in one of them only` : ""}.`));
    if (!differ.length) return;
    const heads = [["layer", false, "name"], [first.label], [second.label], [`time, ${first.label}`, true], [`time, ${second.label}`, true], ["difference", true]];
    const time = (layer) => layerSeconds(layer);
    const list = differ.map((layer) => {
      const other = theirs.get(layer.name), mine = time(layer), its = time(other);
      return [el("button", { type: "button", class: "link", onclick: () => this.onSelect(layer.name, Number(this.a.value)) }, layer.name),
        this.chips(layer.degrees), this.chips(other.degrees), seconds(mine), seconds(its),
        mine !== null && its !== null ? `${its >= mine ? "+" : "−"}${seconds(Math.abs(its - mine))}` : "–"];
    });
    root.append(el("div", { class: "card" }, table(heads, list, "Layers that are split differently")));
  }

  chips(text) {
    const cut = cutLetters(text);
    if (!cut.length) return "not split";
    return el("span", {}, cut.map(([letter, size]) => el("span", { class: "chip", style: `border-color: var(--dim-${letter}); margin-right: .25rem` }, `${letter}${size}`)));
  }

  bars(first, second) {
    if (!first.known.costs || !second.known.costs) return el("p", { class: "note" }, "One of the plan files has no costs.");
    const total = (view) => KINDS.reduce((sum, kind) => sum + view.layers.reduce((s, layer) => s + layer[`${kind}_s`], 0), 0);
    const most = Math.max(total(first), total(second)) || 1;
    const box = el("div", {});
    for (const view of [first, second]) {
      const values = KINDS.map((kind) => view.layers.reduce((sum, layer) => sum + layer[`${kind}_s`], 0));
      box.append(el("div", { class: "soft" }, view.label), el("div", { class: "stack", role: "img", "aria-label": `${view.label}: ${KINDS.map((kind, i) => `${KIND_WORDS[kind]} ${seconds(values[i])}`).join(", ")}` },
        KINDS.map((kind, index) => el("i", { style: `width: ${100 * values[index] / most}%; background: ${colourOf(kind)}` }))));
    }
    box.append(el("ul", { class: "keys" }, KINDS.map((kind) => el("li", {}, el("span", { class: "swatch", style: `background: ${colourOf(kind)}` }), KIND_WORDS[kind]))));
    box.append(el("p", { class: "note" }, "Gradient sums count in full here; most of them hide behind backward."));
    return box;
  }
}
