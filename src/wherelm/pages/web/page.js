"use strict";
// Draws the pictures whose numbers stand in the page's data. Nothing is computed here but colours
// and places: every number comes from the project's own code.

const PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#4d4d4d"];
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes, children, space) {
  const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  for (const child of [].concat(children === undefined ? [] : children)) node.append(child);
  return node;
}
const el = (tag, attributes, children) => make(tag, attributes, children);
const svg = (tag, attributes, children) => make(tag, attributes, children, SVG);
const text = (x, y, content, attributes) =>
  svg("text", Object.assign({ x, y, "font-size": 11, fill: "#1d2330" }, attributes), content);

function canvas(host, width, height, attributes) {
  const size = { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" };
  const root = svg("svg", Object.assign(size, attributes));
  host.append(root);
  return root;
}

function readout(host, hint) {
  const line = el("output", { class: "readout" }, hint || "");
  host.append(line);
  return line;
}

function mix(low, high, share) {
  return `rgb(${low.map((v, i) => Math.round(v + (high[i] - v) * share)).join(",")})`;
}
const WHITE = [255, 255, 255], BLUE = [8, 64, 129], RED = [178, 60, 10];
// The square root keeps small weights visible.
const blues = (share) => mix(WHITE, BLUE, Math.sqrt(Math.max(0, Math.min(1, share))));
const signed = (share) => mix(WHITE, share < 0 ? RED : BLUE, Math.min(1, Math.abs(share)));

// An exact zero stands out from a rounded one.
function brief(value, digits) {
  return value === null ? "−∞" : value === 0 ? "0" : value.toFixed(digits).replace("-", "−");
}
function shown(value, digits) {
  const tiny = value && Math.abs(value) < 0.5 * 10 ** -digits;
  return tiny ? value.toExponential(1).replaceAll("-", "−") : brief(value, digits);
}

function matrix(host, spec) {
  const cell = spec.cell || 30, digits = spec.digits === undefined ? 2 : spec.digits;
  const longest = (labels) => Math.max(0, ...labels.map((label) => label.length));
  const left = 12 + 6.6 * longest(spec.rows), slanted = longest(spec.columns) * 6.6 > cell - 2;
  const top = slanted ? 12 + 4.9 * longest(spec.columns) : 20;
  const tail = slanted ? 4.6 * longest(spec.columns) : 2;
  const width = left + cell * spec.columns.length + tail, height = top + cell * spec.rows.length + 3;
  const root = canvas(host, width, height, { "aria-label": spec.name || "matrix" });
  const known = spec.values.flat().filter((v) => v !== null);
  const most = spec.most || Math.max(1e-12, ...known.map(Math.abs));
  const colour = (v) => v === null ? "#eceff4" : spec.signed ? signed(v / most) : blues(v / most);
  spec.columns.forEach((label, c) => {
    const x = left + cell * (c + 0.5), y = top - 6;
    const turn = slanted ? { transform: `rotate(-45 ${x} ${y})` } : { "text-anchor": "middle" };
    root.append(text(x, y, label, turn));
  });
  const line = readout(host, spec.hint);
  const frame = svg("rect", { fill: "none", stroke: "#d55e00", "stroke-width": 2, width: cell, height: cell, visibility: "hidden" });
  spec.rows.forEach((label, r) => {
    root.append(text(left - 6, top + cell * (r + 0.5) + 4, label, { "text-anchor": "end" }));
    spec.columns.forEach((name, c) => {
      const value = spec.values[r][c], x = left + cell * c, y = top + cell * r;
      const box = svg("rect", { x, y, width: cell, height: cell, fill: colour(value), stroke: "#d9dee7", "data-cell": `${r},${c}` });
      const tell = () => {
        for (const [key, at] of [["x", x], ["y", y], ["visibility", "visible"]]) frame.setAttribute(key, at);
        const between = spec.between || " → ";
        line.textContent = spec.details ? spec.details[r][c] : `${label}${between}${name}: ${shown(value, digits + 2)}`;
      };
      box.addEventListener("pointerenter", tell);
      box.addEventListener("pointerdown", tell);
      root.append(box);
      if (!spec.bare) {
        const dark = value !== null && Math.abs(value) / most > (spec.signed ? 0.6 : 0.35);
        const style = { "text-anchor": "middle", "font-size": Math.min(10, cell / 3), fill: dark ? "#fff" : "#39414f", "pointer-events": "none" };
        root.append(text(x + cell / 2, y + cell / 2 + 3.5, brief(value, digits), style));
      }
    });
  });
  root.append(frame);
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const result = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) result.push(+t.toPrecision(12));
  return result;
}

function lines(host, spec) {
  const width = spec.width || 350, height = spec.height || 210, left = 46, right = 8, top = 8, bottom = 36;
  const values = spec.series.flatMap((s) => s.y).filter((v) => v !== null);
  const x = spec.x, low = spec.low === undefined ? Math.min(0, ...values) : spec.low;
  const high = Math.max(low + 1e-9, ...values), span = x[x.length - 1] - x[0] || 1;
  const px = (v) => left + (v - x[0]) / span * (width - left - right);
  const py = (v) => height - bottom - (v - low) / (high - low) * (height - top - bottom);
  const root = canvas(host, width, height, { "aria-label": spec.name || "curves" });
  for (const t of ticks(low, high, 4)) {
    root.append(svg("line", { x1: left, x2: width - right, y1: py(t), y2: py(t), stroke: "#e6e9ef" }));
    root.append(text(left - 5, py(t) + 4, String(t).replace("-", "−"), { "text-anchor": "end", "font-size": 10 }));
  }
  for (const t of ticks(x[0], x[x.length - 1], 6)) {
    root.append(text(px(t), height - bottom + 14, String(t), { "text-anchor": "middle", "font-size": 10 }));
  }
  root.append(text((left + width) / 2, height - 4, spec.across || "", { "text-anchor": "middle", fill: "#5b6475" }));
  host.style.maxWidth = `min(100%, ${width}px)`;
  const colour = (s, n) => s.dashed ? "#1d2330" : PALETTE[n % PALETTE.length];
  spec.series.forEach((s, n) => {
    const points = s.y.map((v, i) => v === null ? "" : `${px(x[i]).toFixed(1)},${py(v).toFixed(1)}`).join(" ");
    const dash = s.dashed ? { "stroke-dasharray": "5 4" } : {};
    root.append(svg("polyline", Object.assign({ points, fill: "none", stroke: colour(s, n), "stroke-width": 1.8 }, dash)));
    for (const at of spec.marks || []) {
      root.append(svg("circle", { cx: px(x[at]), cy: py(s.y[at]), r: 3.5, fill: colour(s, n) }));
    }
  });
  const guide = svg("line", { y1: top, y2: height - bottom, stroke: "#d55e00", visibility: "hidden" });
  root.append(guide);
  const legend = el("div", { class: "legend" }, spec.series.map((s, n) => {
    const swatch = el("i", { style: `border-top-color:${colour(s, n)}`, class: s.dashed ? "dashed" : "" });
    return el("span", {}, [swatch, s.name]);
  }));
  host.append(legend);
  const line = readout(host, spec.hint);
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    const near = x.reduce((best, v, i) => Math.abs(px(v) - at) < Math.abs(px(x[best]) - at) ? i : best, 0);
    for (const [key, v] of [["x1", px(x[near])], ["x2", px(x[near])], ["visibility", "visible"]]) guide.setAttribute(key, v);
    const parts = spec.series.map((s) => s.y[near] === null ? "" : `${s.name} ${shown(s.y[near], 3)}`);
    line.textContent = `${spec.across || "x"} ${x[near]}: ${parts.filter(Boolean).join(", ")}`;
  });
}

function bars(host, spec) {
  const width = spec.width || 320, row = 24, left = 14 + 6.8 * Math.max(...spec.labels.map((l) => l.length));
  const root = canvas(host, width, row * spec.labels.length + 4, { "aria-label": spec.name || "bars" });
  const most = spec.most || Math.max(1e-12, ...spec.values.map(Math.abs)), digits = spec.digits === undefined ? 3 : spec.digits;
  spec.labels.forEach((label, n) => {
    const y = row * n + 3, length = Math.max(1, Math.abs(spec.values[n]) / most * (width - left - 66));
    root.append(text(left - 6, y + 14, label, { "text-anchor": "end" }));
    root.append(svg("rect", { x: left, y, width: length, height: row - 7, rx: 2, fill: PALETTE[(spec.colours || [])[n] || 0] }));
    root.append(text(left + length + 5, y + 14, spec.shown ? spec.shown[n] : shown(spec.values[n], digits)));
  });
}

function plane(host, spec) {
  const size = spec.size || 210, pad = 14, [low, high] = spec.range;
  const px = (v) => pad + (v - low) / (high - low) * (size - 2 * pad), py = (v) => size - px(v);
  const root = canvas(host, size, size, { "aria-label": spec.name || "plane" });
  const axis = { stroke: "#c6ccd8" };
  root.append(svg("line", Object.assign({ x1: px(low), x2: px(high), y1: py(0), y2: py(0) }, axis)));
  root.append(svg("line", Object.assign({ x1: px(0), x2: px(0), y1: py(low), y2: py(high) }, axis)));
  if (spec.circle) root.append(svg("circle", { cx: px(0), cy: py(0), r: px(1) - px(0), fill: "none", stroke: "#c6ccd8" }));
  for (const [n, p] of (spec.points || []).entries()) {
    const colour = p.main ? "#d55e00" : PALETTE[0];
    root.append(svg("circle", { cx: px(p.x), cy: py(p.y), r: p.main ? 6 : 3 + 10 * (p.weight || 0), fill: colour, "fill-opacity": p.main ? 1 : 0.55, class: "point" }));
    const flip = px(p.x) > size * 0.6;
    root.append(text(px(p.x) + (flip ? -10 : 10), py(p.y) + (p.main ? 16 : -6), p.name, { fill: colour, "text-anchor": flip ? "end" : "start" }));
  }
  for (const [n, a] of (spec.arrows || []).entries()) {
    const colour = PALETTE[n % PALETTE.length], x = px(a.x), y = py(a.y), angle = Math.atan2(y - py(0), x - px(0));
    const wing = (turn) => `${x - 11 * Math.cos(angle + turn)},${y - 11 * Math.sin(angle + turn)}`;
    root.append(svg("line", { x1: px(0), y1: py(0), x2: x, y2: y, stroke: colour, "stroke-width": 3, class: "arrow" }));
    root.append(svg("polygon", { points: `${x},${y} ${wing(0.4)} ${wing(-0.4)}`, fill: colour }));
    if (a.name) root.append(text(px(a.x * 0.6) + 6, py(a.y * 0.6) - 4, a.name, { fill: colour, "font-weight": 600, "font-size": 13 }));
  }
}

function frames(host, spec) {
  const input = el("input", { type: "range", min: 0, max: spec.frames.length - 1, value: spec.start || 0, step: 1, "aria-label": spec.label });
  const named = el("output"), stage = el("div", { class: "pictures" });
  host.append(el("label", { class: "slider" }, [spec.label, input, named]));
  const line = el("p", { class: "note result" });
  host.append(stage, line);
  const show = () => {
    const frame = spec.frames[+input.value];
    named.textContent = frame.name;
    line.textContent = frame.text || "";
    stage.replaceChildren();
    frame.pictures.forEach((picture) => draw(stage, picture));
  };
  input.addEventListener("input", show);
  show();
}

function tokens(host, spec) {
  const key = ["token", "position", "segment", "key mask", "loss mask", "target"];
  const chips = el("div", { class: "chips" });
  chips.append(el("span", { class: "chip key" }, [key[0], ...key.slice(1).map((k) => el("small", {}, k))]));
  const line = el("output", { class: "readout" }, "Point at a token.");
  spec.slots.forEach((slot, n) => {
    const mark = (on, kind) => el("small", { class: on ? kind : "" }, on ? "■" : "·");
    const chip = el("button", { type: "button", class: `chip${slot.real ? "" : " empty"}` }, [
      slot.token, el("small", {}, slot.real ? String(slot.position) : "–"), el("small", {}, String(slot.segment)),
      mark(slot.real, "on"), mark(slot.learned, "learn"), el("small", {}, slot.learned ? slot.target : ""),
    ]);
    const tell = () => {
      chips.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
      chip.classList.add("chosen");
      line.textContent = slot.real
        ? `slot ${n}: “${slot.token}” at position ${slot.position} of segment ${slot.segment}; may be read; its target “${slot.target}” ${slot.learned ? "is learned" : "is only read"}`
        : `slot ${n}: empty; nobody reads it and nothing is learned from it`;
    };
    chip.addEventListener("pointerenter", tell);
    chip.addEventListener("focus", tell);
    chips.append(chip);
  });
  host.append(chips, line);
}

function decoded(base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  return new Uint16Array(bytes.buffer);
}

function attention(host, spec) {
  const weights = decoded(spec.weights), { layers, heads, tokens: names } = spec, slots = names.length;
  const weight = (row, query, key) => weights[(row * slots + query) * slots + key] / 65535;
  const rows = [...Array(layers * heads).keys()];
  const title = (row) => `layer ${Math.floor(row / heads) + 1} head ${row % heads + 1}`;
  const chips = names.map((name) => el("button", { type: "button", class: "chip" }, name));
  const line = el("output", { class: "readout" }), grid = el("div"), maps = el("div", { class: "heads" });
  maps.style.gridTemplateColumns = `repeat(${Math.min(heads, 8)}, minmax(0, 132px))`;
  host.append(el("div", { class: "chips" }, chips), line, grid, el("div", { class: "name" }, "A of every head (layer.head): a row for each query, a column for each key"), maps);
  let cells = [], chosen = -1;

  const choose = (query) => {
    if (query === chosen || query < 0 || query >= slots) return;
    chosen = query;
    cells.forEach((line, row) => line.forEach((box, key) => box.setAttribute("fill", key > query ? "#eceff4" : blues(weight(row, query, key)))));
    chips.forEach((chip, key) => {
      const mean = rows.reduce((sum, row) => sum + weight(row, query, key), 0) / rows.length;
      chip.classList.toggle("chosen", key === query);
      chip.style.background = key > query ? "#fff" : blues(mean * 0.6);
      chip.style.color = mean * 0.6 > 0.3 ? "#fff" : "";
    });
    maps.querySelectorAll(".row").forEach((mark) => { mark.style.top = `${100 * query / slots}%`; });
    line.textContent = `“${names[query]}” (slot ${query}): tokens are shaded by the mean over all heads.`;
  };

  const redraw = () => {
    const room = host.clientWidth || 480, left = 92;
    const cell = Math.max(4, Math.min(24, (room - left - 4) / slots)), tall = 15;
    const top = cell >= 9 ? 16 + 5.6 * Math.max(...names.map((n) => n.length)) : 6;
    grid.replaceChildren();
    const root = canvas(grid, left + cell * slots + 4, top + tall * rows.length + 2, { "aria-label": "The chosen token's row of A in each head" });
    if (cell >= 9) names.forEach((name, key) => {
      const x = left + cell * (key + 0.5) + 3, y = top - 4;
      root.append(text(x, y, name, { transform: `rotate(-60 ${x} ${y})`, "font-size": Math.min(10.5, cell) }));
    });
    cells = rows.map((row) => {
      const y = top + tall * row, first = row % heads === 0;
      root.append(text(left - 5, y + 11, title(row), { "text-anchor": "end", "font-size": 10, "font-weight": first ? 600 : 400 }));
      return names.map((name, key) => {
        const box = svg("rect", { x: left + cell * key, y, width: cell, height: tall - (row % heads === heads - 1 ? 2 : 0.5), stroke: "#e3e7ee", "stroke-width": 0.5 });
        const tell = () => { line.textContent = `${title(row)}: “${names[chosen]}” reads “${name}” (slot ${key}) with weight ${weight(row, chosen, key).toFixed(3)}`; };
        box.addEventListener("pointerenter", tell);
        box.addEventListener("pointerdown", tell);
        root.append(box);
        return box;
      });
    });
    const query = chosen;
    chosen = -1;
    choose(query);
  };

  chips.forEach((chip, query) => {
    for (const kind of ["pointerenter", "focus", "click"]) chip.addEventListener(kind, () => choose(query));
  });
  rows.forEach((row) => {
    const picture = el("canvas", { width: slots, height: slots }), context = picture.getContext("2d");
    for (let query = 0; query < slots; query++) for (let key = 0; key < slots; key++) {
      context.fillStyle = key > query ? "#eceff4" : blues(weight(row, query, key));
      context.fillRect(key, query, 1, 1);
    }
    const mark = el("div", { class: "row", style: `height:${100 / slots}%` });
    const map = el("div", { class: "map" }, [picture, mark]);
    const point = (event) => {
      const box = map.getBoundingClientRect();
      choose(Math.floor((event.clientY - box.top) / box.height * slots));
    };
    map.addEventListener("pointermove", point);
    map.addEventListener("pointerdown", point);
    maps.append(el("div", { class: "head" }, [`${Math.floor(row / heads) + 1}.${row % heads + 1}`, map]));
  });
  chosen = spec.start;
  redraw();
  let width = host.clientWidth;
  new ResizeObserver(() => {
    if (host.clientWidth === width) return;
    width = host.clientWidth;
    redraw();
  }).observe(host);
}

const KINDS = { matrix, lines, bars, plane, frames, tokens, attention };

function draw(stage, spec) {
  const host = el("div", { class: `picture ${spec.kind}${spec.wide ? " wide" : ""}` });
  if (spec.name) host.append(el("div", { class: "name" }, spec.name));
  stage.append(host);
  KINDS[spec.kind](host, spec);
}

const DATA = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll("[data-figure]").forEach((stage) => {
  DATA[+stage.dataset.figure].forEach((spec) => draw(stage, spec));
});
document.body.dataset.drawn = String(DATA.length);
