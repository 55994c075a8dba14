/* The planner's formulas, as in diloco.windows, diloco.steady, diloco.events and diloco.planner.
   No state, no page: planner-page.js draws what these return. */
"use strict";

const DilocoPlanner = (() => {
  const sum = (xs) => xs.reduce((a, b) => a + b, 0);

  class Refused extends Error {}

  function refuse(template, values) {
    throw new Refused(template.replace(/\{(\w+)\}/g, (_, name) => values[name]));
  }

  /* Python's format(x, "g"). */
  function g(x) {
    if (Number.isNaN(x)) return "nan";
    if (!Number.isFinite(x)) return x < 0 ? "-inf" : "inf";
    if (x === 0) return Object.is(x, -0) ? "-0" : "0";
    const [digits, exponent] = x.toExponential(5).split("e");
    const e = Number(exponent);
    if (e >= -4 && e < 6) return String(Number(x.toPrecision(6)));
    const two = String(Math.abs(e)).padStart(2, "0");
    return `${Number(digits)}e${e < 0 ? "-" : "+"}${two}`;
  }

  /* difflib.SequenceMatcher(None, a, b).ratio(): twice the characters in matching blocks. */
  function ratio(a, b) {
    const matches = (aFrom, aTo, bFrom, bTo) => {
      let [bestA, bestB, size] = [aFrom, bFrom, 0];
      for (let i = aFrom; i < aTo; i++)
        for (let j = bFrom; j < bTo; j++) {
          let k = 0;
          while (i + k < aTo && j + k < bTo && a[i + k] === b[j + k]) k++;
          if (k > size) [bestA, bestB, size] = [i, j, k];
        }
      if (!size) return 0;
      return size + matches(aFrom, bestA, bFrom, bestB)
        + matches(bestA + size, aTo, bestB + size, bTo);
    };
    return (2 * matches(0, a.length, 0, b.length)) / (a.length + b.length || 1);
  }

  /* diloco.conf.load: the entry, or the sentence with the nearest name or all of them. */
  function entry(data, kind, name) {
    const table = data[kind];
    if (Object.hasOwn(table, name)) return table[name];
    const close = Object.keys(table)
      .map((known) => [ratio(known, name), known])
      .filter(([r]) => r >= 0.6)
      .sort((x, y) => y[0] - x[0] || (y[1] > x[1] ? 1 : -1));
    if (close.length) refuse(data.sentences[`near_${kind}`], { name, near: close[0][1] });
    const known = Object.keys(table).sort().join(", ");
    return refuse(data.sentences[`unknown_${kind}`], { name, known });
  }

  function checkConfig(data, s) {
    const [M, H, P, V] = [s.num_islands, s.sync_period, s.num_fragments, s.overlap_steps];
    const said = data.sentences;
    for (const name of ["num_islands", "sync_period", "num_fragments", "overlap_steps"])
      checkWhole(said, name, s[name]);
    if (M < 1) refuse(said.islands, { M });
    if (H < 1) refuse(said.period, { H });
    if (P < 1) refuse(said.fragments, { P });
    if (P > H) refuse(said.too_many_fragments, { P, H });
    if (V < 0) refuse(said.negative_overlap, { V });
    if (V >= H) refuse(said.long_overlap, { V, H, longest: H - 1 });
    if (!data.patterns.includes(s.fragment_pattern)) refuse(said.pattern, { value: s.fragment_pattern });
    if (!data.wires.includes(s.wire_format)) refuse(said.wire, { value: s.wire_format });
  }

  function checkWhole(said, name, value) {
    if (!Number.isInteger(value))
      refuse(said.whole, { name, value: Number.isNaN(value) ? "nan" : String(value) });
  }

  function checkCount(said, name, value) {
    checkWhole(said, name, value);
    if (value < 1) refuse(said.count, { name, value });
  }

  /* diloco.planner.fragment_payloads, from the layouts that Python made. */
  function payloads(data, model, s) {
    const [P, L, pattern] = [s.num_fragments, model.num_layers, s.fragment_pattern];
    const layouts = model.layouts[pattern];
    if (P > layouts.length) {
      if (pattern === "balanced")
        refuse(data.sentences.beyond_page, { P, pattern, num_layers: L, most: layouts.length });
      // The first fragment that no layer goes to.
      const number = pattern === "strided" ? L + 1 : 1 + Math.ceil(L / (P - 1 - L));
      refuse(data.sentences.empty, { number, P, num_layers: L, pattern });
    }
    const column = 1 + data.wires.indexOf(s.wire_format);
    return layouts[P - 1].flatMap((run) => Array(run[0]).fill(run[column]));
  }

  const exchangeFactor = (M, wire) => (wire === "float32" ? (2 * (M - 1)) / M : M - 1);

  const offsets = (H, P) => Array.from({ length: P }, (_, p) => Math.floor((p * H) / P));

  /* diloco.windows.windows: slack of each fragment, seconds. */
  function slacks(when, sent, T, rate, latency) {
    const period = when.H * T;
    const slack = sent.map(() => -Infinity);
    if (sum(sent) > rate * period) return slack;
    let finish = 0;
    for (let k = 0; k < 2 * sent.length; k++) {
      const p = k % sent.length;
      const at = Math.floor(k / sent.length) * period + when.offsets[p] * T;
      finish = Math.max(finish, at) + sent[p] / rate;
      slack[p] = at + when.V * T - latency - finish;
    }
    return slack;
  }

  /* diloco.windows.zero_stall_bytes_per_second. */
  function zeroStall(when, sent, T, latency) {
    if (!sent.some((b) => b)) return 0;
    const own = when.V * T - latency;
    if (own <= 0) return Infinity;
    const P = sent.length;
    let worst = sum(sent) / (when.H * T);
    for (let first = 0; first < P; first++) {
      let total = 0;
      for (let j = first; j < first + P; j++) {
        const [cycle, p] = [Math.floor(j / P), j % P];
        total += sent[p];
        const span = (cycle * when.H + when.offsets[p] - when.offsets[first]) * T;
        worst = Math.max(worst, total / (span + own));
      }
    }
    return worst;
  }

  /* diloco.steady: [source, seconds, bytes, periods] of what each event waits for. */
  function edges(when, sent, T, latency) {
    const { H, V } = when;
    const marks = when.offsets.map((t, p) => [t, 0, p]);
    when.offsets.forEach((t, p) => marks.push([(t + V) % H, 1, p]));
    marks.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
    const [clock, link, into] = [[], [], []];
    let size = 0;
    for (const [, isApply, p] of marks) {
      clock.push(size);
      if (!isApply) link[p] = size + 1;
      size += isApply ? 1 : 2;
    }
    marks.forEach(([t, isApply, p], k) => {
      const wrap = k === 0 ? 1 : 0;
      const before = (k || marks.length) - 1;
      const own = [[clock[before], (t - marks[before][0] + wrap * H) * T, 0, wrap]];
      if (isApply) own.push([link[p], latency, 0, when.offsets[p] + V >= H ? 1 : 0]);
      into.push(own);
      if (!isApply) {
        const earlier = link[(p || link.length) - 1];
        into.push([[clock[k], 0, sent[p], 0], [earlier, 0, sent[p], p === 0 ? 1 : 0]]);
      }
    });
    return into;
  }

  function findCycle(chosen) {
    const color = new Array(chosen.length).fill(0);
    for (let root = 0; root < chosen.length; root++) {
      let node = root;
      while (color[node] === 0 && chosen[node]) {
        color[node] = root + 1;
        node = chosen[node][0];
      }
      if (color[node] !== root + 1 || !chosen[node]) continue;
      const cycle = [0, 0, 0];
      let at = node;
      do {
        for (let i = 0; i < 3; i++) cycle[i] += chosen[at][i + 1];
        at = chosen[at][0];
      } while (at !== node);
      return cycle;
    }
    return null;
  }

  const pace = ([seconds, bytes, periods], rate) => (seconds + bytes / rate) / periods;

  /* diloco.steady.critical_cycle: [seconds, bytes, periods]. */
  function criticalCycle(when, sent, T, rate, latency) {
    const into = edges(when, sent, T, latency);
    let best = [when.H * T, 0, 1];
    for (;;) {
      const now = pace(best, rate);
      const reach = new Array(into.length).fill(0);
      const chosen = new Array(into.length).fill(null);
      let better = null;
      for (let changed = true; changed && !better;) {
        changed = false;
        into.forEach((list, node) => {
          for (const edge of list) {
            const value = reach[edge[0]] + edge[1] + edge[2] / rate - edge[3] * now;
            if (value > reach[node] + 1e-12 * now) {
              reach[node] = value;
              chosen[node] = edge;
              changed = true;
            }
          }
        });
        if (changed) better = findCycle(chosen);
      }
      if (!better) return best;
      best = better;
    }
  }

  const utilization = (when, sent, T, rate, latency) =>
    (when.H * T) / pace(criticalCycle(when, sent, T, rate, latency), rate);

  /* diloco.steady.bytes_per_second_for. */
  function rateFor(when, sent, T, latency, target) {
    if (!sent.some((b) => b)) return 0;
    const period = (when.H * T) / target;
    let rate = sum(sent) / period / 2;
    for (;;) {
      const cycle = criticalCycle(when, sent, T, rate, latency);
      if (pace(cycle, rate) <= period * (1 + 1e-9)) return rate;
      const room = cycle[2] * period - cycle[0];
      if (room <= 1e-12 * period) return Infinity;
      rate = cycle[1] / room;
    }
  }

  /* diloco.events.simulate for equal islands with own links. */
  function simulate(when, sent, T, rate, latency, periods = 8) {
    const steps = periods * when.H;
    const fragmentAt = new Map(when.offsets.map((t, p) => [t, p]));
    const transfers = new Map();
    const stalls = [];
    const clock = [0];
    let link = 0;
    for (let t = 1; t <= steps; t++) {
      const now = clock[t - 1] + T;
      const p = fragmentAt.get(t % when.H);
      if (p !== undefined) {
        const start = Math.max(link, now);
        link = start + sent[p] / rate;
        transfers.set(t, { fragment: p, step: t, sent: now, start, end: link, arrival: link + latency });
      }
      const due = transfers.get(t - when.V);
      stalls.push(due ? Math.max(0, due.arrival - now) : 0);
      clock.push(now + stalls[t - 1]);
    }
    return { clock, stalls, transfers: [...transfers.values()] };
  }

  function verdict(s, late, sent, room) {
    if (s.num_islands === 1) return "alone";
    if (sent > room) return "overloaded";
    if (s.overlap_steps === 0) return "waits";
    return late ? "late" : "hidden";
  }

  /* diloco.planner.plan. `s.gbit_per_second` null takes the hosts' egress. */
  function plan(data, s) {
    const said = data.sentences;
    const model = entry(data, "models", s.model);
    const hardware = entry(data, "hardware", s.hardware);
    checkConfig(data, s);
    for (const name of ["chips_per_island", "sequence_length", "sequences_per_island"])
      checkCount(said, name, s[name]);
    const share = s.model_flops_utilization;
    if (!(share > 0 && share <= 1)) refuse(said.flops, { value: g(share) });
    const hosts = Math.ceil(s.chips_per_island / hardware.chips_per_host);
    const gbit = s.gbit_per_second === null
      ? (hosts * hardware.dcn_bytes_per_second * 8) / 1e9
      : s.gbit_per_second;
    if (!(gbit > 0 && gbit < Infinity)) refuse(said.bandwidth, { value: g(gbit) });
    const latency = s.latency_seconds;
    if (!(latency >= 0 && latency < Infinity)) refuse(said.latency, { value: g(latency) });

    const tokens = s.sequence_length * s.sequences_per_island;
    const flops = tokens
      * (model.flops_per_token + model.flops_per_token_per_position * s.sequence_length);
    const T = flops / (s.chips_per_island * hardware.flops_per_second * share);
    const payload = payloads(data, model, s);
    const factor = exchangeFactor(s.num_islands, s.wire_format);
    const sent = payload.map((b) => factor * b);
    const when = { H: s.sync_period, V: s.overlap_steps, offsets: offsets(s.sync_period, s.num_fragments) };
    const rate = (gbit * 1e9) / 8;
    const slack = slacks(when, sent, T, rate, latency);
    const late = slack.filter((x) => x < 0).length;
    const used = utilization(when, sent, T, rate, latency);
    const allReduce = model.parameters * 4 * exchangeFactor(s.num_islands, "float32");
    const toGbit = 8 / 1e9;
    const largest = Math.max(...payload);
    const peak = ((factor * largest) / (Math.max(s.overlap_steps, 1) * T)) * toGbit;
    const one = model.parameters / s.chips_per_island;
    const key = verdict(s, late, sum(sent), rate * when.H * T);
    return {
      when,
      sent,
      slack,
      latency,
      hosts_per_island: hosts,
      parameters: model.parameters,
      active_parameters: model.active_parameters,
      flops_per_island_step: flops,
      step_seconds: T,
      hbm_bytes: (3 * model.parameter_bytes + 8) * one,
      hbm_limit_bytes: hardware.hbm_bytes,
      largest_fragment_bytes: largest,
      mean_fragment_bytes: sum(payload) / payload.length,
      sent_bytes_per_period: sum(sent),
      average_gbit_per_second: (sum(sent) / (when.H * T)) * toGbit,
      peak_gbit_per_second: peak,
      peak_gbit_per_second_per_host: peak / hosts,
      zero_stall_gbit_per_second: zeroStall(when, sent, T, latency) * toGbit,
      needed_gbit_per_second: data.targets.map((u) => rateFor(when, sent, T, latency, u) * toGbit),
      gbit_per_second: gbit,
      utilization: used,
      stall_seconds_per_step: T * (1 / used - 1),
      data_parallel_utilization: T / (T + allReduce / rate + (allReduce ? latency : 0)),
      late_fragments: late,
      verdict: key,
      sentence: data.verdicts[key]
        .replace("{late}", late)
        .replace("{num_fragments}", s.num_fragments),
    };
  }

  return { plan, simulate, utilization, Refused, ratio, g };
})();
