// The table of a model, which sorts, and what stands below a row.

const PAGE = 100; // rows of a table until more are asked for

const state = { filter: () => true, sort: null, down: false };

function drawTable(model) {
  const columns = model.columns.filter((column) => model.shown.has(column.name));
  const sorted = sortedRows(model);
  const head = element("tr", {}, ...columns.map((column) => heading(column)));
  const body = element("tbody", {}, ...sorted.slice(0, model.page).flatMap((row) => tableRow(model, row, columns)));
  const table = element("table", {}, element("thead", {}, head), body);
  const focused = model.table.contains(document.activeElement) ? document.activeElement.title : null;
  const frame = element("div", { class: "table", tabindex: 0, role: "region", "aria-label": model.title }, table);
  model.table.replaceChildren(frame);
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
  return element("th", { scope: "col", class: column.words ? "words" : null, "aria-sort": order }, sort);
}

/** The best first, the other way round, and back to the order of the ranks. */
function sortBy({ name, most }) {
  const first = Boolean(most);
  if (state.sort !== name) Object.assign(state, { sort: name, down: first });
  else if (state.down === first) state.down = !first;
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
    if (column.name === "status" && row.runs.some((run) => run.reason)) classes.push("bad");
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
    return element("td", { class: classes.join(" ").trim() || null }, inside);
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
  const environment = (run) => (run.environment === null ? "not on record" : `${run.environment + 1} below`);
  const runs = row.runs.map((run) => [
    ...pick(run, "directory block started status"),
    run.rate && digits(run.rate),
    environment(run),
    run.reason,
  ]);
  return [
    element("pre", { class: "command" }, row.command || "what was typed is not on record"),
    plainTable(["directory", "block", "started", "status", "throughput", "environment", "reason"], runs),
  ];
}
