// The table of a model: its columns, the filter, which speaks of them, and its rows, with what stands below one.

/** `name` is typed in the filter, `of` is what is compared and sorted, `text` what is shown. */
function columnsOf({ unit, device }) {
  const fixed = report.columns.map(({ name, head, field, scale, higher_is_better, is_text }) => {
    const valueOf = (row) => (Array.isArray(row[field]) ? row[field][0] : row[field]);
    const of = (row) => (scale !== 1 && valueOf(row) ? scale * valueOf(row) : valueOf(row));
    const text = (row) => (name === "sweep" ? report.sweeps[row.sweep] : (row.texts[name] ?? String(of(row))));
    return { name, head: head.replace("{unit}", unit).replace("{device}", device), of, text, higher_is_better, is_text };
  });
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

/** Columns that say something of these rows, and options that differ: of a group whose choice differs, the choice. */
function usualColumns(model) {
  const differ = (column) => new Set(model.rows.map(column.of)).size > 1;
  const chosen = new Set(
    model.columns.filter((column) => !column.name.includes(".") && differ(column)).map((column) => column.name),
  );
  return model.columns.filter((column) => {
    if (!column.option) return model.usual.includes(column.name);
    const group = column.name.includes(".") ? column.name.split(".")[0] : null;
    return differ(column) && !report.told.includes(column.name) && !chosen.has(group);
  });
}

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
      if (value === "" || Number.isNaN(Number(value))) throw new Error(`${word}: ${value || "nothing"} is not a number`);
      const rows = report.models.flatMap((model) => model.rows);
      if (!rows.some((row) => typeof column.of(row) === "number"))
        throw new Error(`${word}: ${name} is not a number; try ${name}=`);
      return (row) => typeof column.of(row) === "number" && COMPARE[sign](column.of(row), Number(value));
    }
    const values = [value, ...value.split(",")];
    const equals = (row) => isKnown(column.of(row)) && values.some((one) => is(column, row, one));
    return sign === "=" ? equals : (row) => !equals(row);
  });
  return (row) => tests.every((test) => test(row));
}

const is = (column, row, value) =>
  column.text(row) === value || (value !== "" && column.of(row) === Number(value)) || column.of(row) === value;

const contains = (word) => (row) =>
  [row.name, row.status, ...Object.values(report.options).map((values) => values[row.number])].some((text) =>
    String(text).toLowerCase().includes(word),
  );

/** The column of this name, or the only one whose name ends so; options that all rows share have one value. */
function columnCalled(typed) {
  const name = typed.endsWith("/s") ? "throughput" : typed; // tokens/s, samples/s
  const all = columnsOf({});
  const shared = Object.entries(report.common).map(([key, text]) => ({
    name: key,
    of: () => asNumber(text),
    text: () => text,
  }));
  const found = [...all, ...shared];
  const exact = found.find((column) => column.name === name || column.head === name);
  const ending = found.filter((column) => column.name.endsWith(`.${name}`));
  if (exact || ending.length === 1) return exact || ending[0];
  const like = (ending.length ? ending : nearest(name, found)).slice(0, 3).map((column) => column.name);
  const names = like.join(" or ");
  if (ending.length) throw new Error(`${name}: several options end in it: ${names}`);
  throw new Error(`${name}: no such option; ${like.length ? `did you mean ${names}?` : "the field lists all of them"}`);
}

/** Columns whose name, or its last part, shares half of its pairs of letters with what was typed, the nearest first. */
function nearest(typed, columns) {
  const pairs = (text) => new Set([...text].slice(1).map((letter, place) => text[place] + letter));
  const share = (one, other) => (2 * [...one].filter((pair) => other.has(pair)).length) / (one.size + other.size || 1);
  const likeness = ({ name }) => Math.max(...[name, name.split(".").pop()].map((text) => share(pairs(typed), pairs(text))));
  const like = columns.filter((column) => likeness(column) >= 0.5);
  return like.sort((one, other) => likeness(other) - likeness(one));
}

const PAGE = 100; // rows of a table until more are asked for

const state = { filter: () => true, sort: null, down: false };

function drawTable(model) {
  const columns = model.columns.filter((column) => model.shown.has(column.name));
  const sorted = sortedRows(model);
  const head = element("tr", {}, ...columns.map((column) => heading(column)));
  const body = element("tbody", {}, ...sorted.slice(0, model.page).flatMap((row) => tableRow(model, row, columns)));
  const table = element("table", {}, element("thead", {}, head), body);
  const focused = model.table.contains(document.activeElement) ? document.activeElement.title : null;
  const frame = framed(model.title, table);
  model.table.replaceChildren(frame);
  const showMoreToTheRight = () =>
    frame.classList.toggle("more", frame.scrollWidth - frame.clientWidth - frame.scrollLeft > 2);
  frame.addEventListener("scroll", showMoreToTheRight);
  new ResizeObserver(showMoreToTheRight).observe(frame);
  const left = sorted.length - model.page;
  const showMore = () => ((model.page += 10 * PAGE), drawTable(model));
  if (left > 0) model.table.append(button(`show ${Math.min(left, 10 * PAGE)} of ${left} more rows`, showMore));
  if (focused) [...model.table.querySelectorAll("button")].find((one) => one.title === focused)?.focus();
}

/** A box for each column, to show those that are not shown by themselves. */
function columnChoice(model) {
  const boxes = model.columns.map(({ name }) => {
    const onchange = () => (model.shown.delete(name) || model.shown.add(name), drawTable(model));
    const box = element("input", { type: "checkbox", onchange, checked: model.shown.has(name) ? "" : null });
    return element("label", {}, box, ` ${name}`);
  });
  return element("details", { class: "columns" }, element("summary", {}, "columns"), ...boxes);
}

function sortedRows(model) {
  const rows = model.rows.filter(state.filter);
  const column = model.columns.find((one) => one.name === state.sort);
  if (!column) return rows;
  const order = (one, other) =>
    typeof one === typeof other ? (one < other ? -1 : one > other ? 1 : 0) : typeof one === "number" ? -1 : 1;
  const known = rows.filter((row) => isKnown(column.of(row)));
  known.sort((one, other) => (state.down ? -1 : 1) * order(column.of(one), column.of(other)));
  return [...known, ...rows.filter((row) => !isKnown(column.of(row)))];
}

function heading(column) {
  const sort = button(column.head || column.name, () => sortBy(column), { title: `sort by ${column.name}` });
  const order = state.sort !== column.name ? null : state.down ? "descending" : "ascending";
  return element("th", { scope: "col", class: classOf(column), "aria-sort": order }, sort);
}

const classOf = ({ name, is_text }) => (name === "configuration" ? "words label" : is_text ? "words" : null);

/** The best first, the other way round, and back to the order of the ranks. */
function sortBy({ name, higher_is_better }) {
  const first = Boolean(higher_is_better);
  if (state.sort !== name) Object.assign(state, { sort: name, down: first });
  else if (state.down === first) state.down = !first;
  else Object.assign(state, { sort: null, down: false });
  update();
}

/** The row, and below it its details where they were asked for. */
function tableRow(model, row, columns) {
  const isOpen = model.open.has(row.number);
  const best = row.best ? { class: "best", title: "no other row is shown to be faster" } : {};
  const shown = element("tr", { ...best, "data-row": row.number });
  const cells = columns.map((column) => {
    const isBad = column.name === "status" && row.runs.some((run) => run.failed);
    const value = column.of(row);
    let inside = isKnown(value) ? column.text(row) : "-";
    if (column.name === "configuration") {
      const toggle = () => (model.open.delete(row.number) || model.open.add(row.number), drawTable(model));
      inside = button(inside, toggle, {
        class: "open",
        "aria-expanded": String(isOpen),
        title: `runs of ${row.name}, and how to repeat them`,
      });
    } else if (column.option && isKnown(value)) {
      inside = button(short(inside, 40) || '""', () => narrow(column.name, column.text(row)), {
        class: "value",
        title: `show only ${column.name}=${inside}`,
      });
    }
    return element("td", { class: isBad ? "words bad" : classOf(column) }, inside);
  });
  shown.append(...cells);
  return isOpen
    ? [shown, element("tr", { class: "detail" }, element("td", { colspan: columns.length }, ...details(row)))]
    : [shown];
}

function narrow(name, value) {
  const field = document.getElementById("filter");
  const isPlain = /^[^\s"]+$/.test(value);
  field.value =
    `${field.value} ${isPlain ? `${name}=${value}` : `"${name}=${value.replace(/["\\]/g, "\\$&")}"`}`.trim();
  readAndUpdate();
}

function details(row) {
  const environment = (run) => (run.environment === null ? "not on record" : run.environment + 1);
  const runs = row.runs.map((run) => [
    path(run.directory),
    ...pick(run, "block started status"),
    run.rate && digits(run.rate),
    environment(run),
    run.reason,
  ]);
  return [
    element("pre", { class: "command" }, row.command || "the command is not on record"),
    plainTable(["directory", "block", "started", "status", "throughput", "environment", "reason"], runs),
  ];
}
