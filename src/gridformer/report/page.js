// Draws the curves and timelines of a report. Numbers and labels come from the page's own data;
// every text is set as text, never as HTML.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLORS = data.colors;
  const DASHES = ["", "7 3", "2 3", "8 3 2 3", "12 4", "1 4"];
  const state = { x: "step", smooth: 0.6, range: null, hidden: new Set() };
  const several = data.runs.length > 1;
  const redraw = [];

  function svg(name, attributes, parent, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }
  function node(name, properties, parent) {
    const made = Object.assign(document.createElement(name), properties);
    if (parent) parent.append(made);
    return made;
  }
  function swatch(color, parent) {
    node("span", { className: "swatch" }, parent).style.background = color;
  }
  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 9.9e-5)) return value.toExponential(3).replace(/\.?0+e/, "e");
    for (const [unit, n] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e4]]) {
      if (size >= n) {
        const scaled = value / (unit === "k" ? 1e3 : n);
        return `${+scaled.toPrecision(4)}${unit}`;
      }
    }
    return String(+value.toPrecision(5));
  }
  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) found.push(n * step);
    return found;
  }
  function logTicks(low, high) {
    const found = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++) {
      const inner = high / low > 1e3 ? [1] : high / low > 10 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
      for (const n of inner) {
        if (n * 10 ** p >= low * 0.999 && n * 10 ** p <= high * 1.001) found.push(n * 10 ** p);
      }
    }
    return found.length > 1 ? found : ticks(low, high, 5);
  }
  // The tokens or hours of a run at a step, by lines between those that are known.
  function place(run, step) {
    if (state.x === "step") return step;
    const at = data.runs[run].axes.step, values = data.runs[run].axes[state.x];
    let low = 0, high = at.length - 1;
    if (high < 0) return step;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (at[middle] <= step) low = middle; else high = middle;
    }
    const part = at[high] === at[low] ? 0 : (step - at[low]) / (at[high] - at[low]);
    return values[low] + Math.min(1, Math.max(0, part)) * (values[high] - values[low]);
  }
  function smoothed(values) {
    const found = [];
    let total = 0, norm = 0;
    for (const value of values) {
      total = state.smooth * total + (1 - state.smooth) * value;
      norm = state.smooth * norm + (1 - state.smooth);
      found.push(total / norm);
    }
    return found;
  }
  // Lets a drag choose a part of the horizontal axis, and a double click the whole of it again.
  function draggable(element, valueAt, mark, choose) {
    let from = null;
    element.addEventListener("pointerdown", (event) => {
      if (event.button === 0) from = event;
    });
    element.addEventListener("pointermove", (event) => {
      if (from) mark(from, event);
    });
    window.addEventListener("pointerup", (event) => {
      if (!from) return;
      const began = from;
      from = null;
      mark(null, null);
      if (Math.abs(event.clientX - began.clientX) < 6) return;
      choose([valueAt(began), valueAt(event)].sort((a, b) => a - b));
    });
    element.addEventListener("dblclick", () => choose(null));
  }

  // ------------------------------------------------------------------ curves

  function Chart(chart, parent, wide) {
    const box = node("div", { className: wide ? "chart wide" : "chart" }, parent);
    const head = node("h3", {}, box);
    const title = node("span", { textContent: chart.title + " " }, head);
    if (chart.unit) node("small", { textContent: chart.unit }, title);
    const log = node("button", { textContent: "log", title: "logarithmic axis" }, head);
    log.setAttribute("aria-pressed", "false");
    const H = wide ? 340 : 210, L = 56, R = 10, T = 8, B = 34;
    let W = wide ? 1080 : 520;  // as wide as it is shown, so that its letters are as large anywhere
    const figure = svg("svg", { role: "img" }, box);
    figure.setAttribute("aria-label", `${chart.title} over ${state.x}`);
    const tip = node("div", { className: "tip", hidden: true }, box);
    const labels = [...new Set(chart.curves.map((curve) => curve.label))];
    const legend = node("div", { className: "keys" }, box);
    let scale = null, drawn = [];

    function color(curve) {
      return COLORS[(several ? curve.run : labels.indexOf(curve.label)) % COLORS.length];
    }
    function draw() {
      W = Math.max(240, box.clientWidth || W);
      figure.setAttribute("viewBox", `0 0 ${W} ${H}`);
      figure.replaceChildren();
      const curves = chart.curves.filter((curve) => !state.hidden.has(curve.run));
      drawn = curves.map((curve) => {
        const xs = curve.x.map((step) => place(curve.run, step));
        const smooth = chart.smooth && !curve.sparse && state.smooth > 0 && curve.y.length > 2;
        return { curve, xs, raw: curve.y, ys: smooth ? smoothed(curve.y) : curve.y, smooth };
      });
      let [low, high] = state.range || [Infinity, -Infinity];
      if (!state.range) {
        for (const { xs } of drawn) {
          low = Math.min(low, xs[0]); high = Math.max(high, xs[xs.length - 1]);
        }
      }
      if (!(high > low)) { high = (low === Infinity ? 0 : low) + 1; low = high - 2; }
      const isLog = log.getAttribute("aria-pressed") === "true";
      let bottom = Infinity, top = -Infinity;
      for (const { xs, raw, ys } of drawn) {
        xs.forEach((x, i) => {
          if (x < low || x > high || (isLog && raw[i] <= 0)) return;
          bottom = Math.min(bottom, raw[i], ys[i]); top = Math.max(top, raw[i], ys[i]);
        });
      }
      if (bottom === Infinity) { bottom = isLog ? 1 : 0; top = isLog ? 10 : 1; }
      if (isLog) {
        if (top === bottom) { top *= 1.5; bottom /= 1.5; }
        const room = (top / bottom) ** 0.04;
        bottom /= room; top *= room;
      } else {
        if (chart.zero && bottom > 0) bottom = 0;
        if (top === bottom) { top += Math.abs(top) * 0.1 || 1; if (!chart.zero) bottom -= Math.abs(bottom) * 0.1 || 1; }
        const room = 0.05 * (top - bottom);
        top += room; if (!(chart.zero && bottom === 0)) bottom -= room;
      }
      const X = (x) => L + (W - L - R) * (x - low) / (high - low);
      const f = isLog ? Math.log : (y) => y;
      const Y = (y) => isLog && y <= 0 ? H * 3 : H - B - (H - T - B) * (f(y) - f(bottom)) / (f(top) - f(bottom));
      scale = { X, Y, low, high };
      for (const y of isLog ? logTicks(bottom, top) : ticks(bottom, top, wide ? 7 : 5)) {
        svg("line", { x1: L, x2: W - R, y1: Y(y), y2: Y(y), class: "grid" }, figure);
        svg("text", { x: L - 6, y: Y(y) + 4, "text-anchor": "end" }, figure, short(y));
      }
      for (const x of ticks(low, high, Math.max(2, Math.round(W / 100)))) {
        svg("text", { x: X(x), y: H - B + 15, "text-anchor": "middle" }, figure, short(x));
      }
      const unit = state.x === "hours" ? "hours of training steps" : state.x;
      svg("text", { x: W - R, y: H - 4, "text-anchor": "end" }, figure, unit);
      const id = `clip${redraw.indexOf(draw)}`;
      svg("rect", { x: L, y: T, width: W - L - R, height: H - T - B }, svg("clipPath", { id }, figure));
      const area = svg("g", { "clip-path": `url(#${id})` }, figure);
      data.runs.forEach((run, number) => {
        if (state.hidden.has(number)) return;
        for (const mark of run.marks) {
          if (mark.kind === "start" && mark.step === 0) continue;
          const x = X(place(number, mark.step)), y1 = mark.kind === "save" ? H - B - 6 : T;
          const line = svg("line", { x1: x, x2: x, y1, y2: H - B, class: mark.kind }, area);
          svg("title", {}, line, (several ? `${run.label}: ` : "") + mark.text);
        }
      });
      for (const { curve, xs, raw, ys, smooth } of drawn) {
        const path = (values) => values.map((y, i) => `${i ? "L" : "M"}${X(xs[i]).toFixed(1)},${Y(y).toFixed(1)}`).join("");
        const stroke = color(curve);
        if (smooth) svg("path", { d: path(raw), stroke, class: "curve faint" }, area);
        const dash = several ? DASHES[labels.indexOf(curve.label) % DASHES.length] : "";
        svg("path", { d: path(ys), stroke, class: "curve", "stroke-dasharray": dash }, area);
        if ((curve.sparse && raw.length < 200) || raw.length === 1) {
          raw.forEach((y, i) => svg("circle", { cx: X(xs[i]), cy: Y(y), r: 2.6, fill: stroke }, area));
        }
      }
    }
    function valueAt(event) {
      const rect = figure.getBoundingClientRect();
      const x = (event.clientX - rect.left) * W / rect.width;
      return scale.low + (Math.min(W - R, Math.max(L, x)) - L) / (W - L - R) * (scale.high - scale.low);
    }
    function hover(event) {
      figure.querySelectorAll(".cross").forEach((line) => line.remove());
      const at = valueAt(event), rows = [];
      let nearest = null;
      for (const one of drawn) {
        let best = 0;
        one.xs.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(one.xs[best] - at)) best = i; });
        if (nearest === null || Math.abs(one.xs[best] - at) < Math.abs(nearest - at)) nearest = one.xs[best];
        rows.push([one, best]);
      }
      if (nearest === null) return;
      const x = scale.X(nearest);
      svg("line", { x1: x, x2: x, y1: T, y2: H - B, class: "cross" }, figure);
      tip.replaceChildren(node("div", { textContent: `${state.x} ${short(nearest)}` }));
      for (const [{ curve, xs, raw, ys, smooth }, i] of rows) {
        const row = node("div", {}, tip);
        swatch(color(curve), row);
        const name = [several ? data.runs[curve.run].label : "", labels.length > 1 || !several ? curve.label : ""];
        const where = curve.x[i] && Math.abs(xs[i] - nearest) > 1e-9 * Math.abs(nearest) ? ` (step ${curve.x[i]})` : "";
        row.append(`${name.filter(Boolean).join(", ")}: ${short(raw[i])}` +
          (smooth ? `, smoothed ${short(ys[i])}` : "") + where);
      }
      const rect = figure.getBoundingClientRect(), left = x / W * rect.width;
      tip.hidden = false;
      tip.style.top = `${rect.top - box.getBoundingClientRect().top + 10}px`;
      tip.style.left = left > rect.width / 2 ? "" : `${left + 12}px`;
      tip.style.right = left > rect.width / 2 ? `${rect.width - left + 12}px` : "";
    }
    function select(from, to) {
      figure.querySelectorAll(".zoom").forEach((part) => part.remove());
      if (!from) return;
      const [a, b] = [scale.X(valueAt(from)), scale.X(valueAt(to))].sort((p, q) => p - q);
      svg("rect", { x: a, width: b - a, y: T, height: H - T - B, class: "zoom" }, figure);
    }
    figure.addEventListener("pointermove", hover);
    figure.addEventListener("pointerleave", () => {
      tip.hidden = true;
      figure.querySelectorAll(".cross").forEach((line) => line.remove());
    });
    draggable(figure, valueAt, select, (range) => { state.range = range; all(); });
    log.addEventListener("click", () => {
      log.setAttribute("aria-pressed", String(log.getAttribute("aria-pressed") !== "true"));
      draw();
    });
    if (labels.length > 1) {
      labels.forEach((label, i) => {
        const key = node("span", {}, legend);
        if (several) {
          const sample = svg("svg", { width: 26, height: 8 }, key);
          sample.style.cssText = "display:inline-block;width:26px;margin-right:5px";
          svg("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke: "currentColor", "stroke-width": 1.8, "stroke-dasharray": DASHES[i % DASHES.length] }, sample);
        } else swatch(COLORS[i % COLORS.length], key);
        key.append(label);
      });
    }
    redraw.push(draw);
  }
  function all() { redraw.forEach((draw) => draw()); }
  // Calls a function whenever the page has another width. Scrolling on a phone changes its height only.
  function onWidth(draw) {
    let width = window.innerWidth;
    window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; draw(); } });
  }

  function controls(bar) {
    const axis = node("label", { textContent: "over " }, bar);
    const choice = node("select", {}, axis);
    for (const [value, text] of [["step", "steps"], ["tokens", "tokens"], ["hours", "hours"]]) {
      node("option", { value, textContent: text }, choice);
    }
    choice.addEventListener("change", () => { state.x = choice.value; state.range = null; all(); });
    const smooth = node("label", { textContent: "smoothing " }, bar);
    const slider = node("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth }, smooth);
    slider.addEventListener("input", () => { state.smooth = +slider.value; all(); });
    const reset = node("button", { textContent: "whole run" }, bar);
    reset.addEventListener("click", () => { state.range = null; all(); });
    if (!several) return;
    data.runs.forEach((run, number) => {
      const label = node("label", {}, bar);
      const box = node("input", { type: "checkbox", checked: true }, label);
      swatch(COLORS[number % COLORS.length], label);
      label.append(run.label);
      box.addEventListener("change", () => {
        if (box.checked) state.hidden.delete(number); else state.hidden.add(number);
        all();
      });
    });
  }

  // ------------------------------------------------------------------ timelines

  const KINDS = data.kinds;

  function Timeline(line, parent) {
    const axes = [...new Set(line.messages.flat().map((one) => one[2]))].sort();
    const box = node("div", { className: "chart wide" }, parent);
    const canvas = node("canvas", {}, box);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `timeline of step ${line.step}`);
    const tip = node("div", { className: "tip", hidden: true }, box);
    const ROW = 30, TOP = 6, RIGHT = 24, BOTTOM = 24, H = TOP + ROW * line.names.length + BOTTOM;
    let range = [0, line.end], W = 1000, LEFT = 170;
    const kindColor = (kind) => kind.startsWith("waits") ? KINDS.waits : KINDS[kind] || KINDS.other;
    const axisColor = (axis) => data.axes[axis];
    const X = (t) => LEFT + (W - RIGHT - LEFT) * (t - range[0]) / (range[1] - range[0]);

    function draw() {
      W = Math.max(300, box.clientWidth);
      const sharp = Math.max(2, window.devicePixelRatio || 1), pen = canvas.getContext("2d");
      canvas.width = W * sharp; canvas.height = H * sharp; canvas.style.height = `${H}px`;
      pen.setTransform(sharp, 0, 0, sharp, 0, 0);
      const style = getComputedStyle(document.documentElement);
      pen.font = "12px system-ui, sans-serif";
      const names = line.names.map((name) => pen.measureText(name).width);
      LEFT = Math.min(170, 0.35 * W, 12 + Math.max(...names));
      line.names.forEach((name, row) => {
        const y = TOP + row * ROW;
        pen.fillStyle = style.getPropertyValue("--soft");
        pen.textAlign = "left";
        pen.fillText(name, 0, y + 15, LEFT - 10);
        const bar = ([start, end], color, top, height) => {
          const a = Math.max(LEFT, X(start)), b = Math.min(W - RIGHT, X(end));
          if (b < LEFT || a > W - RIGHT) return;
          pen.fillStyle = color;
          pen.fillRect(a, y + top, Math.max(0.6, b - a), height);
        };
        for (const one of line.work[row]) bar(one, kindColor(one[2]), 0, 17);
        for (const one of line.waits[row]) bar(one, kindColor(one[2]), 0, 17);
        for (const one of line.messages[row]) bar(one, axisColor(one[2]), 19, 5);
      });
      pen.fillStyle = style.getPropertyValue("--soft");
      pen.textAlign = "center";
      const count = Math.min(8, Math.max(2, Math.floor((W - LEFT - RIGHT) / 90)));
      for (const t of ticks(range[0], range[1], count)) pen.fillText(`${short(t)} ms`, X(t), H - 6);
    }
    function at(event) {
      const x = event.clientX - canvas.getBoundingClientRect().left;
      return range[0] + (Math.min(W - RIGHT, Math.max(LEFT, x)) - LEFT) / (W - RIGHT - LEFT) * (range[1] - range[0]);
    }
    canvas.addEventListener("pointermove", (event) => {
      const rect = canvas.getBoundingClientRect(), t = at(event), y = event.clientY - rect.top - TOP;
      const row = Math.floor(y / ROW);
      tip.hidden = true;
      if (row < 0 || row >= line.names.length || event.clientX - rect.left < LEFT) return;
      const near = 1.5 * (range[1] - range[0]) / (W - LEFT);
      const tracks = y % ROW > 18 ? [line.messages] : [line.waits, line.work];
      const hits = tracks.flatMap((track) => track[row].filter((one) => one[0] - near <= t && t <= one[1] + near));
      if (!hits.length) return;
      tip.replaceChildren(...hits.slice(0, 6).map((one) =>
        node("div", { textContent: `${one[3]}: ${short(one[1] - one[0])} ms from ${short(one[0])} ms` })));
      tip.hidden = false;
      const left = event.clientX - rect.left;
      tip.style.top = `${TOP + (row + 1) * ROW}px`;
      tip.style.left = left > W / 2 ? "" : `${left}px`;
      tip.style.right = left > W / 2 ? `${W - left}px` : "";
    });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    let shade = null;
    draggable(canvas, at, (from, to) => {
      if (shade) shade.remove();
      shade = null;
      if (!from) return;
      const [a, b] = [X(at(from)), X(at(to))].sort((p, q) => p - q);
      shade = node("div", {}, box);
      shade.style.cssText = `position:absolute;pointer-events:none;background:#4a90d933;top:0;height:${H}px;left:${a}px;width:${b - a}px`;
    }, (chosen) => { range = chosen || [0, line.end]; draw(); });
    const legend = node("div", { className: "keys" }, box);
    const kinds = new Set(line.work.flat().map((one) => KINDS[one[2]] ? one[2] : "other"));
    if (line.waits.some((one) => one.length)) kinds.add("waits");
    for (const kind of Object.keys(KINDS).filter((one) => kinds.has(one))) {
      const key = node("span", {}, legend);
      swatch(KINDS[kind], key);
      key.append(kind === "waits" ? "waits for messages" : kind);
    }
    for (const axis of axes) {
      const key = node("span", {}, legend);
      swatch(axisColor(axis), key);
      key.append(`messages over ${axis}`);
    }
    draw();
    onWidth(draw);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }

  const charts = document.getElementById("charts");
  if (charts && data.charts.length) {
    controls(document.getElementById("bar"));
    data.charts.forEach((chart, number) => Chart(chart, charts, number === 0));
    all();
    onWidth(all);
  }
  data.timelines.forEach((line) => Timeline(line, document.getElementById(`timeline-${line.place}`)));
})();
