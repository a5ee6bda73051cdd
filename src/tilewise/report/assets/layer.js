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
    const watched = measured.map((one) => el("p", { class: "note" }, `${one.label}: measured ` +
      PHASES.filter((phase) => one.layers[layer.name][`${phase}_s`]).map((phase) => `${seconds(one.layers[layer.name][`${phase}_s`])} ${phase}`).join(", ") + " on the slowest rank."));
    if (layer.compute_s === undefined) return [...watched, el("p", { class: "note" }, "No costs are known here; tilewise plan -o writes them into the plan's file.")];
    const values = KINDS.map((kind) => layer[`${kind}_s`]);
    const total = values.reduce((a, b) => a + b, 0) || 1;
    const bar = el("div", { class: "stack", role: "img", "aria-label": KINDS.map((kind, index) => `${KIND_WORDS[kind]} ${seconds(values[index])}`).join(", ") },
      KINDS.map((kind, index) => el("i", { style: `width: ${100 * values[index] / total}%; background: ${colourOf(kind)}` })));
    const step = (view.step || []).find((one) => one.name === layer.name);
    /* Gradient sums are simulated in buckets, so a layer's own has nothing to stand beside. */
    const alike = values.map((value, index) => KINDS[index] === "sync" ? 0 : value);
    const heads = [["kind"]];
    if (step) heads.push(["forward", true], ["backward", true], ["optimizer", true]);
    heads.push(["predicted", true]);
    for (const one of simulated) heads.push([`simulated: ${one.label}`, true], ["ratio", true]);
    const rows = KINDS.map((kind, index) => {
      const row = [el("span", {}, el("span", { class: "swatch", style: `background: ${colourOf(kind)}` }), KIND_WORDS[kind])];
      if (step) {
        row.push(...(kind === "sync" ? ["–", seconds(step.sync_s)] : [seconds(step.forward_s[index]), seconds(step.backward_s[index])]));
        row.push(kind === "compute" ? seconds(step.optimizer_s) : "–");
      }
      row.push(seconds(values[index]));
      for (const one of simulated) {
        const theirs = one.layers[layer.name][`${kind}_s`];
        row.push(theirs || kind !== "sync" ? seconds(theirs) : "–", theirs && alike[index] ? `${digits(theirs / alike[index])}×` : "–");
      }
      return row;
    });
    const found = [el("h3", {}, simulated.length ? "Costs in a step, predicted and simulated" : "Costs in a step"), bar,
      table(heads, rows, `Costs of ${layer.name}`)];
    const share = view.step_seconds ? ` · ${digits(100 * (layerSeconds(layer) || 0) / view.step_seconds, 2)} % of the step` : "";
    found.push(el("p", { class: "note" }, `All ranks send ${bytes(layer.bytes)} for it${share}. Gradient sums hide behind backward${simulated.length ? "; simulated ones, in buckets, stand with the layer that completes one" : ""}.`));
    if (step) found.push(el("p", { class: "note" }, `The fullest device holds ${bytes(step.forward_bytes)} when it runs forward, ${bytes(step.backward_bytes)} backward.`));
    if (measured.length) found.push(...this.measured(layer, step, measured));
    if (!simulated.length && !measured.length) found.push(el("p", { class: "note" }, "Give a simulation of this plan, or a profiled run, to see it beside the prediction."));
    return found;
  }

  measured(layer, step, runs) {
    const heads = [[""], ["predicted", true], ...runs.flatMap((one) => [[`measured: ${one.label}`, true], ["ratio", true]])];
    const rows = PHASES.map((phase) => {
      const predicted = step ? step[`${phase}_s`].reduce((a, b) => a + b, 0) : null;
      return [phase, seconds(predicted), ...runs.flatMap((one) => {
        const taken = one.layers[layer.name][`${phase}_s`];
        return [seconds(taken), taken && predicted ? `${digits(taken / predicted)}×` : "–"];
      })];
    });
    return [el("h3", {}, "Predicted and measured"), table(heads, rows, `Measured times of ${layer.name}`),
      el("p", { class: "note" }, "The median of the profiled steps on the slowest rank, with messages and the profiler's own time; gradient sums and the optimizer stand apart.")];
  }

  prices(view, layer) {
    const known = { ...view.prices, ...view.explain };
    const owner = known[layer.name] ? layer.name : view.into[layer.name];
    const ways = (known[owner] || []).slice(0, 24);
    if (!ways.length) return [];
    const title = owner === layer.name ? "What other ways to split it cost" : `What other ways to split ${owner} cost`;
    if (ways.length === 1) return [el("h3", {}, title), el("p", { class: "note" }, `There is no other way: it was pinned to ${ways[0].degrees}, or has only this one.`)];
    const base = view.step_seconds;
    const ends = ways.flatMap((way) => [way.step_seconds, way.alone_seconds]).filter((value) => value && value <= base * 3);
    const low = Math.min(...ends, base), high = Math.max(...ends, low * 1.0001);
    const at = (value) => 94 * Math.min(1, Math.max(0, (value - low) / (high - low)));
    const more = (value) => Math.abs(value / base - 1) < 5e-5 ? "the same" : percent(value / base - 1);
    const rows = ways.map((way) => {
      const fits = typeof way.step_seconds === "number", alone = typeof way.alone_seconds === "number";
      const left = fits ? at(way.step_seconds) : 94;
      const range = el("div", { class: way.exact ? "range exact" : "range", "aria-hidden": "true" },
        fits ? el("i", { style: `left: ${left}%; width: ${Math.max((alone ? at(way.alone_seconds) : 94) - left, 0)}%` }) : null);
      const bounded = !way.exact && typeof way.found_seconds === "number";
      const low = fits ? more(way.step_seconds) : "does not fit", top = bounded ? more(way.found_seconds) : low;
      return { chosen: way.chosen, cells: [way.chosen ? `${way.degrees} (chosen)` : way.degrees,
        low === top ? low : `${low} … ${top}`, way.exact ? "exact" : bounded ? "between" : "at least",
        alone ? more(way.alone_seconds) : "–", range, bytes(way.alone_peak_bytes), ...(way.decides ? [way.decides] : [])] };
    });
    const heads = [["degrees"], ["step", true], [""], ["others stay", true], ["", false, "drawn"], ["memory", true]];
    if (ways[0].decides) heads.push(["decides"]);
    return [el("h3", {}, title),
      table(heads, rows, `Prices for ${owner}`),
      el("p", { class: "note" }, "“Step” is the best step with that split when all other layers re-optimise: exact, or between two bounds, or at least that, where the time for proving ran out. " +
        "“Others stay” is the step, with its memory, if nothing else changes; a dash where that alone is not allowed or does not fit. Where memory had to be limited it is the step's peak, otherwise all that is held and the largest burst added up, which is often above the peak.")];
  }
}
