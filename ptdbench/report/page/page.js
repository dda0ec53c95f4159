"use strict";
// Shows the data of a report: tables that filter and sort, and figures of the rows that the tables show.

const report = JSON.parse(document.getElementById("data").textContent);

// ---------------------------------------------------------------- words and numbers

const plainly = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // plotly reads marks

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Three significant digits, all digits before the point kept. */
function digits(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return grouped.format(value);
  if (size > 0 && size < 0.001) return value.toPrecision(3);
  return value.toFixed(size >= 9.995 ? 1 : size >= 0.9995 || size === 0 ? 2 : 3);
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;
const range = (rank) => (rank[0] === rank[1] ? `${rank[0]}` : `${rank[0]}-${rank[1]}`);
const bytes = (size) => (size >= 2 ** 30 ? `${digits(size / 2 ** 30)} GiB` : `${digits(size / 2 ** 20)} MiB`);
const short = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

const WIDE = "±>100%"; // beyond 2x figures would mean nothing

function throughputText(row) {
  const margin = row.high === null ? null : row.high / row.rate - 1;
  return digits(row.rate) + (margin === null ? "" : margin > 1 ? ` ${WIDE}` : ` ±${percent(margin)}`);
}

function ratioText(row) {
  const isWide = row.ratio_high / row.ratio > 2;
  const interval = isWide ? WIDE : `${row.ratio_low?.toFixed(2)}-${row.ratio_high?.toFixed(2)}`;
  return `${row.ratio.toFixed(2)}x${row.ratio_low === null ? "" : ` (${interval})`}`;
}

function stepText(row) {
  if (row.step_p5 === null || row.step_p95 === null) return digits(1e3 * row.step);
  return `${digits(1e3 * row.step)} (${digits(1e3 * row.step_p5)}-${digits(1e3 * row.step_p95)})`;
}

// ---------------------------------------------------------------- columns

/** `name` is typed in the filter, `of` is what is compared and sorted, `text` what is shown. */
function columnsOf(unit) {
  const fixed = [
    { name: "rank", head: "#", of: (row) => row.rank && row.rank[0], text: (row) => range(row.rank) },
    { name: "configuration", of: (row) => row.label, words: true },
    { name: "runs", of: (row) => row.runs.length },
    { name: "ranks", of: (row) => row.ranks },
    { name: "nodes", of: (row) => row.nodes },
    { name: "batch", of: (row) => row.batch },
    { name: "throughput", head: `${unit}/s`, of: (row) => row.rate, text: throughputText },
    { name: "ratio", head: "vs best", of: (row) => row.ratio, text: ratioText },
    { name: "step_ms", head: "step ms (p5-p95)", of: (row) => row.step && 1e3 * row.step, text: stepText },
    { name: "memory_mib", head: "memory", of: (row) => row.memory && row.memory / 2 ** 20, text: (row) => bytes(row.memory) },
    { name: "mfu", head: "MFU", of: (row) => row.mfu && 100 * row.mfu, text: (row) => percent(row.mfu) },
    { name: "of_ceiling", head: "of ceiling", of: (row) => row.of_ceiling && 100 * row.of_ceiling, text: (row) => percent(row.of_ceiling) },
    { name: "joules", head: "J/sample", of: (row) => row.joules, text: (row) => digits(row.joules) },
    { name: "loss", of: (row) => row.loss, text: (row) => row.loss.toFixed(4) },
    { name: "held_out", head: "held out", of: (row) => row.held_out, text: (row) => row.held_out_text },
    { name: "status", of: (row) => row.status, words: true },
    { name: "sweep", of: (row) => row.sweep, words: true },
  ];
  const options = Object.keys(report.options).map((name) => ({
    name,
    option: true,
    of: (row) => asNumber(report.options[name][row.number]),
    text: (row) => report.options[name][row.number],
  }));
  return [...fixed, ...options];
}

/** An option as it is typed, as a number where it is one. */
function asNumber(text) {
  if (text === null || text === undefined || text.trim() === "") return text;
  const number = Number(text);
  return Number.isNaN(number) ? text : number;
}

const isKnown = (value) => value !== null && value !== undefined;
const textOf = (column, row) => (column.text ? column.text(row) : String(column.of(row)));

const TOLD = ["parallel", "train.global_batch", "cluster.ranks_per_node"]; // by the configuration, the batch and the ranks

/** Columns with a figure, of words that are all alike none, and of a group whose choice differs the choice alone. */
function usualColumns(model) {
  const differ = (column) => new Set(model.rows.map(column.of)).size > 1;
  const chosen = new Set(model.columns.filter((column) => !column.name.includes(".") && differ(column)).map((column) => column.name));
  return model.columns.filter((column) => {
    if (column.name === "runs") return model.rows.some((row) => row.runs.length > 1);
    if (column.name === "nodes") return model.rows.some((row) => row.nodes > 1);
    if (column.name !== "sweep" && !column.option) return model.rows.some((row) => isKnown(column.of(row)));
    const group = column.name.includes(".") ? column.name.split(".")[0] : null;
    return differ(column) && !TOLD.includes(column.name) && !chosen.has(group);
  });
}

// ---------------------------------------------------------------- filter

const COMPARE = {
  ">": (one, other) => one > other,
  "<": (one, other) => one < other,
  ">=": (one, other) => one >= other,
  "<=": (one, other) => one <= other,
};

/** Whether a row passes; throws a sentence where a condition means nothing. */
function readFilter(text) {
  const words = text.match(/(?:[^\s"]|"(?:\\.|[^"\\])*")+/g) || [];
  const tests = words.map((word) => {
    const plain = word.replace(/"((?:\\.|[^"\\])*)"/g, (_, inside) => inside.replace(/\\(.)/g, "$1"));
    const [, name, sign, value] = plain.match(/^([^=<>!]+)(!=|>=|<=|=|>|<)(.*)$/s) || [];
    if (!name) return contains(plain.toLowerCase());
    const column = columnCalled(name);
    if (sign in COMPARE) {
      if (value === "" || Number.isNaN(Number(value))) throw new Error(`${word}: ${value || "nothing"} is no number`);
      const rows = report.models.flatMap((model) => model.rows);
      if (!rows.some((row) => typeof column.of(row) === "number")) throw new Error(`${word}: ${name} is no number; try ${name}=`);
      return (row) => typeof column.of(row) === "number" && COMPARE[sign](column.of(row), Number(value));
    }
    const values = [value, ...value.split(",")];
    const equals = (row) => isKnown(column.of(row)) && values.some((one) => is(column, row, one));
    return sign === "=" ? equals : (row) => !equals(row);
  });
  return (row) => tests.every((test) => test(row));
}

const is = (column, row, value) =>
  textOf(column, row) === value || (value !== "" && column.of(row) === Number(value)) || column.of(row) === value;

const contains = (word) => (row) =>
  [row.label, row.status, ...Object.values(report.options).map((values) => values[row.number])].some((text) =>
    String(text).toLowerCase().includes(word),
  );

/** The column of this name, or the only one whose name ends so; options that all rows share have one value. */
function columnCalled(name) {
  const all = columnsOf("");
  const shared = Object.entries(report.common).map(([key, text]) => ({ name: key, of: () => asNumber(text), text: () => text }));
  const found = [...all, ...shared];
  const exact = found.find((column) => column.name === name || column.head === name);
  const ending = found.filter((column) => column.name.endsWith(`.${name}`));
  if (exact || ending.length === 1) return exact || ending[0];
  const like = (ending.length ? ending : found.filter((column) => column.name.includes(name))).slice(0, 5);
  const remedy = (like.length ? like : all).map((column) => column.name);
  throw new Error(`${name}: ${ending.length ? "several options end so" : "no option is called so"}; try ${remedy.join(", ")}`);
}

// ---------------------------------------------------------------- elements

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter(isKnown));
  return made;
}

const button = (text, onclick, attributes = {}) => element("button", { type: "button", onclick, ...attributes }, text);

function listed(sentences) {
  return sentences.length ? element("ul", { class: "said" }, ...sentences.map((text) => element("li", {}, text))) : null;
}

function definitions(values) {
  const entries = Object.entries(values).filter(([, value]) => isKnown(value));
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  return element("dl", {}, ...entries.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, shown(value))]));
}

function plainTable(head, rows) {
  const line = (tag, cells) => element("tr", {}, ...cells.map((cell) => element(tag, {}, isKnown(cell) ? String(cell) : "")));
  return element("table", {}, element("thead", {}, line("th", head)), element("tbody", {}, ...rows.map((row) => line("td", row))));
}

// ---------------------------------------------------------------- tables of models

const PAGE = 100; // rows of a table until more are asked for

const state = { filter: () => true, sort: null, down: false };

function drawTable(model) {
  const columns = model.columns.filter((column) => model.shown.has(column.name));
  const sorted = sortedRows(model);
  const head = element("tr", {}, ...columns.map((column) => heading(column)));
  const body = element("tbody", {}, ...sorted.slice(0, model.page).flatMap((row) => tableRow(model, row, columns)));
  const table = element("table", {}, element("thead", {}, head), body);
  const left = sorted.length - model.page;
  const more = left > 0 ? button(`show ${Math.min(left, 10 * PAGE)} of ${left} more rows`, () => showMore(model), { class: "more" }) : null;
  const focused = model.table.contains(document.activeElement) ? document.activeElement.title : null;
  const frame = element("div", { class: "table", tabindex: 0, role: "region", "aria-label": model.title }, table);
  model.table.replaceChildren(frame, ...[more].filter(isKnown));
  if (focused) [...model.table.querySelectorAll("button")].find((one) => one.title === focused)?.focus();
}

/** A box for each column, to show those that are not shown by themselves. */
function columnChoice(model) {
  const boxes = model.columns.map((column) => {
    const toggle = () => (model.shown.delete(column.name) || model.shown.add(column.name), drawTable(model));
    const box = element("input", { type: "checkbox", onchange: toggle, ...(model.shown.has(column.name) ? { checked: "" } : {}) });
    return element("label", {}, box, ` ${column.name}`);
  });
  return element("details", { class: "columns" }, element("summary", {}, "columns"), ...boxes);
}

function showMore(model) {
  model.page += 10 * PAGE;
  drawTable(model);
}

function sortedRows(model) {
  const rows = model.rows.filter(state.filter);
  const column = model.columns.find((one) => one.name === state.sort);
  if (!column) return rows;
  const order = (one, other) => (typeof one === typeof other ? (one < other ? -1 : one > other ? 1 : 0) : typeof one === "number" ? -1 : 1);
  const known = rows.filter((row) => isKnown(column.of(row)));
  known.sort((one, other) => (state.down ? -1 : 1) * order(column.of(one), column.of(other)));
  return [...known, ...rows.filter((row) => !isKnown(column.of(row)))];
}

function heading(column) {
  const sort = button(column.head || column.name, () => sortBy(column.name), { title: `sort by ${column.name}` });
  const order = state.sort !== column.name ? null : state.down ? "descending" : "ascending";
  return element("th", { scope: "col", class: column.words ? "words" : null, "aria-sort": order }, sort);
}

/** Ascending, descending, and back to the order of throughput. */
function sortBy(name) {
  if (state.sort !== name) Object.assign(state, { sort: name, down: false });
  else if (!state.down) state.down = true;
  else Object.assign(state, { sort: null, down: false });
  update();
}

/** The row, and below it its details where they were asked for. */
function tableRow(model, row, columns) {
  const isOpen = model.open.has(row.number);
  const best = row.best ? { class: "best", title: "nothing is known to be faster" } : {};
  const shown = element("tr", { ...best, "data-row": row.number });
  const cells = columns.map((column) => {
    const classes = [column.words ? "words" : "", column.name === "configuration" ? "label" : ""];
    if (column.name === "status" && row.status !== "ok") classes.push("bad");
    const value = column.of(row);
    let inside = isKnown(value) ? textOf(column, row) : "-";
    if (column.name === "configuration") {
      const toggle = () => (model.open.delete(row.number) || model.open.add(row.number), drawTable(model));
      inside = button(inside, toggle, { class: "open", "aria-expanded": String(isOpen), title: `runs of ${row.name}, and how to repeat them` });
    } else if (column.option && isKnown(value)) {
      inside = button(short(inside, 40) || '""', () => narrow(column.name, textOf(column, row)), { class: "value", title: `show only ${column.name}=${inside}` });
    }
    return element("td", { class: classes.join(" ").trim() || null }, inside);
  });
  shown.append(...cells);
  return isOpen ? [shown, element("tr", { class: "detail" }, element("td", { colspan: columns.length }, ...details(row)))] : [shown];
}

function narrow(name, value) {
  const field = document.getElementById("filter");
  const isPlain = /^[^\s"]+$/.test(value);
  field.value = `${field.value} ${isPlain ? `${name}=${value}` : `"${name}=${value.replace(/["\\]/g, "\\$&")}"`}`.trim();
  readAndUpdate();
}

function details(row) {
  const environment = (run) => run.environment === null ? "not on record" : `${run.environment + 1} below`;
  const runs = row.runs.map((run) => [run.directory, run.block, run.started, run.status, run.rate && digits(run.rate), environment(run), run.reason]);
  return [
    element("pre", { class: "command" }, row.command || "what was typed is not on record"),
    plainTable(["directory", "block", "started", "status", "throughput", "environment", "reason"], runs),
  ];
}

// ---------------------------------------------------------------- figures

// Okabe and Ito's palette, made for color-blind people too; each color has a symbol and a dash of its own beside it.
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#b8a800"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down", "x"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
// Waiting has a pattern.
const PATTERNS = { data: ".", communication: "/", stragglers: "\\", bubble: "x" };

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

/** A dash for each color, and another one for each further line of it. */
function dashes() {
  const seen = {};
  return (key) => DASHES[(seen[key] = (seen[key] ?? COLORS.indexOf(key) - 1) + 1) % DASHES.length];
}

const axis = (title, more = {}) => ({ title: { text: title, standoff: 10 }, gridcolor: GRID, zeroline: false, automargin: true, ...more });

function layout(height, more) {
  const legend = { orientation: "h", yanchor: "bottom", y: 1.02, x: 0 };
  const font = { family: "system-ui, 'Liberation Sans', sans-serif", size: 13, color: INK };
  const colors = { paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff" };
  return { height, font, legend, hovermode: "closest", margin: { l: 60, r: 20, t: 30, b: 50 }, ...colors, ...more };
}

/** Room for a legend above a figure, where about five names of lines stand beside each other. */
const legendHeight = (names) => 24 + 20 * Math.ceil(names / 5);

/** Bars of rows from above, in the order of the table; names need not be unique. */
function barLayout(rows, title, more = {}) {
  const places = rows.map((_, place) => place);
  const names = rows.map((row) => plainly(short(row.name, 50)));
  const yaxis = axis("", { tickvals: places, ticktext: names, range: [rows.length - 0.4, -0.6], showgrid: false });
  return layout(110 + 30 * rows.length, { xaxis: axis(title, { rangemode: "tozero" }), yaxis, bargap: 0.3, ...more });
}

/** Error bars of rows, where their intervals are known. */
function intervals(rows) {
  const ends = (end) => rows.map((row) => (row.high === null ? null : end(row)));
  const isKnownOfAny = rows.some((row) => row.high !== null);
  const array = ends((row) => row.high - row.rate);
  const arrayminus = ends((row) => row.rate - row.low);
  return { type: "data", visible: isKnownOfAny, symmetric: false, array, arrayminus, color: INK, thickness: 1.5 };
}

function drawThroughput(model, all) {
  const rows = all.filter((row) => row.rate);
  if (!rows.length) return null;
  const bars = rows.slice(0, MOST_BARS);
  const trace = {
    type: "bar",
    orientation: "h",
    x: bars.map((row) => row.rate),
    y: bars.map((_, place) => place),
    error_x: intervals(bars),
    marker: { color: bars.map(colorOf) },
    text: bars.map((row) => `${plainly(row.name)}: ${throughputText(row)} ${model.unit}/s`),
    textposition: "none",
    hoverinfo: "text",
  };
  return {
    traces: [trace],
    layout: barLayout(bars, `${model.unit}/s`, { showlegend: false }),
    note: notAll(bars, rows),
    head: ["configuration", `${model.unit}/s`, "low", "high", "ratio", "ratio low", "ratio high", "runs"],
    rows: rows.map((row) => [row.name, row.rate, row.low, row.high, row.ratio, row.ratio_low, row.ratio_high, row.runs.length]),
  };
}

const notAll = (drawn, rows) => (drawn.length < rows.length ? `the first ${drawn.length} of ${rows.length} rows in the table's order` : "");

/** Bars that add up: `parts` are the names of the numbers in `row[field]`. */
function stacked(all, field, parts, scale, title) {
  const rows = all.filter((row) => row[field]);
  if (!rows.length) return null;
  const bars = rows.slice(0, MOST_BARS);
  const traces = parts.map(({ name, color, pattern }, place) => ({
    type: "bar",
    orientation: "h",
    name,
    x: bars.map((row) => row[field][place] * scale),
    y: bars.map((_, number) => number),
    marker: { color, pattern: { shape: pattern || "", fillmode: "overlay", solidity: 0.25, fgcolor: "#ffffff" } },
    text: bars.map((row) => `${plainly(row.name)}: ${name} ${digits(row[field][place] * scale)}`),
    textposition: "none",
    hoverinfo: "text",
  }));
  return {
    traces: traces.filter((trace) => trace.x.some((value) => value > 0)),
    layout: barLayout(bars, title, { barmode: "stack", legend: { orientation: "h", yanchor: "bottom", y: 1, traceorder: "normal" }, margin: { l: 60, r: 20, t: 60, b: 50 } }),
    note: notAll(bars, rows),
    head: ["configuration", ...parts.map((part) => part.name)],
    rows: rows.map((row) => [row.name, ...row[field].map((value) => value * scale)]),
  };
}

function drawPhases(model, rows) {
  const parts = Object.entries(report.phases).map(([phase, of]) => ({ ...of, pattern: PATTERNS[phase] }));
  return stacked(rows, "phases", parts, 1e3, "ms of a step, mean over ranks");
}

function drawKinds(model, rows) {
  const parts = Object.values(report.kinds).map((name, place) => ({ name, color: COLORS[place], pattern: ["", "/", "", ".", "\\", "x"][place] }));
  return stacked(rows, "kinds", parts, 2 ** -20, "MiB at the peak of a step, of the rank that takes the most");
}

/** Efficiencies relative to the first point that the filter shows. */
const fromFirst = (points) => points.map((point) => ({ ...point, efficiency: point.efficiency / points[0].efficiency }));

function drawScaling(model, rows) {
  const shown = new Map(rows.map((row) => [row.number, row]));
  const dash = dashes();
  const drawn = model.scaling
    .map((curve) => ({
      ...curve,
      points: curve.rows.map((number, place) => ({ row: shown.get(number), efficiency: curve.efficiency[place] })).filter((point) => point.row),
    }))
    .filter((curve) => curve.points.length > 1)
    .map((curve) => ({ ...curve, points: fromFirst(curve.points) }));
  if (!drawn.length) return null;
  const lines = drawn.slice(0, MOST_CURVES);
  const traces = lines.flatMap((curve) => {
    const [first] = curve.points;
    const color = colorOf(first.row);
    const line = { color, dash: dash(color) };
    const name = plainly(`${curve.kind}: ${curve.name}`);
    const x = curve.points.map((point) => point.row.ranks);
    const common = { type: "scatter", x, legendgroup: name, name, line, marker: { color, size: 8, symbol: symbolOf(first.row) } };
    const ideal = x.map((ranks) => (first.row.rate / first.row.ranks) * ranks);
    const error = intervals(curve.points.map((point) => point.row));
    return [
      { ...common, mode: "lines+markers", y: curve.points.map((point) => point.row.rate), error_y: error },
      { ...common, mode: "lines", y: ideal, showlegend: false, hoverinfo: "skip", line: { color: "#999999", width: 1, dash: "dot" } },
      { ...common, mode: "lines+markers", y: curve.points.map((point) => 100 * point.efficiency), xaxis: "x2", yaxis: "y2", showlegend: false },
    ];
  });
  const counts = [...new Set(lines.flatMap((curve) => curve.points.map((point) => point.row.ranks)))].sort((one, other) => one - other);
  const ranks = { type: "log", tickvals: counts, ticktext: counts.map(String) };
  return {
    traces,
    layout: layout(380 + legendHeight(2 * lines.length), {
      xaxis: axis("ranks", { ...ranks, domain: [0, 0.46] }),
      yaxis: axis(`${model.unit}/s`, { type: "log", dtick: "D2" }),
      xaxis2: axis("ranks", { ...ranks, domain: [0.55, 1] }),
      yaxis2: axis("efficiency (%)", { anchor: "x2", rangemode: "tozero" }),
      margin: { l: 70, r: 20, t: legendHeight(2 * lines.length), b: 50 },
    }),
    note: lines.length < drawn.length ? `the ${lines.length} fastest of ${drawn.length} curves` : "",
    head: ["kind", "curve", "ranks", `${model.unit}/s`, "low", "high", "efficiency"],
    rows: drawn.flatMap((curve) =>
      curve.points.map((point) => [curve.kind, curve.name, point.row.ranks, point.row.rate, point.row.low, point.row.high, point.efficiency]),
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
  const rows = all.filter((row) => row.rate && row.memory);
  if (rows.length < 2) return null;
  const front = new Set(paretoFront(rows));
  const groups = new Map();
  for (const row of rows) groups.has(row.parallel) ? groups.get(row.parallel).push(row) : groups.set(row.parallel, [row]);
  const isNamed = front.size <= MOST_NAMED;
  const traces = [...groups].map(([preset, group]) => ({
    type: "scatter",
    mode: isNamed ? "markers+text" : "markers",
    name: plainly(String(preset)),
    x: group.map((row) => row.memory / 2 ** 30),
    y: group.map((row) => row.rate),
    text: group.map((row) => (front.has(row) ? plainly(short(row.name, 40)) : "")),
    textposition: "bottom right",
    hovertext: group.map((row) => `${plainly(row.name)}: ${bytes(row.memory)}, ${throughputText(row)} ${model.unit}/s`),
    hoverinfo: "text",
    marker: { color: group.map(colorOf), symbol: group.map(symbolOf), size: rows.length <= 200 ? 10 : 6 },
    cliponaxis: false,
  }));
  const ends = [...front];
  traces.push({
    type: "scatter",
    mode: "lines",
    name: "Pareto front",
    x: ends.map((row) => row.memory / 2 ** 30),
    y: ends.map((row) => row.rate),
    line: { color: "#666666", dash: "dot", shape: "vh" },
    hoverinfo: "skip",
  });
  const showlegend = traces.length <= MOST_NAMED;
  const top = showlegend ? legendHeight(traces.length) : 20;
  return {
    traces,
    layout: layout(400 + top, {
      xaxis: axis("GiB of the rank that takes the most"),
      yaxis: axis(`${model.unit}/s`),
      showlegend,
      margin: { l: 70, r: 20, t: top, b: 50 },
    }),
    head: ["configuration", "memory (bytes)", `${model.unit}/s`, "on the Pareto front"],
    rows: rows.map((row) => [row.name, row.memory, row.rate, front.has(row) ? "yes" : "no"]),
  };
}

/** A line for each row that has steps: what each step's `field` was. */
function bySteps(model, rows, field, scale, title, y) {
  const shown = new Map(rows.map((row) => [row.number, row]));
  const dash = dashes();
  const drawn = model.steps.filter((curve) => shown.has(curve.number) && curve[field].some(isKnown));
  if (!drawn.length) return null;
  const traces = drawn.map((curve) => {
    const row = shown.get(curve.number);
    const color = colorOf(row);
    const values = curve[field].map((value) => (isKnown(value) ? value * scale : null));
    return { type: "scatter", mode: curve.step.length > 1 ? "lines" : "markers", name: plainly(short(row.name, 50)), x: curve.step, y: values, line: { color, dash: dash(color), width: 1.6 }, marker: { color } };
  });
  const showlegend = drawn.length <= MOST_NAMED;
  const top = showlegend ? legendHeight(drawn.length) : 20;
  return {
    traces,
    layout: layout(380 + top, { xaxis: axis("step"), yaxis: axis(title, y), showlegend, margin: { l: 70, r: 20, t: top, b: 50 } }),
    note: model.rows.length > model.drawn ? `of the first ${model.drawn} rows, as far as the filter shows them` : "",
    head: ["configuration", "step", title],
    rows: drawn.flatMap((curve) => curve.step.map((step, place) => [shown.get(curve.number).name, step, isKnown(curve[field][place]) ? curve[field][place] * scale : null])),
  };
}

const FIGURES = [
  { id: "throughput", title: "Throughput", about: "Geometric mean over runs with its 95 % interval, where there are at least three runs.", draw: drawThroughput },
  { id: "phases", title: "Why: where the time of a step goes", about: "Phases of a step; those with a pattern are waiting.", draw: drawPhases, said: (model) => model.why },
  { id: "scaling", title: "Scaling", about: "Strong: the same global batch; weak: the same batch of each rank. Dotted: as the first point would scale.", draw: drawScaling },
  { id: "memory", title: "Memory against throughput", about: "Above and to the left is better: by their means, nothing beats in both what lies on the dotted line. The axes do not begin at zero.", draw: drawMemory },
  { id: "kinds", title: "What the memory is for", about: "What torch has allocated when a step takes the most.", draw: drawKinds },
  { id: "steps", title: "Time of each step", about: "Of the slowest rank, from the first step on; of repeats the run with the median throughput.", draw: (model, rows) => bySteps(model, rows, "seconds", 1e3, "ms", { rangemode: "tozero" }) },
  { id: "losses", title: "Losses", about: "Of each step. Layouts of the same training lie on one curve.", draw: (model, rows) => bySteps(model, rows, "loss", 1, "loss", {}), said: (model) => model.losses },
];

/** A figure and its element, which is hidden while `draw` has nothing to show. */
function figureElement(id, title, about, draw, said = []) {
  const plot = element("div", { class: "plot", "data-figure": id, role: "img", "aria-label": `${title}. ${about}` });
  const note = element("p", { class: "about" }, about);
  const data = element("details", {}, element("summary", {}, "data"));
  const made = { plot, draw, drawn: null, about, note, data };
  data.addEventListener("toggle", () => fillData(made));
  const buttons = element(
    "div",
    { class: "buttons" },
    button("SVG", () => downloadImage(made, id, "svg")),
    button("PNG", () => downloadImage(made, id, "png")),
    button("CSV", () => downloadCsv(id, made.drawn.head, made.drawn.rows)),
  );
  made.element = element("figure", { id, hidden: "" }, element("div", { class: "head" }, element("h3", {}, title), buttons), note, plot, listed(said), data);
  return made;
}

async function drawFigure(made, ...shown) {
  let drawn = null;
  try {
    drawn = made.draw(...shown);
  } catch (error) {
    console.error(made.plot.dataset.figure, error); // the other figures are drawn all the same
  }
  made.drawn = drawn;
  made.element.hidden = !drawn;
  if (!drawn) return;
  made.note.textContent = drawn.note ? `${made.about} Shown: ${drawn.note}.` : made.about;
  await Plotly.react(made.plot, drawn.traces, drawn.layout, { displayModeBar: false, responsive: true });
  if (made.data.open) fillData(made);
}

const MOST_DATA = 2000;

function fillData(made) {
  const rows = made.drawn.rows.slice(0, MOST_DATA);
  const rest = made.drawn.rows.length - rows.length;
  const table = plainTable(made.drawn.head, rows);
  made.data.replaceChildren(made.data.firstChild, element("div", { class: "table" }, table), rest > 0 ? `and ${rest} more rows in the CSV` : "");
}

function downloadImage(made, name, format) {
  const { offsetWidth: width, offsetHeight: height } = made.plot;
  return Plotly.downloadImage(made.plot, { format, filename: name, width, height, scale: format === "png" ? 2 : 1 });
}

function downloadCsv(name, head, rows) {
  const cell = (value) => {
    const text = isKnown(value) ? String(value) : "";
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [head, ...rows].map((row) => row.map(cell).join(","));
  const address = URL.createObjectURL(new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" }));
  element("a", { href: address, download: `${name}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

// ---------------------------------------------------------------- the page

function build() {
  const main = document.getElementById("main");
  report.models.forEach((model, place) => main.append(modelSection(model, place)));
  const failed = failures();
  if (failed) main.append(failed);
  report.others.forEach((other, place) => main.append(otherSection(other, place)));
  main.append(howToRepeat());
  const names = report.models.length ? [...columnsOf("").map((column) => column.name), ...Object.keys(report.common)] : [];
  document.getElementById("names").append(...names.map((name) => element("option", { value: `${name}=` })));
  document.getElementById("filter").addEventListener("input", readAndUpdate);
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("theme").addEventListener("click", nextTheme);
  document.querySelectorAll("#filter, [for=filter]").forEach((part) => (part.hidden = !report.models.length));
}

function modelSection(model, place) {
  const suffix = place ? `-${place + 1}` : "";
  model.columns = columnsOf(model.unit);
  model.shown = new Set(usualColumns(model).map((column) => column.name));
  model.page = PAGE;
  model.open = new Set();
  model.table = element("div", {});
  model.figures = FIGURES.map(({ id, title, about, draw, said }) => figureElement(`${id}${suffix}`, title, about, draw, said ? said(model) : []));
  const csv = button("CSV", () => downloadTable(model, `table${suffix}`));
  return element(
    "section",
    { "data-model": place },
    element("h2", {}, model.title),
    model.table,
    element("div", { class: "below" }, columnChoice(model), element("div", { class: "buttons" }, csv)),
    listed(model.remarks),
    ...model.figures.map((figure) => figure.element),
  );
}

/** All rows that the filter shows, with all options, and figures in the units of records. */
function downloadTable(model, name) {
  const plain = ["number", "name", "sweep", "status", "rate", "low", "high", "ratio", "ratio_low", "ratio_high", "step", "step_p5", "step_p95", "memory", "mfu", "of_ceiling", "joules", "loss", "ranks", "nodes", "batch", "command"];
  const options = Object.keys(report.options);
  const rows = sortedRows(model).map((row) => [...plain.map((field) => row[field]), ...options.map((option) => report.options[option][row.number])]);
  downloadCsv(name, [...plain, ...options], rows);
}

function failures() {
  const failed = [...report.models.flatMap((model) => model.rows), ...report.others]
    .flatMap((row) => row.runs.filter((run) => run.reason).map((run) => [row.name || row.title, run.status, run.reason, run.directory, row.command]));
  if (!failed.length) return null;
  const shown = failed.slice(0, MOST_DATA);
  const table = plainTable(["configuration", "status", "reason", "directory", "command"], shown);
  table.querySelectorAll("td, th").forEach((cell) => (cell.style.cssText = "text-align: left; white-space: normal; vertical-align: top"));
  const rest = failed.length > shown.length ? element("p", {}, `and ${failed.length - shown.length} more, in the rows of the tables`) : null;
  return element("section", { id: "failed" }, element("h2", {}, `Runs that are not ok (${failed.length})`), element("div", { class: "table" }, table), rest);
}

function otherSection(other, place) {
  const figures = other.curves.map((curve, number) => figureElement(`other-${place + 1}-${number + 1}`, curve.title, "", () => drawCurves(curve)));
  other.figures = figures;
  const command = other.command ? element("pre", { class: "command" }, other.command) : null;
  const [run] = other.runs;
  const where = `${run.directory}${run.environment === null ? "" : `, environment ${run.environment + 1} below`}`;
  return element("section", { "data-other": place }, element("h2", {}, other.title), element("p", { class: "about" }, where), command, output(other.text), ...figures.map((figure) => figure.element));
}

/** What a workload shows in a terminal; a long one is folded. */
function output(text) {
  const isLong = text.split("\n").length > 40;
  return element("details", isLong ? {} : { open: "" }, element("summary", {}, "as in the terminal"), element("pre", {}, text));
}

function drawCurves(curve) {
  const traces = curve.lines.map((line, place) => ({
    type: "scatter",
    mode: line.x.length > 1 && !line.text ? "lines+markers" : "markers",
    name: plainly(line.name),
    x: line.x,
    y: line.y,
    text: line.text,
    line: { color: COLORS[place % COLORS.length], dash: DASHES[Math.floor(place / COLORS.length) % DASHES.length] },
    marker: { color: COLORS[place % COLORS.length], symbol: SYMBOLS[place % SYMBOLS.length], size: 8 },
  }));
  const bounds = curve.bounds.map((line, place) => ({ type: "scatter", mode: "lines", name: line.name, x: line.x, y: line.y, line: { color: COLORS[place % COLORS.length], dash: "dot" } }));
  const top = legendHeight(traces.length + bounds.length);
  return {
    traces: [...traces, ...bounds],
    layout: layout(380 + top, { xaxis: axis(curve.x, { type: "log" }), yaxis: axis(curve.y, { type: "log" }), margin: { l: 70, r: 20, t: top, b: 50 } }),
    head: ["line", curve.x, curve.y, "of"],
    rows: [...curve.lines, ...curve.bounds].flatMap((line) => line.x.map((x, place) => [line.name, x, line.y[place], line.text ? line.text[place] : null])),
  };
}

function howToRepeat() {
  const environments = report.environments.map((environment, place) =>
    element("details", { open: report.environments.length === 1 ? "" : null }, element("summary", {}, `environment ${place + 1}: ${summary(environment)}`), definitions(environment)),
  );
  const common = Object.keys(report.common).length ? element("details", {}, element("summary", {}, "options that all rows share"), definitions(report.common)) : null;
  return element("section", { id: "repeat" }, element("h2", {}, "How to repeat it"), commands(), common, ...environments);
}

/** What to type for each configuration; it is made when it is looked at, or printed. */
function commands() {
  const rows = report.models.flatMap((model) => model.rows).filter((row) => row.command);
  if (!rows.length) return null;
  const made = element("details", {}, element("summary", {}, "commands"));
  const fill = () => {
    const lines = rows.slice(0, MOST_DATA).map((row) => `# ${row.name}\n${row.command}`);
    const rest = rows.length > MOST_DATA ? [`# and ${rows.length - MOST_DATA} more in the CSV of the tables`] : [];
    made.replaceChildren(made.firstChild, element("pre", { class: "command" }, [...lines, ...rest].join("\n\n")));
  };
  made.addEventListener("toggle", fill);
  window.addEventListener("beforeprint", () => rows.length <= PAGE && (fill(), (made.open = true)));
  return made;
}

const summary = (environment) =>
  [environment.host, environment.cpu, environment.torch && `torch ${environment.torch}`, environment.ptdbench && `ptdbench ${environment.ptdbench}`].filter(Boolean).join(", ");

let latest = 0;

/** Draw all that the filter shows: tables at once, figures one after the other, so that the page answers meanwhile. */
async function update() {
  const own = ++latest;
  const rows = report.models.map(sortedRows);
  report.models.forEach(drawTable);
  const count = rows.reduce((sum, of) => sum + of.length, 0);
  const total = report.models.reduce((sum, model) => sum + model.rows.length, 0);
  const found = document.getElementById("found");
  found.classList.remove("wrong");
  found.textContent = total ? `${count} of ${total} configurations` : "";
  document.body.dataset.drawn = "";
  for (const [place, model] of report.models.entries()) {
    for (const figure of model.figures) {
      await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve))); // so that the last one is seen
      if (own !== latest) return;
      await drawFigure(figure, model, rows[place]);
    }
  }
  document.body.dataset.drawn = "all";
}

let waiting = null;

function readAndUpdate() {
  clearTimeout(waiting);
  try {
    state.filter = readFilter(document.getElementById("filter").value);
  } catch (error) {
    const found = document.getElementById("found");
    found.classList.add("wrong");
    found.textContent = error.message;
    return;
  }
  waiting = setTimeout(update, 150);
}

const THEMES = { "": "as the system's", light: "light", dark: "dark" };

function nextTheme() {
  const names = Object.keys(THEMES);
  const root = document.documentElement;
  const next = names[(names.indexOf(root.dataset.theme || "") + 1) % names.length];
  root.dataset.theme = next;
  document.getElementById("theme").textContent = `theme: ${THEMES[next]}`;
}

build();
report.others.forEach((other) => other.figures.forEach((figure) => drawFigure(figure)));
update();
