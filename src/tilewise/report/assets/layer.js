/* Everything about one layer: its slabs, its costs, the price of each other way to split it. */
class LayerPanel {
  constructor(onSelect) {
    this.root = byId("layer");
    this.onSelect = onSelect;
    this.rank = null;
  }

  show(view, name) {
    const layer = view.layers.find((one) => one.name === name);
    this.root.replaceChildren();
    if (!layer) {
      this.root.append(el("p", { class: "soft" }, "Choose a layer in the graph, in the strip above, or by searching."));
      return;
    }
    this.root.append(...this.head(view, layer), ...this.slabs(view, layer), ...this.costs(view, layer), ...this.prices(view, layer));
  }

  head(view, layer) {
    const chips = cutLetters(layer.degrees).map(([letter, size]) =>
      el("span", { class: "chip", style: `border-color: var(--dim-${letter})` },
        el("span", { class: "swatch", style: `background: var(--dim-${letter})` }), `${letter}${size}: ${WORDS[letter]} in ${size}`));
    if (!chips.length) chips.push(el("span", { class: "chip" }, "not split"));
    const facts = [layer.kind];
    if (layer.shape) facts.push(`makes ${extents(layer.shape)}`);
    if (layer.parameters) facts.push(`${count(layer.parameters)} parameters`);
    if (layer.flops) facts.push(`${count(layer.flops)}FLOP forward`);
    const found = [el("h3", { id: "layer-name" }, layer.name), el("div", { class: "chips" }, chips), el("p", { class: "soft" }, facts.join(" · "))];
    const links = (names) => names.flatMap((name, index) => [index ? ", " : "", el("button", { type: "button", class: "link", onclick: () => this.onSelect(name) }, name)]);
    const readers = view.layers.filter((one) => one.reads.includes(layer.name)).map((one) => one.name);
    if (layer.reads.length) found.push(el("p", { class: "note" }, "reads ", links(layer.reads)));
    if (readers.length) found.push(el("p", { class: "note" }, "read by ", links(readers.slice(0, 8)), readers.length > 8 ? " …" : ""));
    if (!layer.own) found.push(el("p", { class: "note" }, "It has no split of its own: it follows ", links([view.into[layer.name]]), "."));
    return found;
  }

  slabs(view, layer) {
    if (!layer.axes) return [];
    const ranks = view.devices || ranksOf(layer.axes);
    if (this.view !== view || this.rank === null) this.rank = middleRank(layer.axes);
    this.view = view;
    const pictures = el("div", { class: "slabs" });
    const draw = () => {
      const reads = (layer.operands || []).slice(0, 3).map((tensor, index) =>
        slabPicture(tensor, this.rank, layer.operands.length > 1 ? `Reads ${index + 1}` : "Reads"));
      const makes = slabPicture({ shape: layer.shape, dims: layer.dims, axes: layer.axes }, this.rank, "Makes");
      pictures.replaceChildren(...reads, makes);
    };
    const number = el("input", { type: "number", min: "0", max: String(ranks - 1), value: String(this.rank), "aria-label": "Rank" });
    const slider = el("input", { type: "range", min: "0", max: String(ranks - 1), value: String(this.rank), "aria-label": "Rank, as a slider" });
    const change = (value) => {
      this.rank = Math.min(ranks - 1, Math.max(0, Math.round(Number(value) || 0)));
      number.value = slider.value = String(this.rank);
      draw();
    };
    number.addEventListener("change", () => change(number.value));
    slider.addEventListener("input", () => change(slider.value));
    draw();
    const many = (layer.operands || []).length - 3;
    return [el("h3", {}, "Slabs"),
      el("div", { class: "rank" }, el("span", { class: "soft" }, "Rank"), number, slider, el("span", { class: "soft" }, `of ${ranks}`)),
      el("p", { class: "note" }, el("span", { class: "swatch", style: "background: var(--accent)" }), "what the rank holds\u2003",
        el("span", { class: "swatch", style: "background: var(--kind-halo)" }), "what it reads of others: halos (narrow ones drawn wider) and gathered channels"),
      pictures, many > 0 ? el("p", { class: "note" }, `and ${many} more operands`) : null].filter(Boolean);
  }

  costs(view, layer) {
    const number = DATA.plans.indexOf(view);
    const simulated = DATA.simulations.filter((one) => one.plans.includes(number) && one.layers[layer.name]);
    const measured = DATA.runs.filter((one) => one.plans.includes(number) && one.layers[layer.name] !== undefined);
    const watched = measured.map((one) => el("p", { class: "note" }, `${one.label}: measured ${seconds(one.layers[layer.name])} forward on the slowest rank.`));
    if (layer.compute_s === undefined) return [...watched, el("p", { class: "note" }, "No costs are known here; tilewise plan -o writes them into the plan's file.")];
    const values = KINDS.map((kind) => layer[`${kind}_s`]);
    const total = values.reduce((a, b) => a + b, 0) || 1;
    const bar = el("div", { class: "stack", role: "img", "aria-label": KINDS.map((kind, index) => `${KIND_WORDS[kind]} ${seconds(values[index])}`).join(", ") },
      KINDS.map((kind, index) => el("i", { style: `width: ${100 * values[index] / total}%; background: ${colourOf(kind)}` })));
    const step = (view.step || []).find((one) => one.name === layer.name);
    /* What a simulated layer has too: neither the optimizer, nor gradient sums, which come in buckets. */
    const alike = values.map((value, index) => index === 3 ? 0 : step ? step.forward_s[index] + step.backward_s[index] : value);
    const heads = [["kind"], ["predicted", true]];
    if (step) heads.push(["forward", true], ["backward", true]);
    for (const one of simulated) heads.push([`simulated: ${one.label}`, true], ["ratio", true]);
    for (const one of measured) heads.push([`measured: ${one.label}`, true]);
    const rows = KINDS.map((kind, index) => {
      const row = [el("span", {}, el("span", { class: "swatch", style: `background: ${colourOf(kind)}` }), KIND_WORDS[kind]), seconds(values[index])];
      if (step) {
        const both = kind === "sync" ? ["–", seconds(step.sync_s)] : [seconds(step.forward_s[index]), seconds(step.backward_s[index])];
        row.push(...both);
      }
      for (const one of simulated) {
        const theirs = one.layers[layer.name][`${kind}_s`];
        row.push(seconds(theirs ?? 0), theirs && alike[index] ? `${digits(theirs / alike[index])}×` : "–");
      }
      for (const _ of measured) row.push("–");
      return row;
    });
    if (step && measured.length) {
      const forward = step.forward_s.reduce((a, b) => a + b, 0);
      rows.push(["forward, all kinds", seconds(forward), "", "", ...simulated.flatMap(() => ["", ""]),
        ...measured.map((one) => `${seconds(one.layers[layer.name])} (${digits(one.layers[layer.name] / forward)}×)`)]);
    }
    const found = [el("h3", {}, measured.length ? "Costs in a step, predicted and measured" : simulated.length ? "Costs in a step, predicted and simulated" : "Costs in a step"), bar,
      table(heads, rows, `Costs of ${layer.name}`)];
    const share = view.step_seconds ? ` · ${digits(100 * (layerSeconds(layer) || 0) / view.step_seconds, 2)} % of the step` : "";
    found.push(el("p", { class: "note" }, `All ranks send ${bytes(layer.bytes)} for it${share}. Compute includes the optimizer; gradient sums hide behind backward.`));
    if (step) found.push(el("p", { class: "note" }, `The fullest device holds ${bytes(step.forward_bytes)} when it runs forward, ${bytes(step.backward_bytes)} backward.`));
    if (!simulated.length && !measured.length) found.push(el("p", { class: "note" }, "Give a simulation of this plan, or a profiled run, to see it beside the prediction."));
    return found;
  }

  prices(view, layer) {
    const exact = view.explain[layer.name];
    const owner = view.into[layer.name];
    const ways = (view.prices || {})[layer.name] || (view.prices || {})[owner];
    if (exact) return [el("h3", {}, "Every other way to split it"), this.exact(view, exact)];
    if (!ways) return [];
    const base = view.step_seconds;
    const ends = ways.flatMap((way) => [way.low, way.high ?? way.low]).filter((value) => value <= base * 3);
    const low = Math.min(...ends), high = Math.max(...ends, low * 1.0001);
    const at = (value) => 100 * Math.min(1, Math.max(0, (value - low) / (high - low)));
    const rows = ways.map((way) => {
      const top = way.high ?? high;
      const range = el("div", { class: "range", role: "img", "aria-label": `between ${seconds(way.low)} and ${way.high === null ? "any time" : seconds(way.high)}` },
        el("i", { style: `left: ${0.94 * at(way.low)}%; width: ${0.94 * Math.max(at(top) - at(way.low), 0)}%` }));
      const more = (value) => value === null ? "–" : Math.abs(value / base - 1) < 5e-5 ? "the same" : percent(value / base - 1);
      return { chosen: way.chosen, cells: [way.chosen ? `${way.degrees} (chosen)` : way.degrees, more(way.low), more(way.high), range, bytes(way.peak_bytes)] };
    });
    return [el("h3", {}, owner !== layer.name && !(view.prices || {})[layer.name] ? `Other ways to split ${owner}` : "Other ways to split it"),
      table([["degrees"], ["at least", true], ["at most", true], ["step"], ["memory", true]], rows, `Prices for ${layer.name}`),
      el("p", { class: "note" }, "“At least” bounds the step when all other layers re-optimise, “at most” is the step if they stay as they are; a dash: that alone is not allowed or does not fit.")];
  }

  exact(view, ways) {
    const rows = ways.slice(0, 24).map((way) => ({ chosen: way.chosen, cells: [
      way.chosen ? `${way.degrees} (chosen)` : way.degrees, `${way.exact ? "" : "≥ "}${seconds(way.step_seconds)}`,
      way.step_seconds === null ? "does not fit" : percent(way.step_seconds / view.step_seconds - 1), bytes(way.peak_bytes), way.decides] }));
    return table([["degrees"], ["step", true], ["more", true], ["memory", true], ["decides"]], rows, "Prices");
  }
}
