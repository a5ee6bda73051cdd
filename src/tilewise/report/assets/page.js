/* Bring the page to life. */
const DATA = JSON.parse(byId("data").textContent);
document.body.append(tip);

function theme() {
  const select = byId("theme");
  let kept = null;
  try { kept = localStorage.getItem("tilewise-theme"); } catch { kept = null; }
  const apply = (value) => {
    if (value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = value;
  };
  if (kept) { select.value = kept; apply(kept); }
  select.addEventListener("change", () => {
    apply(select.value);
    try { localStorage.setItem("tilewise-theme", select.value); } catch { /* a page from disk may have no storage */ }
  });
  byId("print").addEventListener("click", () => window.print());
}

function cards() {
  const big = (pairs) => el("div", { class: "big" }, pairs.filter(([value]) => value !== null && value !== undefined).map(([value, text]) => el("div", {}, el("b", {}, value), el("span", {}, text))));
  const place = byId("cards");
  const agreement = (one) => {
    if (!one.agreement) return null;
    const same = one.agreement.bytes_equal ? el("span", { class: "good" }, "✓ bytes are the planner's, layer by layer") : el("span", { class: "bad" }, "✗ bytes differ from the planner's");
    const ratios = [["step", one.agreement.step_ratio], ["memory", one.agreement.peak_ratio]].filter(([, value]) => value);
    return el("p", { class: "note" }, same, ratios.map(([name, value]) => ` · ${name} ${digits(value)}×`).join(""));
  };
  for (const view of DATA.plans) {
    if (view.origin !== "plan") continue;
    const facts = [view.model, (view.inputs || []).map(extents).join(", "), view.dtype, view.optimizer].filter(Boolean).join(" · ");
    const proof = view.optimal === undefined ? null : view.optimal ? el("span", { class: "good" }, "✓ proven best of all candidates") : view.gap === undefined || view.gap === null ? "not proven best: the search ran out of time" : `at most ${digits(100 * view.gap, 2)} % from the best`;
    const splits = view.splits.slice(0, 4).map(([text, number]) => `${text === "1" ? "not split" : text} (${number})`).join(", ");
    place.append(el("article", { class: "card" }, el("h3", {}, view.label, " ", el("span", { class: "kind" }, "plan")), el("p", { class: "soft" }, facts),
      big([[view.step_seconds ? seconds(view.step_seconds) : null, "a step"], [view.peak_bytes ? bytes(view.peak_bytes) : null, "fullest device"], [view.devices, view.machine ? `devices of ${view.machine}` : "devices"]]),
      el("p", { class: "note" }, `${view.layers.length} layers: ${splits}${view.splits.length > 4 ? ", …" : ""}`), proof && el("p", { class: "note" }, proof)));
  }
  for (const one of DATA.simulations) {
    place.append(el("article", { class: "card" }, el("h3", {}, one.label, " ", el("span", { class: "kind" }, "simulation")), el("p", { class: "soft" }, one.model || ""),
      big([[seconds(one.step_seconds), "a step"], [one.peak_bytes ? bytes(one.peak_bytes) : null, "fullest rank"], [one.devices, one.machine ? `devices of ${one.machine}` : "devices"]]),
      agreement(one)));
  }
  for (const one of DATA.runs) {
    place.append(el("article", { class: "card" }, el("h3", {}, one.label, " ", el("span", { class: "kind" }, "training run")), el("p", { class: "soft" }, [one.model, one.plan && `split ${one.plan}`].filter(Boolean).join(" · ")),
      big([[one.loss === undefined ? null : digits(one.loss, 4), "last loss"], [one.step_seconds ? seconds(one.step_seconds) : null, "a step (median)"], [String(one.steps), "steps"]])));
  }
  if (!place.children.length) place.append(el("p", { class: "soft" }, "Benches only; see below."));
}

function legend() {
  const used = new Set(DATA.plans.flatMap((view) => view.layers.flatMap((layer) => Object.keys(degrees(layer.degrees)))));
  for (const letter of LETTERS) {
    if (used.has(letter)) byId("legend").append(el("li", {}, el("span", { class: "swatch", style: `background: var(--dim-${letter})` }), `${letter}: ${WORDS[letter]}`));
  }
  byId("legend").append(el("li", {}, el("span", { class: "swatch", style: "background: var(--dim-none)" }), "not split"));
}

function networkSection(compareWith) {
  const plans = DATA.plans;
  let current = 0;
  const panel = new LayerPanel((name) => choose(name));
  const network = new Network((name) => choose(name));
  const chooser = byId("plan");
  plans.forEach((view, index) => chooser.append(el("option", { value: String(index) }, view.label)));
  const choose = (name, plan = current, options = {}) => {
    if (plan !== current) show(plan);
    network.select(name, options);
    panel.show(plans[current], name);
  };
  const show = (index) => {
    current = index;
    chooser.value = String(index);
    network.show(plans[index], compareWith(index));
    const kept = plans[index].layers.some((layer) => layer.name === network.chosen);
    const slowest = plans[index].layers.reduce((a, b) => (layerSeconds(b) || 0) > (layerSeconds(a) || 0) ? b : a);
    choose(kept ? network.chosen : slowest.name, index);
    ownCharts();
  };
  const ownCharts = () => {
    for (const figure of document.querySelectorAll("#network .figure")) {
      figure.hidden = figure.dataset.subject !== plans[current].label;
    }
  };
  chooser.addEventListener("change", () => show(Number(chooser.value)));
  byId("paint").addEventListener("change", (event) => {
    network.setPaint(event.target.value, compareWith(current));
    network.mark();
  });
  if (plans.length < 2) byId("paint").querySelector("[value=change]").remove();
  byId("unfold").addEventListener("change", (event) => network.setUnfold(event.target.checked));
  legend();
  search(() => plans[current].layers, (text) => network.setQuery(text), (name) => {
    choose(name);
    byId("graph").parentElement.scrollIntoView({ block: "nearest" });
  });
  return {
    show, choose, ownCharts,
    refresh: () => { if (network.view && network.paint === "change") network.setPaint("change", compareWith(current)); },
  };
}

function search(layers, onQuery, onPick) {
  const input = byId("search"), list = byId("matches");
  let found = [], at = -1;
  const close = () => { list.hidden = true; input.setAttribute("aria-expanded", "false"); input.removeAttribute("aria-activedescendant"); };
  const point = (index) => {
    at = index;
    [...list.children].forEach((item, number) => item.setAttribute("aria-selected", String(number === at)));
    if (at >= 0) { input.setAttribute("aria-activedescendant", `match-${at}`); list.children[at].scrollIntoView({ block: "nearest" }); }
  };
  const pick = (layer) => { input.value = layer.name; close(); onQuery(""); onPick(layer.name); };
  input.addEventListener("input", () => {
    const query = input.value.trim();
    onQuery(query);
    if (!query) { close(); return; }
    found = layers().filter((layer) => matches(layer, query)).slice(0, 40);
    list.replaceChildren(...found.map((layer, index) => el("li", { role: "option", id: `match-${index}`, "aria-selected": "false", onpointerdown: (event) => { event.preventDefault(); pick(layer); } },
      el("span", {}, layer.name), el("span", { class: "soft" }, `${layer.kind} · ${layer.degrees}`))));
    if (!found.length) list.append(el("li", { class: "none" }, "no layer matches"));
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    point(found.length ? 0 : -1);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && found.length) { event.preventDefault(); point((at + 1) % found.length); }
    else if (event.key === "ArrowUp" && found.length) { event.preventDefault(); point((at + found.length - 1) % found.length); }
    else if (event.key === "Enter" && at >= 0 && !list.hidden) { event.preventDefault(); pick(found[at]); }
    else if (event.key === "Escape") { input.value = ""; onQuery(""); close(); }
  });
  input.addEventListener("blur", () => { close(); onQuery(""); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); input.focus(); }
  });
}

function runs() {
  const place = byId("runs");
  if (!place) return;
  const names = [...new Set(DATA.runs.flatMap((one) => Object.keys(one.last)))];
  place.append(el("div", { class: "card" }, table([["run", false, "name"], ["steps", true], ["a step", true], ["last loss", true], ...names.map((name) => [name, true])],
    DATA.runs.map((one) => [one.label, String(one.steps), seconds(one.step_seconds), one.loss === undefined ? "–" : digits(one.loss, 4), ...names.map((name) => one.last[name] === undefined ? "–" : digits(one.last[name], 4))]), "Training runs")));
}

/* The number of the plan that a chart is about, or of the simulation that it is about. */
function planOf(subject) {
  const simulated = DATA.simulations.find((one) => one.label === subject);
  return simulated ? simulated.plans[0] ?? -1 : DATA.plans.findIndex((view) => view.label === subject);
}

theme();
cards();
let section = null, comparison = null;
if (byId("network")) {
  section = networkSection((index) => comparison ? comparison.against(index) : null);
  if (byId("compare")) {
    comparison = new Comparison(DATA.plans, (name, plan) => {
      section.choose(name, plan);
      byId("network").scrollIntoView();
    }, () => section.refresh());
  }
  section.show(0);
}
runs();
for (const place of document.querySelectorAll(".charts")) {
  for (const chart of DATA.charts) {
    if (chart.group === place.dataset.group) {
      place.append(drawChart(chart, (name) => {
        const plan = planOf(chart.subject);
        if (section && plan >= 0 && DATA.plans[plan].layers.some((layer) => layer.name === name)) {
          section.choose(name, plan);
          byId("network").scrollIntoView();
        }
      }));
    }
  }
}
if (section) section.ownCharts();
document.documentElement.dataset.ready = "yes";
