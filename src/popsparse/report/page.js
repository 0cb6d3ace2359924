"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const format = (v) => (Number.isInteger(v) ? v : +v.toPrecision(5)).toLocaleString("en-US");

// Where the pointer is in a drawing's own units.
function inside(svg, event) {
  const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  return [((event.clientX - box.left) / box.width) * view.width,
          ((event.clientY - box.top) / box.height) * view.height];
}

(() => {
  const style = getComputedStyle(document.documentElement);
  const PARTS = ["compute", "exchange", "sync", "host"];
  const colour = (name) => style.getPropertyValue("--" + name).trim();
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function show(event, text) {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.min(event.clientX + 14, innerWidth - box.width - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - box.height - 8) + "px";
  }

  for (const [id, series] of Object.entries(data.tiles || {})) {
    const svg = document.getElementById(id);
    const names = Object.keys(series), count = series[names[0]].length;
    svg.addEventListener("pointermove", (event) => {
      const [x] = inside(svg, event), left = +svg.dataset.left, right = +svg.dataset.right;
      const tile = Math.floor(((x - left) / (right - left)) * count);
      if (tile < 0 || tile >= count) return show(event, "");
      const lines = names.map((name) => name + ": " + format(series[name][tile]));
      show(event, ["tile " + format(tile), ...lines].join("\n"));
    });
    svg.addEventListener("pointerleave", (event) => show(event, ""));
  }

  for (const [id, values] of Object.entries(data.maps || {})) {
    const svg = document.getElementById(id), at = svg.dataset;
    svg.addEventListener("pointermove", (event) => {
      const [x, y] = inside(svg, event);
      const column = Math.floor((x - at.left) / at.width), row = Math.floor((y - at.top) / at.height);
      if (column < 0 || row < 0 || column >= +at.columns || row >= +at.rows) return show(event, "");
      const value = values[row * at.columns + column];
      show(event, `${at.down} ${row}, ${at.right} ${column}\n${format(value)} ${at.unit}`);
    });
    svg.addEventListener("pointerleave", (event) => show(event, ""));
  }

  function timeline(frame, source) {
    const canvas = frame.querySelector("canvas"), says = frame.querySelector("output");
    const { steps, kinds, order, phases } = source, runs = order.length;
    const start = new Float64Array(runs + 1);
    for (let i = 0; i < runs; i++) {
      const kind = kinds[order[i]];
      start[i + 1] = start[i] + kind[1] + kind[2] + kind[3] + kind[4];
    }
    const total = start[runs] || 1;
    const lanes = PARTS.map((_, p) => p).filter((p) => kinds.some((kind) => kind[p + 1] > 0));
    const LEFT = 74, LANE = 34, TOP = 36;
    let from = 0, to = total, drag = null;

    // The run of a step that covers a moment.
    function find(cycle) {
      let low = 0, high = runs - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (start[middle] <= cycle) low = middle; else high = middle - 1;
      }
      return low;
    }

    function draw() {
      const width = canvas.clientWidth, height = TOP + LANE * lanes.length + 40;
      const scale = devicePixelRatio || 1;
      canvas.style.height = height + "px";
      canvas.width = width * scale;
      canvas.height = height * scale;
      const pen = canvas.getContext("2d");
      pen.scale(scale, scale);
      pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
      pen.textBaseline = "middle";
      const inner = width - LEFT - 8, per = inner / (to - from);
      const place = (cycle) => LEFT + (Math.min(Math.max(cycle, from), to) - from) * per;

      const band = (first, end, y, fill, text) => {
        const a = place(start[first]), b = place(start[end]);
        if (b <= LEFT || a >= LEFT + inner || b - a < 0.3) return;
        pen.fillStyle = fill;
        pen.fillRect(a, y, Math.max(b - a - 1, 0.5), 20);
        if (b - a > pen.measureText(text).width + 10) {
          pen.fillStyle = colour("ink");
          pen.fillText(text, a + 5, y + 10.5);
        }
      };
      phases.forEach(([first, end, name], i) => band(first, end, 4, i % 2 ? colour("other-phase") : colour("phase"), name));
      pen.fillStyle = colour("muted");
      pen.fillText("phase", 4, 14);

      const step = 1 / per, first = find(from), last = find(to - 1e-9);
      const cover = lanes.map(() => new Float64Array(Math.ceil(inner) + 1));
      for (let i = first; i <= last; i++) {
        const kind = kinds[order[i]];
        let at = start[i];
        for (const part of [2, 1, 0, 3]) {  // A step synchronises, exchanges, then computes.
          const size = kind[part + 1];
          if (!size) continue;
          const row = cover[lanes.indexOf(part)];
          const a = (Math.max(at, from) - from) * per, b = (Math.min(at + size, to) - from) * per;
          for (let x = Math.max(Math.floor(a), 0); x < b && x < row.length; x++)
            row[x] += Math.min(b, x + 1) - Math.max(a, x);
          at += size;
        }
      }
      lanes.forEach((part, lane) => {
        const base = TOP + LANE * (lane + 1) - 6;
        pen.fillStyle = colour("faint");
        pen.fillRect(LEFT, base - 26, inner, 26);
        pen.fillStyle = colour(PARTS[part]);
        cover[lane].forEach((share, x) => {
          if (share > 0.001) pen.fillRect(LEFT + x, base - 26 * Math.min(share, 1), 1, 26 * Math.min(share, 1));
        });
        pen.fillStyle = colour("muted");
        pen.fillText(PARTS[part], 4, base - 13);
      });
      const bottom = TOP + LANE * lanes.length;
      const rough = (to - from) / 8, unit = 10 ** Math.floor(Math.log10(rough));
      const tick = Math.max([1, 2, 5, 10].map((m) => m * unit).find((m) => m >= rough), 1);
      pen.textAlign = "center";
      for (let at = Math.ceil(from / tick) * tick; at <= to; at += tick) {
        const x = place(at), text = format(Math.round(at));
        pen.fillStyle = colour("frame");
        pen.fillRect(x, bottom, 1, 5);
        pen.fillStyle = colour("muted");
        const half = pen.measureText(text).width / 2;
        pen.fillText(text, Math.min(Math.max(x, LEFT + half), width - half), bottom + 14);
      }
      pen.fillText("cycles", LEFT + inner / 2, bottom + 31);
      pen.textAlign = "left";
      if (drag) {
        pen.fillStyle = "#0072b233";
        pen.fillRect(Math.min(drag[0], drag[1]), 0, Math.abs(drag[1] - drag[0]), bottom);
      }
      says.textContent = to - from < total * 0.9999
        ? `cycles ${format(Math.round(from))} to ${format(Math.round(to))} of ${format(total)}` : "";
    }

    function view(a, b) {
      const least = Math.min(20, total), size = Math.min(Math.max(b - a, least), total);
      from = Math.min(Math.max(a + (b - a - size) / 2, 0), total - size);
      to = from + size;
      draw();
    }
    const cycle = (x) => from + ((x - LEFT) / (canvas.clientWidth - LEFT - 8)) * (to - from);
    const moves = {
      in: () => view(from + (to - from) / 4, to - (to - from) / 4),
      out: () => view(from - (to - from) / 2, to + (to - from) / 2),
      left: () => view(from - (to - from) / 3, to - (to - from) / 3),
      right: () => view(from + (to - from) / 3, to + (to - from) / 3),
      all: () => view(0, total),
    };
    frame.querySelectorAll("button").forEach((button) =>
      button.addEventListener("click", () => moves[button.dataset.do]()));
    canvas.addEventListener("pointerdown", (event) => {
      drag = [event.offsetX, event.offsetX];
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        drag[1] = event.offsetX;
        draw();
      }
      const at = cycle(event.offsetX);
      if (at < from || at > to) return show(event, "");
      const i = find(at), kind = kinds[order[i]];
      const parts = PARTS.map((part, p) => (kind[p + 1] ? `${part} ${format(kind[p + 1])}` : ""));
      show(event, `${steps[kind[0]]}\n${parts.filter(Boolean).join(", ")} cycles\nfrom cycle ${format(start[i])}`);
    });
    canvas.addEventListener("pointerup", () => {
      if (!drag) return;
      const [a, b] = drag.sort((p, q) => p - q).map(cycle);
      const wide = drag[1] - drag[0] > 4;
      drag = null;
      if (wide) view(a, b); else draw();
    });
    canvas.addEventListener("pointercancel", () => { drag = null; draw(); });
    canvas.addEventListener("pointerleave", (event) => show(event, ""));
    canvas.addEventListener("dblclick", moves.all);
    addEventListener("resize", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    draw();
  }
  document.querySelectorAll(".timeline").forEach((frame) =>
    timeline(frame, data.timelines[frame.dataset.source]));
})();
