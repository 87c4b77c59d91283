"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main"), tip = document.getElementById("tip"), root = document.documentElement;

/* Elements, numbers and arrays. */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map(String_or_node));
  return node;
}
function String_or_node(child) { return child instanceof Node ? child : String(child); }
function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
const number = new Intl.NumberFormat("en"), short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const fixed = (value, digits = 2) => (value === null || value === undefined ? "" : value.toFixed(digits));
const percent = (value) => `${(100 * value).toFixed(1)} %`;
const bytes = (value) => (value >= 1e9 ? `${fixed(value / 1e9)} GB` : value >= 1e6 ? `${fixed(value / 1e6)} MB` : value >= 1e3 ? `${fixed(value / 1e3, 1)} kB` : `${value} B`);
const KINDS = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, int16: Int16Array, int32: Int32Array };
function unpack(packed) {
  const text = atob(packed.data), raw = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) raw[i] = text.charCodeAt(i);
  return Object.assign(new KINDS[packed.dtype](raw.buffer), { shape: packed.shape });
}
const flops = (value) => (value >= 1e12 ? `${fixed(value / 1e12)} TFLOP` : value >= 1e9 ? `${fixed(value / 1e9, 1)} GFLOP` : `${fixed(value / 1e6, 1)} MFLOP`);
const tile = (name, value, note) => el("div", { class: "tile" }, el("span", {}, name), el("b", {}, value), note ? el("span", {}, note) : null);

/* A table with headers that sort. columns: [title, cell(row), {num, wrap, key(row)}]. */
function table(columns, rows, label, mark) {
  const body = el("tbody");
  let by = null, down = true;
  const heads = columns.map(([title, cell, options = {}], i) => el("th", { class: options.num ? "num" : null, scope: "col", "aria-sort": "none" },
    el("button", { type: "button", onclick: () => { down = by === i ? !down : Boolean(options.num); by = i; fill(); } }, title)));
  const key = (row, i) => { const [, cell, options = {}] = columns[i]; return options.key ? options.key(row) : cell(row); };
  function fill() {
    const sorted = rows.slice();
    if (by !== null) sorted.sort((a, b) => { const [x, y] = [key(a, by), key(b, by)]; return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1); });
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== by ? "none" : down ? "descending" : "ascending"));
    body.replaceChildren(...sorted.map((row) => el("tr", { class: mark ? mark(row) : null }, columns.map(([, cell, options = {}]) =>
      el("td", { class: options.num ? "num" : options.wrap ? "wrap" : null }, cell(row))))));
  }
  fill();
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body));
}
function showTip(event, text) {
  tip.textContent = text; tip.hidden = !text;
  if (!text) return;
  const box = tip.getBoundingClientRect(), x = event.clientX + 14, y = event.clientY + 14;
  tip.style.left = `${Math.max(4, Math.min(x, innerWidth - box.width - 6))}px`;
  tip.style.top = `${y + box.height > innerHeight ? event.clientY - box.height - 10 : y}px`;
}
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

/* A heat map: value(row, column) in [-1, 1] around even, or NaN for none. Arrow keys move, a click selects. */
const drawn = [];
function colour(value) {
  const style = getComputedStyle(root), parts = (name) => style.getPropertyValue(name).split(",").map(Number);
  const even = parts("--even"), far = parts(value < 0 ? "--cool" : "--hot"), share = Math.min(1, Math.abs(value));
  return even.map((one, i) => Math.round(one + (far[i] - one) * share));
}
function heat({ rows, columns, value, text, label, height, pick, chosen }) {
  const canvas = el("canvas", { class: "pick", tabindex: "0", role: "img", "aria-label": `${label}. Arrow keys move the selection.` });
  const line = el("p", { class: "note", "aria-live": "polite" });
  let at = null;
  function draw() {
    canvas.width = columns; canvas.height = rows;
    canvas.style.width = "100%"; canvas.style.height = `${rows * height}px`; canvas.style.imageRendering = "pixelated";
    const context = canvas.getContext("2d"), image = context.createImageData(columns, rows), scale = [];
    for (let i = 0; i <= 200; i++) scale.push(colour(i / 100 - 1));
    for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
      const v = value(row, column), place = 4 * (row * columns + column);
      const [r, g, b] = scale[Math.round(100 * (1 + Math.max(-1, Math.min(1, v || 0))))];
      image.data.set([r, g, b, Number.isNaN(v) ? 0 : 255], place);
    }
    context.putImageData(image, 0, 0);
  }
  const where = (event) => { const box = canvas.getBoundingClientRect(); return [
    Math.min(rows - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * rows))),
    Math.min(columns - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * columns)))]; };
  const go = (row, column, select) => { at = [row, column]; line.textContent = text(row, column); if (select && pick) pick(row, column); };
  canvas.addEventListener("pointermove", (event) => showTip(event, text(...where(event))));
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", (event) => go(...where(event), true));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, column] = at || (chosen ? chosen() : [0, 0]);
    go(Math.min(rows - 1, Math.max(0, row + step[0])), Math.min(columns - 1, Math.max(0, column + step[1])), true);
  });
  draw(); drawn.push(draw);
  return el("div", {}, canvas, line);
}
function legend(low, even, high) {
  const ramp = el("canvas", { "aria-hidden": "true" });
  const draw = () => { ramp.width = 120; ramp.height = 1; ramp.style.height = "10px"; ramp.style.width = "120px"; const context = ramp.getContext("2d");
    for (let i = 0; i < 120; i++) { context.fillStyle = `rgb(${colour(i / 59.5 - 1)})`; context.fillRect(i, 0, 1, 1); } };
  draw(); drawn.push(draw);
  return el("div", { class: "controls note" }, low, ramp, `${high} (middle: ${even})`);
}

/* Routing traces. */
function traces() {
  const all = D.traces.map((trace) => ({ ...trace, counts: unpack(trace.counts), over: unpack(trace.over), ids: unpack(trace.ids), weights: trace.weights && unpack(trace.weights) }));
  all.forEach((trace) => { trace.E = trace.counts.shape[1]; trace.L = trace.layers.length;
    trace.share = (layer, expert) => { const all = trace.layers[layer], total = trace.tokens * trace.top_k - all.dropped;
      return expert >= all.experts ? NaN : total ? trace.counts[layer * trace.E + expert] * all.experts / total : 0; }; });
  const first = all[0], differ = all.length === 2 && first.L === all[1].L && first.E === all[1].E;
  document.getElementById("subtitle").textContent = all.map((trace) => `${trace.name}: ${trace.L} layers, ${number.format(trace.tokens)} tokens, top ${trace.top_k} of ${Math.max(...trace.experts)} experts`).join(" · ");
  let shown = 0, layer = 0, expert = null;
  const now = () => all[shown === 2 ? 0 : shown];
  const level = (share) => (Number.isNaN(share) ? NaN : share <= 0 ? -1 : Math.log2(share) / 2);
  const body = el("div");
  const choose = el("div", { class: "controls", role: "group", "aria-label": "Trace" });
  if (all.length === 2) {
    [...all.map((trace) => trace.name), ...(differ ? ["difference"] : [])].forEach((name, i) => choose.append(
      el("button", { type: "button", "aria-pressed": String(i === 0), onclick: (event) => { shown = i;
        choose.querySelectorAll("button").forEach((one) => one.setAttribute("aria-pressed", String(one === event.currentTarget))); fill(); } }, name)));
    if (D.change === null) choose.append(el("span", { class: "note" }, "The traces have other tokens, layers or experts: tokens are not compared."));
  }
  main.append(choose, body);
  const place = (node) => { const old = body.querySelector("#layer"); if (old) old.replaceWith(node); else body.append(node); };

  function fill() {
    drawn.length = 0;
    const trace = now(), stats = trace.layers, mean = (f) => stats.reduce((sum, one) => sum + f(one), 0) / stats.length;
    const worst = stats.reduce((a, b, i) => (b.imbalance > stats[a].imbalance ? i : a), 0), dropped = stats.reduce((sum, one) => sum + one.dropped, 0);
    const unused = stats.reduce((sum, one) => sum + one.unused.length, 0);
    layer = Math.min(layer, trace.L - 1);
    const overview = el("section", {}, el("h2", {}, shown === 2 ? `Load of ${all[1].name} over ${all[0].name}` : "Load of every expert"), el("p", { class: "note" }, "A row is a layer, the first at the top; a column is an expert."),
      heat({ rows: trace.L, columns: trace.E, height: Math.max(6, Math.min(22, Math.round(420 / trace.L))), label: "Layers by experts",
        value: (row, column) => (shown === 2 ? level(all[1].share(row, column) / (all[0].share(row, column) || NaN)) : level(trace.share(row, column))),
        text: (row, column) => (shown === 2 ? `layer ${row}, expert ${column}: ${fixed(all[0].share(row, column))} and ${fixed(all[1].share(row, column))} times the mean`
          : `layer ${row}, expert ${column}: ${number.format(trace.counts[row * trace.E + column])} slots, ${fixed(trace.share(row, column))} times the mean`),
        pick: (row, column) => { layer = row; expert = column; one(); }, chosen: () => [layer, expert || 0] }),
      shown === 2 ? legend("a quarter", "equal", "four times") : legend("unused or a quarter", "the mean", "four times"),
      el("div", { class: "controls" }, el("label", {}, "layer ", el("input", { type: "number", min: 0, max: trace.L - 1, value: layer, id: "pick-layer", onchange: (event) => { layer = clamp(event.target.value, trace.L); one(); } })),
        el("label", {}, "expert ", el("input", { type: "number", min: 0, max: trace.E - 1, id: "pick-expert", onchange: (event) => { expert = event.target.value === "" ? null : clamp(event.target.value, trace.E); one(); } }))));
    const changed = D.change && D.change.layers;
    const rows = stats.map((stat, i) => ({ ...stat, i }));
    body.replaceChildren(
      el("div", { class: "tiles" }, tile("entropy of the load", fixed(mean((stat) => stat.entropy), 3), "1 is even, mean of layers"),
        tile("busiest over mean", fixed(stats[worst].imbalance), `layer ${worst}, the worst`), tile("unused experts", number.format(unused), `of ${number.format(stats.reduce((sum, stat) => sum + stat.experts, 0))}`),
        tile("slots without expert", number.format(dropped), percent(dropped / Math.max(1, trace.tokens * trace.top_k * trace.L))),
        D.change ? tile("tokens with other experts", percent(D.change.changed / Math.max(1, trace.tokens)), "in at least one layer") : null),
      overview, el("section", { id: "layer" }),
      el("section", {}, el("h2", {}, "Layers"), table([["layer", (row) => row.i, { num: true }], ["entropy", (row) => fixed(row.entropy, 3), { num: true, key: (row) => row.entropy }],
        ["busiest over mean", (row) => fixed(row.imbalance), { num: true, key: (row) => row.imbalance }], ["hottest experts", (row) => row.hottest.map(([id, count]) => `${id} (${short.format(count)})`).join(", ")],
        ["unused", (row) => row.unused.length, { num: true }], ["slots without expert", (row) => number.format(row.dropped), { num: true, key: (row) => row.dropped }],
        ...(changed ? [["tokens with other experts", (row) => percent(changed[row.i]), { num: true, key: (row) => changed[row.i] }]] : [])], rows, "Layers")),
      trace.placements.length ? placements(trace) : "");
    one();
  }
  const clamp = (text, size) => Math.max(0, Math.min(size - 1, Number.parseInt(text, 10) || 0));

  function one() {
    const trace = now(), stat = trace.layers[layer], E = stat.experts, load = Array.from({ length: E }, (_, id) => [id, trace.share(layer, id)]);
    if (expert !== null && expert >= E) expert = null;
    body.querySelector("#pick-layer").value = layer; body.querySelector("#pick-expert").value = expert === null ? "" : expert;
    const sorted = load.slice().sort((a, b) => b[1] - a[1]), most = Math.max(...sorted.map((pair) => pair[1]), 1);
    const bars = svg("svg", { viewBox: `0 0 ${Math.max(E * 4, 60)} 100`, preserveAspectRatio: "none", width: "100%", height: "110", role: "img", "aria-label": `Load of layer ${layer}, sorted` });
    const step = Math.max(E * 4, 60) / E;
    sorted.forEach(([id, share], i) => { const bar = svg("rect", { x: i * step, y: 100 - 96 * share / most, width: Math.max(0.5, step * 0.85), height: 96 * share / most, fill: id === expert ? "rgb(var(--hot))" : "var(--mark)" });
      bar.addEventListener("pointermove", (event) => showTip(event, `expert ${id}: ${fixed(share)} times the mean`)); bar.addEventListener("pointerleave", () => { tip.hidden = true; });
      bar.addEventListener("click", () => { expert = id; one(); }); bars.append(bar); });
    bars.append(svg("line", { x1: 0, x2: Math.max(E * 4, 60), y1: 100 - 96 / most, y2: 100 - 96 / most, stroke: "var(--soft)", "stroke-dasharray": "4 3", "vector-effect": "non-scaling-stroke" }));
    const B = trace.bins, steps = heat({ rows: B, columns: trace.E, height: Math.max(3, Math.round(150 / B)), label: `Load of layer ${layer} over the tokens`,
      value: (row, column) => { const size = trace.edges[row + 1] - trace.edges[row]; return column >= E ? NaN : level(size ? trace.over[(layer * B + row) * trace.E + column] * E / (size * trace.top_k) : 1); },
      text: (row, column) => `tokens ${number.format(trace.edges[row])} to ${number.format(trace.edges[row + 1] - 1)}, expert ${column}: ${number.format(trace.over[(layer * B + row) * trace.E + column])} slots` });
    const pairs = trace.pairs[layer].filter(([a, b]) => expert === null || a === expert || b === expert);
    place(el("section", { id: "layer" }, el("h2", {}, `Layer ${layer}${expert === null ? "" : `, expert ${expert}`}`),
      el("div", { class: "pair" }, el("div", {}, el("h3", {}, "Experts by load (the dashed line is the mean)"), bars, el("h3", {}, "Load over the tokens, first at the top"), steps),
        el("div", {}, el("h3", {}, "Experts that go together"), pairs.length ? table([["experts", ([a, b]) => `${a}, ${b}`], ["tokens with both", ([, , count]) => number.format(count), { num: true, key: (pair) => pair[2] }],
          ["over chance", ([, , , lift]) => fixed(lift), { num: true, key: (pair) => pair[3] }]], pairs, "Pairs of experts") : el("p", { class: "note" }, "None among this layer's 24 strongest pairs."))),
      el("h3", {}, `Tokens (the first ${number.format(trace.shown)} of ${number.format(trace.tokens)})`), tokens(trace)));
  }

  function tokens(trace) {
    const K = trace.top_k, other = all[1 - shown], compared = D.change && shown < 2 && other ? Math.min(trace.shown, other.shown) : 0;
    const set = (of, token) => Array.from(of.ids.subarray((layer * of.shown + token) * K, (layer * of.shown + token + 1) * K)).filter((id) => id >= 0);
    const differs = (token) => token < compared && set(trace, token).some((id) => !set(other, token).includes(id));
    let page = 0, onlyExpert = expert !== null, onlyChanged = false, words = "";
    const list = el("div"), size = 20;
    function fill() {
      const found = [];
      for (let token = 0; token < trace.shown; token++) if ((!onlyExpert || set(trace, token).includes(expert)) && (!onlyChanged || differs(token)) && (!words || trace.text[token].includes(words))) found.push(token);
      page = Math.max(0, Math.min(page, Math.ceil(found.length / size) - 1));
      const cell = (token) => Array.from({ length: K }, (_, k) => (layer * trace.shown + token) * K + k).filter((i) => trace.ids[i] >= 0).map((i) => el("span", { class: `chip${trace.ids[i] === expert ? " on" : ""}` },
        `${trace.ids[i]}${trace.weights ? ` · ${fixed(trace.weights[i] * trace.largest[layer] / 255)}` : ""}`));
      list.replaceChildren(table([["token", (token) => token, { num: true }], ...(trace.text ? [["text", (token) => JSON.stringify(trace.text[token]).slice(1, -1)]] : []), [trace.weights ? "experts · weights" : "experts", cell, { wrap: true, key: (token) => set(trace, token)[0] }],
        ...(compared ? [["other trace", (token) => (token < compared && differs(token) ? el("span", { class: "warn" }, set(other, token).join(", ")) : "the same"), { key: (token) => differs(token) }]] : [])],
        found.slice(page * size, page * size + size), "Tokens"), el("div", { class: "controls" },
        el("button", { type: "button", onclick: () => { page--; fill(); } }, "previous"), el("button", { type: "button", onclick: () => { page++; fill(); } }, "next"),
        el("span", { class: "note" }, `${number.format(found.length)} tokens, page ${page + 1} of ${Math.max(1, Math.ceil(found.length / size))}`)));
    }
    fill();
    return el("div", {}, el("div", { class: "controls" }, expert === null ? null : el("label", {}, el("input", { type: "checkbox", checked: onlyExpert, onchange: (event) => { onlyExpert = event.target.checked; page = 0; fill(); } }), ` with expert ${expert}`),
      compared ? el("label", {}, el("input", { type: "checkbox", onchange: (event) => { onlyChanged = event.target.checked; page = 0; fill(); } }), " with other experts in the other trace") : null,
      trace.text ? el("label", {}, "text ", el("input", { type: "search", oninput: (event) => { words = event.target.value; page = 0; fill(); } })) : null), list);
  }

  function placements(trace) {
    const priced = trace.placements[0].us !== undefined;
    return el("section", {}, el("h2", {}, "On several GPUs"), el("p", { class: "note" }, priced ? "Predicted, not measured: mode all_to_all in bf16, each GPU with as many tokens as the trace, mean of the layers."
      : "Give --sizes d_model,d_ff for bytes and predicted times."), table([["GPUs", (row) => row.ranks, { num: true }], ["experts", (row) => row.kind], ["GPUs a token visits", (row) => fixed(row.visits), { num: true, key: (row) => row.visits }],
      ["busiest GPU over mean", (row) => fixed(row.imbalance), { num: true, key: (row) => row.imbalance }], ...(priced ? [["bytes sent per GPU", (row) => bytes(row.bytes), { num: true, key: (row) => row.bytes }],
      ["a layer", (row) => `${number.format(Math.round(row.us))} us`, { num: true, key: (row) => row.us }], ["of N single GPUs", (row) => percent(row.alone_us / row.us), { num: true, key: (row) => row.alone_us / row.us }]] : [])], trace.placements, "Placements"));
  }
  fill();
}

/* Reports of moe-parity. */
function reports() {
  const cases = new Map();
  D.reports.forEach(({ name, report }) => report.cases.forEach((one) => {
    const key = `${one.case} ${one.dtype} ${JSON.stringify(one.sizes)}`, held = cases.get(key) || { ...one, engines: [], bitwise: [] };
    held.agrees = held.agrees && one.agrees;
    held.engines.push(...one.engines.map((engine) => ({ ...engine, title: D.reports.length > 1 ? `${engine.engine} (${name})` : engine.engine })));
    held.bitwise.push(...one.bitwise); cases.set(key, held);
  }));
  const list = [...cases.values()], failed = list.filter((one) => !one.agrees);
  document.getElementById("subtitle").textContent = D.reports.map(({ name, report }) => `${name}: ${report.conclusion}`).join(" · ");
  const versions = D.reports[0].report.versions;
  main.append(el("div", { class: "tiles" }, tile("cases", list.length), tile("agree", list.length - failed.length), tile("differ or untested", failed.length),
    tile("router flips", list.reduce((sum, one) => sum + one.engines.reduce((all, engine) => all + engine.flips.length, 0), 0), "tokens with other experts")),
    el("p", { class: "note" }, Object.entries(versions).filter(([, version]) => version).map(([name, version]) => `${name} ${version}`).join(", ")));
  let only = failed.length > 0 && list.length > failed.length, words = "";
  const box = el("div");
  const fill = () => box.replaceChildren(...list.filter((one) => (!only || !one.agrees) && `${one.case} ${one.dtype}`.includes(words)).map(show));
  main.append(el("div", { class: "controls" }, el("label", {}, el("input", { type: "checkbox", id: "only", checked: only, onchange: (event) => { only = event.target.checked; fill(); } }), " only what does not agree"),
    el("label", {}, "case ", el("input", { type: "search", id: "words", oninput: (event) => { words = event.target.value; fill(); } }))), box);
  const kind = (verdict) => (verdict.startsWith("differ") || verdict === "missing" ? "bad" : verdict === "not tested" ? "warn" : "good");
  function bar(row) {
    const shares = [row.relative_error !== null && row.relative_tolerance ? row.relative_error / row.relative_tolerance : 0, row.worst && row.worst.tolerance ? row.worst.error / row.worst.tolerance : 0].map(Number).filter((one) => one >= 0);
    const share = Math.max(0, ...shares);
    if (row.relative_error === null) return row.note || "";
    return el("span", {}, el("span", { class: "track" }, el("span", { class: `bar${share > 1 ? " over" : ""}`, style: `width:${Math.min(100, 100 * share)}%` })), ` ${share >= 10 ? number.format(Math.round(share)) : fixed(share)} of the limit`);
  }
  function show(one) {
    const stages = [...new Set(one.engines.flatMap((engine) => engine.stages.map((row) => row.stage)))];
    const of = (engine, stage) => engine.stages.find((row) => row.stage === stage);
    const columns = [["stage", (stage) => stage], ...one.engines.filter((engine) => !engine.skipped).flatMap((engine) => [
      [engine.title, (stage) => { const row = of(engine, stage); return row ? el("span", { class: kind(row.verdict) }, row.verdict) : ""; }, { key: (stage) => (of(engine, stage) || {}).verdict || "" }],
      ["error over limit", (stage) => { const row = of(engine, stage); return row ? bar(row) : ""; }],
      ["worst element", (stage) => { const row = of(engine, stage), worst = row && row.worst; return worst && worst.index ? `[${worst.index}]: ${Number(worst.reference).toPrecision(6)}, got ${Number(worst.candidate).toPrecision(6)}` : ""; }]])];
    const parts = one.engines.map((engine) => engine.first_divergent_stage).filter(Boolean);
    const command = `moe-parity --case ${one.case} --dtype ${one.dtype} --engines ${["reference", ...new Set(one.engines.map((engine) => engine.engine))].join(",")} --verbose`;
    const flips = one.engines.flatMap((engine) => engine.flips.map((flip) => ({ ...flip, engine: engine.title })));
    return el("details", { class: "case", open: !one.agrees }, el("summary", {}, el("b", {}, one.case), ` ${one.dtype} `, el("span", { class: "note" }, Object.entries(one.sizes).map(([name, size]) => `${name} ${size}`).join(", ")), " ",
      one.engines.map((engine) => el("span", { class: `chip ${kind(engine.verdict)}` }, `${engine.title}: ${engine.verdict}`)),
      one.bitwise.map((row) => el("span", { class: `chip ${row.equal === false ? "bad" : ""}` }, `${row.engines.join(" and ")}: ${row.equal === null ? "bits not compared" : row.equal ? "equal bits" : "other bits"}`))),
      el("p", {}, one.description), one.engines.filter((engine) => engine.skipped).map((engine) => el("p", { class: "note" }, `${engine.title} was skipped: ${engine.skipped}`)),
      parts.length ? el("p", { class: "bad" }, `The first stage that parts: ${[...new Set(parts)].join(", ")}`) : null,
      table(columns, stages, `Stages of ${one.case}`, (stage) => (parts.includes(stage) ? "first" : null)),
      flips.length ? [el("h3", {}, "Tokens with other experts"), table([["engine", (flip) => flip.engine], ["token", (flip) => flip.token, { num: true }], ["reference", (flip) => String(flip.reference)], ["candidate", (flip) => String(flip.candidate)],
        ["kind", (flip) => flip.kind], ["margin", (flip) => String(flip.margin)], ["allowed", (flip) => String(flip.allowed)], ["verdict", (flip) => flip.verdict]], flips, "Router flips")] : null,
      el("h3", {}, "Repeat it"), el("code", {}, one.repeat || command));
  }
  fill();
}

/* Plans. */
function plans() {
  document.getElementById("subtitle").textContent = D.groups.map((group) => `${group.name}: ${group.plans.map((plan) => plan.name).join(", ")}`).join(" · ");
  const signature = (step) => `${step.kernel} ${step.grid} ${step.tile}`;
  const seen = D.groups.map((group) => new Set(group.plans.flatMap((plan) => plan.steps.map(signature))));
  const columns = D.groups.map((group, i) => el("div", {}, D.groups.length > 1 ? el("h2", {}, group.name) : null, group.plans.map((plan) => show(plan, D.groups.length > 1 ? seen[1 - i] : null))));
  main.append(el("div", { class: D.groups.length > 1 ? "pair" : "" }, columns));
  function show(plan, others) {
    const sum = (name) => plan.steps.reduce((all, step) => all + (step[name] || 0), 0), measured = plan.steps.some((step) => step.measured_us !== null);
    /* A time line: each launch begins where the one ahead ends. */
    const bars = (value, kind) => { const total = plan.steps.reduce((all, step) => all + (value(step) || 0), 0) || 1; let start = 0;
      return plan.steps.map((step) => { const left = start; start += value(step) || 0;
        return el("span", { class: "track" }, el("span", { class: `bar${kind}`, style: `margin-left:${100 * left / total}%;width:${Math.max(0.5, 100 * (value(step) || 0) / total)}%` })); }); };
    const bounds = bars((step) => (plan.speeds ? step.bound_us : step.bytes), ""), times = measured ? bars((step) => step.measured_us, " measured") : [];
    const line = (row) => el("span", {}, bounds[row.i], measured ? [el("br"), times[row.i]] : null);
    const rows = plan.steps.map((step, i) => ({ ...step, i }));
    return el("section", {}, el("h2", {}, `${plan.name} on ${plan.target}`), el("div", { class: "tiles" }, tile("launches", plan.steps.length), tile("bytes", bytes(sum("bytes"))), tile("operations", flops(sum("flops"))), tile("scratch", bytes(plan.scratch_bytes)),
      plan.speeds ? tile("bound", `${fixed(sum("bound_us"), 0)} us`, `at ${plan.speeds.memory / 1000} TB/s and ${plan.speeds.tflops} TFLOP/s`) : null, measured ? tile("measured", `${fixed(sum("measured_us"), 0)} us`) : null),
      table([["#", (row) => row.i, { num: true }], ["kernel", (row) => el("span", { title: Object.entries(row.constants || {}).map(([name, value]) => `${name}=${value}`).join(", ") }, row.kernel.replace(/^.*:/, ""), el("br"), el("span", { class: "note" }, row.kernel.replace(/:.*$/, "")),
          row.why.length ? el("details", { class: "note" }, el("summary", {}, "why"), el("ul", {}, row.why.map((text) => el("li", {}, text)))) : null), { wrap: true, key: (row) => row.kernel }],
        [plan.speeds ? (measured ? "time line: bound, measured" : "time line of the bounds") : "bytes", line, { key: (row) => row.i }],
        ...(plan.speeds ? [["bound us", (row) => fixed(row.bound_us, 1), { num: true, key: (row) => row.bound_us }], ["by", (row) => row.bound]] : []), ...(measured ? [["measured us", (row) => fixed(row.measured_us, 1), { num: true, key: (row) => row.measured_us || 0 }]] : []),
        ["bytes", (row) => bytes(row.bytes), { num: true, key: (row) => row.bytes }], ["operations", (row) => (row.flops ? flops(row.flops) : ""), { num: true, key: (row) => row.flops }], ["grid", (row) => row.grid], ["tile", (row) => row.tile]], rows, `Launches of ${plan.name}`, (row) => (others && !others.has(signature(row)) ? "first" : null)),
      others ? el("p", { class: "note" }, "Marked launches have no equal in the other file.") : null, memory(plan),
      el("details", {}, el("summary", {}, "Order of every sum, and other decisions"), el("ul", {}, [...plan.summation, ...plan.notes].map((text) => el("li", {}, text)))),
      el("details", {}, el("summary", {}, `${plan.buffers.length} buffers`), table([["buffer", (buffer) => buffer.name], ["kind", (buffer) => buffer.kind], ["array", (buffer) => buffer.spec], ["bytes", (buffer) => bytes(buffer.bytes), { num: true, key: (buffer) => buffer.bytes }],
        ["memory", (buffer) => (buffer.home === null ? "its own" : buffer.home || "arena")], ["launches", (buffer) => (buffer.first === null ? "" : `${buffer.first} to ${buffer.last}`)]], plan.buffers, `Buffers of ${plan.name}`)));
  }
  function memory(plan) {
    const held = plan.buffers.filter((buffer) => buffer.home === "" && buffer.first !== null && buffer.bytes), top = plan.scratch_bytes;
    if (!held.length || !top) return null;
    const W = 900, H = 180, step = W / plan.steps.length, picture = svg("svg", { viewBox: `0 0 ${W} ${H + 16}`, width: "100%", role: "img", "aria-label": `Scratch memory of ${plan.name} by launch` });
    held.forEach((buffer) => { const y = H - H * (buffer.offset + buffer.bytes) / top, height = Math.max(1, H * buffer.bytes / top), x = buffer.first * step, width = (buffer.last - buffer.first + 1) * step - 2;
      const box = svg("rect", { x, y, width, height, rx: 2, fill: "var(--mark)", "fill-opacity": 0.55, stroke: "var(--card)" });
      box.addEventListener("pointermove", (event) => showTip(event, `${buffer.name}: ${bytes(buffer.bytes)}, launches ${buffer.first} to ${buffer.last}`)); box.addEventListener("pointerleave", () => { tip.hidden = true; });
      picture.append(box); if (height > 13 && width > 60) picture.append(svg("text", { x: x + 4, y: y + 12 }, `${buffer.name} ${bytes(buffer.bytes)}`)); });
    plan.steps.forEach((one, i) => picture.append(svg("text", { x: i * step + 2, y: H + 12 }, i)));
    return el("div", {}, el("h3", {}, `Scratch memory, ${bytes(top)}: buffers by the launches that use them`), picture);
  }
}

function theme(name) { root.dataset.theme = name; drawn.forEach((draw) => draw()); }
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
document.getElementById("theme").addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));
({ trace: traces, report: reports, plans })[D.kind]();
main.setAttribute("aria-busy", "false");
