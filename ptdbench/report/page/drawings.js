// What each figure shows: traces and layout for plotly, and the same numbers as rows of a table.

// Okabe and Ito's palette, made for color-blind people too; each color has a symbol and a dash of its own beside it.
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#b8a800"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down", "x"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
// Computing in blue and green; waiting in warm colors, a brown and black, with a pattern.
const PHASES = {
  data: { color: "#cc79a7", pattern: "." },
  forward: { color: "#56b4e9" },
  backward: { color: "#0072b2" },
  communication: { color: "#d55e00", pattern: "/" },
  stragglers: { color: "#e69f00", pattern: "\\" },
  experts: { color: "#8c510a", pattern: "-" },
  bubble: { color: "#f0e442", pattern: "x" },
  host: { color: "#000000", pattern: "+" },
  optimizer: { color: "#009e73" },
  other: { color: "#999999" },
};

// Passes of micro-batches: forward, backward, and where it is split, gradients of inputs and of weights.
const PASSES = { F: "#56b4e9", B: "#0072b2", I: "#e69f00", W: "#009e73" };

const INK = "#1f2328";
const GRID = "#e4e8ec";
const MOST_BARS = 40;
const MOST_CURVES = 16;
const MOST_NAMED = 25; // lines of a legend, and points with names

// A color for each way of parallelizing; where there is but one, for each row.
const presets = [...new Set(report.models.flatMap((model) => model.rows.map((row) => row.parallel)))];
const kindOf = (row) => (presets.length > 1 ? presets.indexOf(row.parallel) : row.number);
const colorOf = (row) => COLORS[kindOf(row) % COLORS.length];
const symbolOf = (row) => SYMBOLS[kindOf(row) % SYMBOLS.length];

/** The rate of a row, and what is said of it: measured, or predicted where nothing is. */
const rateOf = (row) => row.rate || row.predicted_rate;
const isPredicted = (row) => !row.rate;
const rateText = (row, unit) =>
  isPredicted(row) ? `${digits(row.predicted_rate)} ${unit}/s, predicted` : `${row.texts.throughput} ${unit}/s`;

/** A dash for each color, and another one for each further line of it. */
function dashes() {
  const seen = {};
  return (key) => DASHES[(seen[key] = (seen[key] ?? COLORS.indexOf(key) - 1) + 1) % DASHES.length];
}

const axis = (title, more = {}) => ({
  title: { text: title, standoff: 10 },
  gridcolor: GRID,
  zeroline: false,
  automargin: true,
  ...more,
});

/** `500`, `1k`, `2.5M`. */
function tickText(value) {
  const [unit, size] = Object.entries({ T: 1e12, G: 1e9, M: 1e6, k: 1e3, "": 0 }).find(([, size]) => value >= size);
  return `${Number((value / (size || 1)).toPrecision(4))}${unit}`;
}

/** A logarithmic axis of these values with whole labels; of ticks between two powers plotly names a digit alone. */
function logAxis(title, values, more = {}) {
  const known = values.filter((value) => value > 0);
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const steps = (from, to, tick) => Array.from({ length: to - from + 1 }, (_, place) => tick(from + place));
  const step = 10 ** Math.floor(Math.log10(most - least || most));
  const parts = most / least > 1e3 ? [1] : [1, 2, 5];
  const tickvals =
    most / least < 5
      ? steps(Math.floor(least / step), Math.ceil(most / step), (count) => count * step)
      : steps(Math.floor(Math.log10(least)), Math.ceil(Math.log10(most)), (power) =>
          parts.map((part) => part * 10 ** power),
        ).flat();
  return axis(title, { type: "log", tickvals, ticktext: tickvals.map(tickText), ...more });
}

function layout(height, more) {
  const legend = { orientation: "h", yanchor: "bottom", y: 1.02, x: 0, maxheight: 1000 };
  const font = { family: "system-ui, 'Liberation Sans', sans-serif", size: 13, color: INK };
  const colors = { paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff" };
  return { height, font, legend, hovermode: "closest", margin: { l: 60, r: 20, t: 30, b: 50 }, ...colors, ...more };
}

/** Width of text in a figure, about. */
const textWidth = (texts) => 7.5 * Math.max(...texts.map((text) => text.length));

/** Height of a legend of these names, as many beside each other as fit right of `left` pixels. */
function legendHeight(names, left = 70) {
  const room = document.getElementById("main").clientWidth - left - 20;
  return 24 + 20 * Math.ceil(names.length / Math.max(1, Math.floor(room / (45 + textWidth(names)))));
}

/** Axes below a legend of these names, which is left out where it would be too long. */
function underLegend(names, xaxis, yaxis) {
  const showlegend = names.length <= MOST_NAMED;
  const top = showlegend ? legendHeight(names) : 20;
  return layout(380 + top, { showlegend, margin: { l: 70, r: 20, t: top, b: 50 }, xaxis, yaxis });
}

/** Bars of rows from above, in the order of the table; names need not be unique. */
function barLayout(rows, title, more = {}) {
  const places = rows.map((_, place) => place);
  const names = rows.map((row) => plainly(short(row.name, 50)));
  const yaxis = axis("", { tickvals: places, ticktext: names, range: [rows.length - 0.4, -0.6], showgrid: false });
  return layout(110 + 30 * rows.length, { xaxis: axis(title, { rangemode: "tozero" }), yaxis, bargap: 0.3, ...more });
}

/** Error bars of rows, where their intervals are known. */
function intervals(rows) {
  const ends = (end) => rows.map((row) => (row.high === null ? NaN : end(row))); // null would be drawn as 0
  const isKnownOfAny = rows.some((row) => row.high !== null);
  const array = ends((row) => row.high - row.rate);
  const arrayminus = ends((row) => row.rate - row.low);
  return { type: "data", visible: isKnownOfAny, symmetric: false, array, arrayminus, color: INK, thickness: 1.5 };
}

const notAll = (drawn, rows) =>
  drawn.length < rows.length ? `the first ${drawn.length} of ${rows.length} rows in the table's order` : "";

/** Bars of rows from above: how long each is, and what the pointer shows of it. */
const barTrace = (bars, lengthOf, told, more) => ({
  type: "bar",
  orientation: "h",
  x: bars.map(lengthOf),
  y: bars.map((_, place) => place),
  text: bars.map((row) => `${plainly(row.name)}: ${told(row)}`),
  textposition: "none",
  hoverinfo: "text",
  ...more,
});

function drawThroughput(model, all) {
  const rows = all.filter(rateOf);
  if (!rows.length) return null;
  const bars = rows.slice(0, MOST_BARS);
  const pattern = { shape: bars.map((row) => (isPredicted(row) ? "/" : "")), fillmode: "replace" };
  const more = { error_x: intervals(bars), marker: { color: bars.map(colorOf), pattern } };
  const told = (row) => rateText(row, model.unit);
  return {
    traces: [barTrace(bars, rateOf, told, more)],
    layout: barLayout(bars, `${model.unit}/s`, { showlegend: false }),
    note: notAll(bars, rows),
    head: ["configuration", `${model.unit}/s`, "low", "high", "ratio", "ratio low", "ratio high", "predicted", "runs"],
    rows: rows.map((row) => [...pick(row, "name rate low high ratio ratio_low ratio_high predicted_rate"), row.runs.length]),
  };
}

/** Bars below a legend of these names. */
function barsUnderLegend(bars, names, title, more) {
  const top = legendHeight(names, textWidth(bars.map((row) => short(row.name, 50))));
  const made = barLayout(bars, title, { margin: { l: 60, r: 20, t: top, b: 50 }, ...more });
  made.height += top - 30;
  made.legend.traceorder = "normal";
  return made;
}

/** Bars that add up: `parts` are the names of the numbers in `row[field]`. */
function stacked(all, field, parts, scale, title) {
  const rows = all.filter((row) => row[field]);
  if (!rows.length) return null;
  const bars = rows.slice(0, MOST_BARS);
  const traces = parts.map(({ name, color, pattern }, place) => {
    const lengthOf = (row) => row[field][place] * scale;
    const filling = { shape: pattern || "", fillmode: "overlay", solidity: 0.25, fgcolor: "#ffffff" };
    const more = { name, marker: { color, pattern: filling } };
    return barTrace(bars, lengthOf, (row) => `${name} ${digits(lengthOf(row))}`, more);
  });
  const drawn = traces.filter((trace) => trace.x.some((value) => value > 0));
  return {
    traces: drawn,
    layout: barsUnderLegend(bars, drawn.map((trace) => trace.name), title, { barmode: "stack" }),
    note: notAll(bars, rows),
    head: ["configuration", ...parts.map((part) => part.name)],
    rows: rows.map((row) => [row.name, ...row[field].map((value) => value * scale)]),
  };
}

function drawPhases(model, rows) {
  const parts = Object.entries(report.phases).map(([phase, name]) => ({ name, ...PHASES[phase] }));
  return stacked(rows, "phases", parts, 1e3, "ms per step");
}

function drawKinds(model, rows) {
  const patterns = ["", "/", "", ".", "\\", "x"];
  const names = Object.values(report.kinds);
  const parts = names.map((name, place) => ({ name, color: COLORS[place], pattern: patterns[place] }));
  return stacked(rows, "kinds", parts, 2 ** -20, "MiB, largest rank");
}

/** A lane for each rank of a pipeline, with a box for each pass of a micro-batch on the gray of idle time. */
function drawSchedules(model, all) {
  const rows = new Map(all.map((row) => [row.number, row]));
  const shown = model.schedules.filter((schedule) => rows.has(schedule.number) && schedule.passes.length);
  if (!shown.length) return null;
  const lanes = shown.flatMap(({ number, passes }) => {
    const end = Math.max(...passes.map((pass) => pass.start + pass.seconds));
    const nameOf = (rank) => (shown.length > 1 ? `${rows.get(number).name}, rank ${rank}` : `rank ${rank}`);
    const byRank = [...Map.groupBy(passes, (pass) => pass.rank)].sort(([one], [other]) => one - other);
    return byRank.map(([rank, own]) => ({ name: nameOf(rank), end, passes: own, row: rows.get(number) }));
  });
  const boxes = lanes.flatMap((lane, place) => lane.passes.map((pass) => ({ ...pass, lane, place })));
  const several = (lane) => new Set(lane.passes.map((pass) => pass.stage)).size > 1;
  const idle = { type: "bar", orientation: "h", name: "idle or waiting", marker: { color: "#d0d0d0" }, hoverinfo: "skip" };
  const traces = Object.entries(report.passes).map(([kind, name]) => {
    const own = boxes.filter((pass) => pass.kind === kind);
    return {
      type: "bar",
      orientation: "h",
      name,
      base: own.map((pass) => 1e3 * pass.start),
      x: own.map((pass) => 1e3 * pass.seconds),
      y: own.map((pass) => pass.place),
      text: own.map((pass) => (several(pass.lane) ? `${pass.stage}:${pass.microbatch}` : String(pass.microbatch))),
      textposition: "inside",
      insidetextanchor: "middle",
      textangle: 0,
      hovertext: own.map((pass) => `stage ${pass.stage}, ${name} ${pass.microbatch}: ${digits(1e3 * pass.seconds)} ms`),
      hoverinfo: "text",
      marker: { color: PASSES[kind], line: { color: "#ffffff", width: 1 } },
    };
  });
  const drawn = [
    { ...idle, x: lanes.map((lane) => 1e3 * lane.end), y: lanes.map((_, place) => place) },
    ...traces.filter((trace) => trace.x.length),
  ];
  const more = { barmode: "overlay", uniformtext: { mode: "hide", minsize: 9 } };
  return {
    traces: drawn,
    layout: barsUnderLegend(lanes, drawn.map((trace) => trace.name), "ms since the first pass", more),
    head: ["configuration", "rank", "stage", "pass", "micro-batch", "start (ms)", "ms"],
    rows: boxes.map(({ lane, rank, stage, kind, microbatch, start, seconds }) => [
      lane.row.name, rank, stage, report.passes[kind], microbatch, 1e3 * start, 1e3 * seconds,
    ]),
  };
}

/** Efficiencies relative to the first point that the filter shows. */
const fromFirst = (points) =>
  points.map((point) => ({ ...point, efficiency: point.efficiency / points[0].efficiency }));

function drawScaling(model, rows) {
  const shown = new Map(rows.map((row) => [row.number, row])); // of all sections: see _add_scaling
  const dash = dashes();
  const pointsOf = (curve) =>
    curve.rows
      .map((number, place) => ({ row: shown.get(number), efficiency: curve.efficiency[place] }))
      .filter((point) => point.row);
  const drawn = model.scaling
    .map((curve) => ({ ...curve, points: fromFirst(pointsOf(curve)) }))
    .filter((curve) => curve.points.length > 1);
  if (!drawn.length) return null;
  const lines = drawn.slice(0, MOST_CURVES);
  const traces = lines.flatMap((curve) => {
    const [first] = curve.points;
    const color = colorOf(first.row);
    const line = { color, dash: dash(color) };
    const name = plainly(`${curve.kind}: ${curve.name}`);
    const x = curve.points.map((point) => point.row.ranks);
    const marker = { color, size: 8, symbol: symbolOf(first.row) };
    const common = { type: "scatter", x, legendgroup: name, name, line, marker };
    const dotted = { color: "#999999", width: 1, dash: "dot" };
    const ideal = x.map((ranks) => (first.row.rate / first.row.ranks) * ranks);
    const error = intervals(curve.points.map((point) => point.row));
    return [
      { ...common, mode: "lines+markers", y: curve.points.map((point) => point.row.rate), error_y: error },
      { ...common, mode: "lines", y: ideal, showlegend: false, hoverinfo: "skip", line: dotted },
      {
        ...common,
        mode: "lines+markers",
        y: curve.points.map((point) => 100 * point.efficiency),
        xaxis: "x2",
        yaxis: "y2",
        showlegend: false,
      },
    ];
  });
  const counts = [...new Set(traces.flatMap((trace) => trace.x))].sort((one, other) => one - other);
  const ranks = { type: "log", tickvals: counts, ticktext: counts.map(String) };
  const top = legendHeight(traces.filter((trace) => trace.showlegend !== false).map((trace) => trace.name));
  return {
    traces,
    layout: layout(380 + top, {
      xaxis: axis("ranks", { ...ranks, domain: [0, 0.46] }),
      yaxis: logAxis(`${model.unit}/s`, traces.filter((trace) => !trace.yaxis).flatMap((trace) => trace.y)),
      xaxis2: axis("ranks", { ...ranks, domain: [0.55, 1] }),
      yaxis2: axis("efficiency (%)", { anchor: "x2", rangemode: "tozero" }),
      margin: { l: 70, r: 20, t: top, b: 50 },
    }),
    note: lines.length < drawn.length ? `the first ${lines.length} of ${drawn.length} curves` : "",
    head: ["kind", "curve", "ranks", `${model.unit}/s`, "low", "high", "efficiency"],
    rows: drawn.flatMap(({ kind, name, points }) =>
      points.map(({ row, efficiency }) => [kind, name, ...pick(row, "ranks rate low high"), efficiency]),
    ),
  };
}

/** Rows that none beats in throughput without taking more memory, by throughput. */
function paretoFront(rows) {
  const front = [];
  for (const row of [...rows].sort((one, other) => other.rate - one.rate || one.memory - other.memory)) {
    if (!front.length || row.memory < front[front.length - 1].memory) front.push(row);
  }
  return front;
}

function drawMemory(model, all) {
  const rows = all.filter((row) => rateOf(row) && row.memory);
  if (rows.length < 2) return null;
  const front = new Set(paretoFront(rows));
  const isNamed = front.size <= MOST_NAMED;
  // Memory of a process is mostly that of its libraries: as a part of it, differences look larger than they are.
  const isFromZero = model.device !== "GPU";
  const least = isFromZero ? 0 : Math.min(...rows.map((row) => row.memory));
  const middle = (least + Math.max(...rows.map((row) => row.memory))) / 2;
  const traces = [...Map.groupBy(rows, (row) => row.parallel)].map(([preset, group]) => ({
    type: "scatter",
    mode: isNamed ? "markers+text" : "markers",
    name: plainly(String(preset)),
    x: group.map((row) => row.memory / 2 ** 30),
    y: group.map(rateOf),
    text: group.map((row) => (front.has(row) ? plainly(short(row.name, 40)) : "")),
    textposition: group.map((row) => (row.memory > middle ? "bottom left" : "bottom right")),
    hovertext: group.map((row) => `${plainly(row.name)}: ${row.texts.memory_mib}, ${rateText(row, model.unit)}`),
    hoverinfo: "text",
    marker: { color: group.map(colorOf), symbol: group.map((row) => symbolOf(row) + (isPredicted(row) ? "-open" : "")), size: rows.length <= 200 ? 10 : 6 },
    cliponaxis: false,
  }));
  const ends = [...front];
  traces.push({
    type: "scatter",
    mode: "lines",
    name: "Pareto front",
    x: ends.map((row) => row.memory / 2 ** 30),
    y: ends.map(rateOf),
    line: { color: "#666666", dash: "dot", shape: "vh" },
    hoverinfo: "skip",
  });
  return {
    traces,
    layout: underLegend(
      traces.map((trace) => trace.name),
      axis("GiB, largest rank", isFromZero ? { rangemode: "tozero" } : {}),
      axis(`${model.unit}/s`),
    ),
    note: isFromZero ? "memory of whole processes" : "",
    head: ["configuration", "memory (bytes)", `${model.unit}/s`, "on the Pareto front"],
    rows: rows.map((row) => [row.name, row.memory, rateOf(row), front.has(row) ? "yes" : "no"]),
  };
}

/** A line for each row that has steps: what each step's `field` was. */
function bySteps(model, rows, field, scale, title, y) {
  const shown = new Map(rows.map((row) => [row.number, row]));
  const dash = dashes();
  const scaled = (value) => (isKnown(value) ? value * scale : null);
  const drawn = model.steps.filter((curve) => shown.has(curve.number) && curve[field].some(isKnown));
  if (!drawn.length) return null;
  const traces = drawn.map((curve) => {
    const row = shown.get(curve.number);
    const color = colorOf(row);
    return {
      type: "scatter",
      mode: curve.step.length > 1 ? "lines" : "markers",
      name: plainly(short(row.name, 50)),
      x: curve.step,
      y: curve[field].map(scaled),
      line: { color, dash: dash(color), width: 1.6 },
      marker: { color },
    };
  });
  return {
    traces,
    layout: underLegend(traces.map((trace) => trace.name), axis("step"), axis(title, y)),
    note: model.rows.length > model.drawn ? `of the first ${model.drawn} rows, as far as the filter shows them` : "",
    head: ["configuration", "step", title],
    rows: drawn.flatMap((curve) =>
      curve.step.map((step, place) => [shown.get(curve.number).name, step, scaled(curve[field][place])]),
    ),
  };
}
