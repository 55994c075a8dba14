/* The planner's form, pictures and tables. The setting lives in the address, so that it can be shared. */
"use strict";

(() => {
  const root = document.getElementById("diloco-planner");
  if (!root) return;
  const data = JSON.parse(document.getElementById("diloco-planner-data").textContent);

  /* name, label, choices or [step, smallest], value at the start */
  const FIELDS = [
    ["model", "Model", Object.keys(data.models), "qwen3-8b"],
    ["hardware", "Hardware", Object.keys(data.hardware), "tpu-v5p"],
    ["chips_per_island", "Chips of an island", [1, 1], 64],
    ["sequence_length", "Sequence length, tokens", [1, 1], 2048],
    ["sequences_per_island", "Sequences of an inner step of an island", [1, 1], 512],
    ["model_flops_utilization", "Share of the peak FLOP/s without waiting", [0.01, 0.01], 0.4],
    ["num_islands", "Islands M", [1, 1], 2],
    ["sync_period", "Sync period H, inner steps", [1, 1], 37],
    ["num_fragments", "Fragments P", [1, 1], 37],
    ["overlap_steps", "Overlap V, inner steps", [1, 0], 1],
    ["fragment_pattern", "Fragment pattern", data.patterns, "strided"],
    ["wire_format", "Wire format", data.wires, "float32"],
    ["gbit_per_second", "Link of an island, Gbit/s, one way (empty: its hosts' egress)", ["any", 0], "5"],
    ["latency_ms", "Latency of that link, ms", ["any", 0], 0],
  ];

  const el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
    node.append(...children);
    return node;
  };
  const svg = (tag, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const number = (x, digits = 4) =>
    x === Infinity ? "no link is enough" : Number(x.toPrecision(digits)).toLocaleString("en");
  const gbit = (x) => (x === Infinity ? "no link is enough" : `${number(x)} Gbit/s`);
  const percent = (x) => `${(100 * x).toFixed(2)} %`;

  /* ---- form ---- */
  const inputs = {};
  const form = el("form", { class: "planner-form", "aria-label": "Planner settings" });
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const [name, label, kind, start] of FIELDS) {
    const id = `planner-${name}`;
    const isChoice = typeof kind[0] === "string" && kind[0] !== "any";
    const input = isChoice
      ? el("select", { id }, ...kind.map((v) => el("option", { value: v }, v)))
      : el("input", { id, type: "number", inputmode: "decimal", step: kind[0], min: kind[1] });
    input.value = start;
    input.addEventListener("input", () => update(true));
    inputs[name] = input;
    form.append(el("div", {}, el("label", { for: id }, label), input));
  }

  const message = el("p", { class: "planner-verdict", role: "status", "aria-live": "polite" });
  const link = el("a", { class: "planner-link" }, "Link to this setting");
  const figures = el("table", { class: "planner-figures" });
  const windows = el("table", { class: "planner-windows" });
  const timeline = el("figure", { class: "planner-timeline" });
  const curve = el("figure", { class: "planner-curve" });
  const results = el("div", { class: "planner-results" }, timeline, curve, figures, windows);
  root.append(form, message, el("p", {}, link), results);

  /* ---- setting in the address ---- */
  const fromAddress = new URLSearchParams(location.search);
  const unknown = {}; // a choice that the form does not have: it is refused by name, not dropped
  for (const [name, input] of Object.entries(inputs)) {
    if (!fromAddress.has(name)) continue;
    input.value = fromAddress.get(name);
    if (input.tagName === "SELECT" && input.value !== fromAddress.get(name))
      unknown[name] = fromAddress.get(name);
    input.addEventListener("input", () => delete unknown[name], { once: true });
  }

  function settings() {
    const s = {};
    for (const [name, , kind] of FIELDS) {
      const text = unknown[name] ?? inputs[name].value;
      const isNumber = inputs[name].tagName === "INPUT";
      s[name] = isNumber ? (text.trim() === "" ? NaN : Number(text)) : text;
    }
    s.latency_seconds = s.latency_ms / 1e3;
    if (inputs.gbit_per_second.value.trim() === "" && !inputs.gbit_per_second.validity.badInput)
      s.gbit_per_second = null;
    return s;
  }

  function share() {
    const query = new URLSearchParams();
    for (const [name, input] of Object.entries(inputs)) query.set(name, unknown[name] ?? input.value);
    const address = `${location.pathname}?${query}${location.hash}`;
    link.href = address;
    return address;
  }

  function update(byHand) {
    const address = share();
    if (byHand) {
      try {
        history.replaceState(null, "", address);
      } catch {
        // A page opened as a file may not change its address; the link below still has the setting.
      }
    }
    try {
      const s = settings();
      const found = DilocoPlanner.plan(data, s);
      message.textContent = `${found.sentence} Utilization ${percent(found.utilization)}.`;
      message.dataset.state = found.verdict;
      results.hidden = false;
      drawFigures(s, found);
      drawWindows(found);
      drawTimeline(found);
      drawCurve(found);
    } catch (error) {
      if (!(error instanceof DilocoPlanner.Refused)) throw error;
      message.textContent = error.message;
      message.dataset.state = "refused";
      results.hidden = true;
    }
  }

  /* ---- tables ---- */
  function drawFigures(s, f) {
    const gib = 2 ** 30;
    const rows = [
      ["parameters", "Parameters", f.parameters, number],
      ["active_parameters", "Parameters that a token meets", f.active_parameters, number],
      ["hosts_per_island", "Hosts of an island", f.hosts_per_island, number],
      ["flops_per_island_step", "FLOPs of an inner step of an island", f.flops_per_island_step, (x) => x.toExponential(3)],
      ["step_seconds", "Inner step without waiting, s", f.step_seconds, number],
      ["hbm_bytes", `State of a chip, GiB of ${number(f.hbm_limit_bytes / gib, 3)}, activations not counted`, f.hbm_bytes, (x) => number(x / gib, 3)],
      ["largest_fragment_bytes", "Largest fragment on the wire, MB", f.largest_fragment_bytes, (x) => number(x / 1e6)],
      ["mean_fragment_bytes", "Mean fragment on the wire, MB", f.mean_fragment_bytes, (x) => number(x / 1e6)],
      ["sent_bytes_per_period", "Sent by an island in H steps, GB", f.sent_bytes_per_period, (x) => number(x / 1e9)],
      ["average_gbit_per_second", "Average of an island", f.average_gbit_per_second, gbit],
      ["peak_gbit_per_second", `Largest fragment in ${Math.max(s.overlap_steps, 1)} step(s)`, f.peak_gbit_per_second, gbit],
      ["peak_gbit_per_second_per_host", "The same, of a host", f.peak_gbit_per_second_per_host, gbit],
      ["zero_stall_gbit_per_second", "Link needed so that no island waits", f.zero_stall_gbit_per_second, gbit],
      ...data.targets.map((u, i) => [`needed_${u}`, `Link needed for a utilization of ${Math.round(100 * u)} %`, f.needed_gbit_per_second[i], gbit]),
      ["gbit_per_second", "Planned link", f.gbit_per_second, gbit],
      ["utilization", "Utilization", f.utilization, percent],
      ["data_parallel_utilization", "Utilization of data parallel, nothing hidden", f.data_parallel_utilization, percent],
      ["stall_seconds_per_step", "Mean wait of an inner step, s", f.stall_seconds_per_step, number],
      ["late_fragments", "Fragments late", f.late_fragments, number],
    ];
    figures.replaceChildren(
      el("caption", {}, "What it costs (simulated)"),
      el("tbody", {}, ...rows.map(([key, what, value, text]) =>
        el("tr", {}, el("th", { scope: "row" }, what), el("td", { "data-key": key, "data-value": value }, text(value))))),
    );
  }

  function drawWindows(f) {
    const runs = [];
    f.sent.forEach((bytes, p) => {
      const last = runs.at(-1);
      const same = last && last.bytes === bytes && (last.slack === f.slack[p] || Math.abs(last.slack - f.slack[p]) < 1e-9);
      if (same) last.to = p;
      else runs.push({ from: p, to: p, bytes, slack: f.slack[p] });
    });
    const heads = ["Fragments", "MB sent", "Window, s", "Slack, s", "Hidden"];
    windows.replaceChildren(
      el("caption", {}, "Each fragment against its own window"),
      el("thead", {}, el("tr", {}, ...heads.map((h) => el("th", { scope: "col" }, h)))),
      el("tbody", {}, ...runs.map((r) => el("tr", {},
        el("th", { scope: "row" }, r.from === r.to ? `${r.from}` : `${r.from} to ${r.to}`),
        el("td", {}, number(r.bytes / 1e6)),
        el("td", {}, number(f.when.V * f.step_seconds)),
        el("td", {}, r.slack === -Infinity ? "the link cannot keep up" : number(r.slack, 3)),
        el("td", {}, r.slack >= 0 ? "yes" : "no")))),
    );
  }

  /* ---- pictures: one unit is one pixel, so that letters keep their size on a phone ---- */
  const pictureWidth = () => Math.max(280, Math.min(720, root.clientWidth));

  function drawTimeline(f) {
    const { H, V, offsets } = f.when;
    const periods = 8;
    const rate = (f.gbit_per_second * 1e9) / 8;
    const run = DilocoPlanner.simulate(f.when, f.sent, f.step_seconds, rate, f.latency, periods);
    // From one step before the largest fragment's last send that a whole period follows.
    const largest = f.sent.indexOf(Math.max(...f.sent));
    const sentAt = (periods - 2) * H + offsets[largest];
    const first = Math.max(0, sentAt - 1);
    const last = Math.min(periods * H, first + Math.max(8, Math.min(H, 30), V + 2));
    const [from, to] = [run.clock[first], run.clock[last]];
    const [width, left, right] = [pictureWidth(), 66, 8];
    const x = (t) => left + ((Math.min(Math.max(t, from), to) - from) / (to - from)) * (width - left - right);
    const picture = svg("svg", { viewBox: `0 0 ${width} 132`, role: "img", "aria-labelledby": "planner-timeline-title" });
    const shown = run.transfers.filter((t) => t.end > from && t.start < to);
    const waited = run.stalls.slice(first, last).reduce((a, b) => a + b, 0);
    picture.append(svg("title", { id: "planner-timeline-title" },
      `Inner steps ${first + 1} to ${last}, ${number(to - from, 3)} s: ${shown.length} exchanges on the link, ${number(waited, 3)} s of waiting.`));
    const rows = [["compute", 20], ["link", 62]];
    for (const [name, y] of rows) picture.append(svg("text", { x: 0, y: y + 17, class: "planner-text" }, name));
    for (let t = first + 1; t <= last; t++) {
      const end = run.clock[t] - run.stalls[t - 1];
      picture.append(svg("rect", { x: x(run.clock[t - 1]), y: 20, width: Math.max(0.2, x(end) - x(run.clock[t - 1]) - 0.6), height: 26, class: "planner-compute" }));
      if (run.stalls[t - 1] > 0)
        picture.append(svg("rect", { x: x(end), y: 20, width: Math.max(0.4, x(run.clock[t]) - x(end)), height: 26, class: "planner-stall" }));
    }
    for (const t of shown) {
      picture.append(svg("rect", { x: x(t.start), y: 62, width: Math.max(0.6, x(t.end) - x(t.start)), height: 26, class: t.fragment === largest ? "planner-largest" : "planner-transfer" }));
      if (x(t.end) - x(t.start) > 18)
        picture.append(svg("text", { x: (x(t.start) + x(t.end)) / 2, y: 80, class: "planner-label" }, t.fragment));
    }
    picture.append(svg("text", { x: left, y: 110, class: "planner-text" }, `step ${first + 1}`));
    picture.append(svg("text", { x: width - right, y: 110, class: "planner-text planner-end" }, `step ${last}`));
    timeline.replaceChildren(picture, el("figcaption", {},
      "Blue: inner steps. Hatched: islands wait. Lower row: fragments on the link, the largest in orange, where they are wide enough with their number."));
    picture.prepend(stripes());
  }

  function stripes() {
    const pattern = svg("pattern", { id: "planner-stripes", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    pattern.append(svg("rect", { width: 3, height: 6, class: "planner-stripe" }));
    const defs = svg("defs", {});
    defs.append(pattern);
    return defs;
  }

  function drawCurve(f) {
    const marks = [f.average_gbit_per_second, f.gbit_per_second, f.zero_stall_gbit_per_second].filter((v) => v > 0 && v < Infinity);
    const [low, high] = [Math.log10(Math.min(...marks)) - 1, Math.log10(Math.max(...marks)) + 1];
    const [width, height, left, bottom] = [pictureWidth(), 240, 54, 40];
    const x = (v) => left + ((Math.log10(v) - low) / (high - low)) * (width - left - 12);
    const y = (u) => 10 + (1 - u) * (height - bottom - 10);
    const points = [];
    for (let i = 0; i <= 60; i++) {
      const v = 10 ** (low + ((high - low) * i) / 60);
      const u = DilocoPlanner.utilization(f.when, f.sent, f.step_seconds, (v * 1e9) / 8, f.latency);
      points.push(`${x(v).toFixed(1)},${y(u).toFixed(1)}`);
    }
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": "planner-curve-title" });
    picture.append(svg("title", { id: "planner-curve-title" },
      `Utilization against the link's Gbit/s: ${percent(f.utilization)} at the planned ${gbit(f.gbit_per_second)}; no island waits from ${gbit(f.zero_stall_gbit_per_second)} on.`));
    for (const u of [0, 0.25, 0.5, 0.75, 1]) {
      picture.append(svg("line", { x1: left, x2: width - 12, y1: y(u), y2: y(u), class: "planner-grid" }));
      picture.append(svg("text", { x: left - 6, y: y(u) + 4, class: "planner-text planner-end" }, `${100 * u} %`));
    }
    const stride = Math.ceil((high - low) / (width / 120)); // of the labelled powers of ten
    for (let e = Math.ceil(low); e <= high; e += stride)
      picture.append(svg("text", { x: x(10 ** e), y: height - bottom + 18, class: "planner-text planner-middle" }, number(10 ** e)));
    picture.append(svg("text", { x: (left + width) / 2, y: height - 4, class: "planner-text planner-middle" }, "Gbit/s of an island's link"));
    picture.append(svg("polyline", { points: points.join(" "), class: "planner-line" }));
    if (f.zero_stall_gbit_per_second > 0 && f.zero_stall_gbit_per_second < Infinity) {
      const at = x(f.zero_stall_gbit_per_second);
      picture.append(svg("line", { x1: at, x2: at, y1: y(1), y2: y(0), class: "planner-zero" }));
    }
    picture.append(svg("circle", { cx: x(f.gbit_per_second), cy: y(f.utilization), r: 6, class: "planner-point" }));
    curve.replaceChildren(picture, el("figcaption", {},
      "Utilization in the long run. Point: the planned link. Dashed: the slowest link with which no island waits."));
  }

  update(false);
  let drawnAt = root.clientWidth;
  addEventListener("resize", () => {
    if (root.clientWidth !== drawnAt) update(false);
    drawnAt = root.clientWidth;
  });
})();
