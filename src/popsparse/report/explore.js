"use strict";
// Memory by variables: curves over the steps, what a step holds, what lies on a tile.
(() => {
  const KINDS = ["constant", "always live", "not always live"];
  const MOST = 25, WIDTH = 860, HEIGHT = 190, LEFT = 82, RIGHT = 12, TOP = 24, BOTTOM = 24;

  // The name of SVG's elements is an address, which has no place in a page that loads nothing.
  const SVG = (() => {
    const frame = document.createElement("div");
    frame.innerHTML = "<svg></svg>";
    return frame.firstChild.namespaceURI;
  })();

  function make(tag, text, kind) {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    return node;
  }

  function draw(tag, values, text) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(values)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  // Head: [label, class of the column]; what is beyond the first rows is counted.
  function table(head, rows) {
    const frame = make("div", undefined, "scroll"), grid = make("table");
    const top = make("tr");
    head.forEach(([label, kind]) => top.append(make("th", label, kind)));
    const body = make("tbody");
    rows.slice(0, MOST).forEach((row) => {
      const line = make("tr");
      row.forEach((value, i) => line.append(make("td", typeof value === "number" ? format(value) : value, head[i][1])));
      body.append(line);
    });
    const start = make("thead");
    start.append(top);
    grid.append(start, body);
    frame.append(grid);
    if (rows.length > MOST) frame.append(make("p", `and ${format(rows.length - MOST)} more.`));
    return frame;
  }

  const on = (flat, tile) => {
    for (let i = 0; i < flat.length; i += 3) if (flat[i] <= tile && tile < flat[i + 1]) return flat[i + 2];
    return 0;
  };
  const everywhere = (flat) => {
    let sum = 0;
    for (let i = 0; i < flat.length; i += 3) sum += (flat[i + 1] - flat[i]) * flat[i + 2];
    return sum;
  };

  // Two areas over the steps, the first the same everywhere.
  function chart(title, always, other, limit, at, choose, names) {
    const count = other.length, inner = HEIGHT - TOP - BOTTOM;
    const most = Math.max(always + Math.max(...other), 1);
    const near = limit < 1.6 * most, top = (near ? Math.max(most, limit) : most) * 1.05;
    const x = (i) => LEFT + ((WIDTH - LEFT - RIGHT) * i) / count, y = (v) => TOP + inner * (1 - v / top);
    const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "steps" });
    const rough = top / 4, unit = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((m) => m >= rough);
    for (let v = 0; v <= top; v += tick) {
      svg.append(draw("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(v), y2: y(v) }));
      svg.append(draw("text", { class: "end", x: LEFT - 6, y: y(v) + 4 }, format(v)));
    }
    let path = `M${LEFT} ${y(0)}`;
    other.forEach((v, i) => { path += `V${y(always + v).toFixed(1)}H${x(i + 1).toFixed(1)}`; });
    svg.append(draw("path", { class: "c2", d: `${path}V${y(0)}Z` }));
    svg.append(draw("rect", { class: "c0", x: LEFT, y: y(always), width: WIDTH - LEFT - RIGHT, height: y(0) - y(always) }));
    if (near) {
      svg.append(draw("line", { class: "limit", x1: LEFT, x2: WIDTH - RIGHT, y1: y(limit), y2: y(limit) }));
      svg.append(draw("text", { class: "end limit", x: WIDTH - RIGHT - 4, y: y(limit) + 14 }, `memory of a tile, ${format(limit)} B`));
    }
    svg.append(draw("rect", { class: "pick", x: x(at), y: TOP, width: Math.max(x(1) - x(0), 1.5), height: inner }));
    svg.append(draw("text", { x: 4, y: 13, class: "title" }, title));
    svg.append(draw("text", { class: "mid", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6 }, `${format(count)} steps of the program, in its order`));
    const hit = draw("rect", { class: "hit", x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: inner });
    const label = draw("title", {});
    hit.append(label);
    const place = (event) => {
      const i = Math.floor((inside(svg, event)[0] - LEFT) / (x(1) - x(0)));
      return Math.min(Math.max(i, 0), count - 1);
    };
    hit.addEventListener("pointermove", (event) => {
      const i = place(event);
      label.textContent = `${names[i]}: ${format(always)} B always live, ${format(other[i])} B beside`;
    });
    hit.addEventListener("click", (event) => choose(place(event)));
    svg.append(hit);
    return svg;
  }

  // Passes of one program show the same tile.
  const following = {};
  for (const [key, source] of Object.entries(data.live || {})) {
    const frame = document.querySelector(`.live[data-source="${key}"]`);
    const panel = document.querySelector(`.tile-contents[data-source="${key}"]`);
    const { variables, vertices } = data.contents[source.contents];
    const now = new Set(), { limit } = source;
    const live = source.changes.map(([added, gone]) => {
      added.forEach((i) => now.add(i));
      gone.forEach((i) => now.delete(i));
      return [...now];
    });
    const names = source.steps.map((step) => source.names[step]);
    const totals = variables.map((v) => everywhere(v[4]));
    let { tile, at } = source;

    function showStep() {
      const held = variables.map((v) => on(v[4], tile));
      const fixed = variables.map((_, i) => i).filter((i) => variables[i][2] < 2);
      const sum = (sizes, numbers) => numbers.reduce((all, i) => all + sizes[i], 0);
      const choose = (i) => { at = i; showStep(); };
      frame.querySelector(".charts").replaceChildren(...[
        ["All tiles, bytes of variables", totals, Infinity], [`Tile ${format(tile)}, bytes of variables`, held, limit],
      ].map(([title, sizes, most]) =>
        chart(title, sum(sizes, fixed), live.map((one) => sum(sizes, one)), most, at, choose, names)));
      const rows = (numbers) => [...numbers].sort((a, b) => totals[b] - totals[a])
        .map((i) => [variables[i][0], variables[i][1], totals[i], held[i], variables[i][3]]);
      const head = [["variable", ""], ["type", ""], ["bytes, all tiles", "n"], [`on tile ${format(tile)}`, "n"], ["made by", "by"]];
      const ran = source.runs[at] ? "" : " (did not run)";
      const lasting = make("details");
      lasting.append(make("summary", `Always live: ${format(fixed.length)} variables, ${format(sum(totals, fixed))} B`), table(head, rows(fixed)));
      frame.querySelector(".held").replaceChildren(
        make("h3", `Step ${names[at]}${ran}: ${format(live[at].length)} variable${live[at].length === 1 ? "" : "s"} beside those always live, ${format(sum(totals, live[at]))} B`),
        table(head, rows(live[at])), lasting);
    }

    function showTile() {
      if (!panel) return;
      const rows = variables.map((v) => [v[0], KINDS[v[2]], v[1], on(v[4], tile), v[3]])
        .filter((row) => row[3]).sort((a, b) => b[3] - a[3]);
      const code = vertices.map(([step, codelet, where]) => [codelet, source.names[step], on(where, tile)]).filter((row) => row[2]);
      const parts = Object.entries(data.tiles[panel.dataset.memory] || {}).map(([name, sizes]) => [name, sizes[tile]]);
      const used = parts.reduce((all, [, size]) => all + size, 0);
      panel.querySelector("input").value = tile;
      const svg = panel.querySelector("svg"), map = svg.dataset;
      svg.querySelector(".chosen")?.remove();
      svg.append(draw("rect", { class: "chosen", width: map.width, height: map.height,
        x: +map.left + (tile % map.columns) * map.width, y: +map.top + Math.floor(tile / map.columns) * map.height }));
      panel.querySelector(".what").replaceChildren(
        make("h3", `Tile ${format(tile)}: ${format(used)} of ${format(limit)} B`),
        make("p", parts.filter(([, size]) => size).map(([name, size]) => `${name} ${format(size)} B`).join(", ")),
        table([["variable", ""], ["kind", ""], ["type", ""], ["bytes", "n"], ["made by", "by"]], rows),
        make("h3", `Vertices: ${format(code.reduce((all, row) => all + row[2], 0))}`),
        table([["codelet", ""], ["step", ""], ["vertices", "n"]], code));
    }

    (following[source.contents] ||= []).push((number) => {
      tile = number;
      showStep();
      showTile();
    });
    const pick = (number, count) => {
      if (number >= 0 && number < count) following[source.contents].forEach((one) => one(number));
    };
    if (panel) {
      const count = +panel.dataset.tiles, at = panel.querySelector("svg").dataset;
      panel.querySelector("svg").addEventListener("click", (event) => {
        const [x, y] = inside(event.currentTarget, event);
        const column = Math.floor((x - at.left) / at.width), row = Math.floor((y - at.top) / at.height);
        if (column >= 0 && column < +at.columns) pick(row * at.columns + column, count);
      });
      panel.querySelector("input").addEventListener("change", (event) => pick(Math.floor(+event.target.value), count));
      for (const columns of document.querySelectorAll(`svg.tiles[id^="${key}-"]`))
        columns.addEventListener("click", (event) => {
          const [x] = inside(columns, event), left = +columns.dataset.left, right = +columns.dataset.right;
          pick(Math.floor(((x - left) / (right - left)) * count), count);
        });
      showTile();
    }
    showStep();
  }
})();
