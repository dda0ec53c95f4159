// The page: a section for each model, what failed, what other workloads found, and how to repeat it all.

function build() {
  const main = document.getElementById("main");
  report.models.forEach((model, place) => main.append(modelSection(model, place)));
  const failed = failures();
  if (failed) main.append(failed);
  report.others.forEach((other, place) => main.append(otherSection(other, place)));
  main.append(howToRepeat());
  document.querySelectorAll("h1, h2 > a").forEach(keepWordsWhole);
  document.getElementById("contents").append(...contents());
  const names = report.models.length
    ? [...columnsOf({}).map((column) => column.name), ...Object.keys(report.common)]
    : [];
  document.getElementById("names").append(...names.map((name) => element("option", { value: `${name}=` })));
  document.getElementById("filter").addEventListener("input", readAndUpdate);
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("theme").addEventListener("click", nextTheme);
  document.querySelectorAll("#filter, [for=filter]").forEach((part) => (part.hidden = !report.models.length));
}

/** Break a heading at spaces only: names of directories have hyphens, at which a browser would break them, too. */
function keepWordsWhole(heading) {
  const words = heading.textContent.split(" ").map((word) => element("span", {}, word));
  heading.replaceChildren(...words.flatMap((word) => [word, " "]).slice(0, -1));
}

/** Links to the sections, and to the figures of each model, which are hidden while these are. */
function contents() {
  const lines = report.models.map((model) => [link(model.id, model.name), ...model.figures.map((figure) => figure.link)]);
  const others = [...document.querySelectorAll("main > section:not([data-model])")];
  lines.push(others.map((section) => link(section.id, section.querySelector("h2").textContent)));
  return lines.map((line) => element("p", {}, ...line));
}

function section(id, title, attributes, ...inside) {
  return element("section", { id, ...attributes }, element("h2", {}, link(id, title)), ...inside);
}

function modelSection(model, place) {
  model.columns = columnsOf(model);
  model.shown = new Set(usualColumns(model).map((column) => column.name));
  model.page = PAGE;
  model.open = new Set();
  model.table = element("div", { class: "rows" });
  model.figures = FIGURES.map(({ id, title, about, draw, said }) =>
    figureElement(model.id.replace("table", id), title, about, draw, said ? said(model) : []),
  );
  const csv = button("CSV", () => downloadTable(model, model.id));
  return section(
    model.id,
    model.title,
    { "data-model": place },
    model.table,
    element("div", { class: "below" }, columnChoice(model), element("div", { class: "buttons" }, csv)),
    listed(model.remarks),
    ...model.figures.map((figure) => figure.element),
  );
}

/** All rows that the filter shows, with all options, and figures in the units of records. */
function downloadTable(model, name) {
  const fields = report.columns.map((column) => column.field).filter((field) => !["rank", "count"].includes(field));
  const plain = ["number", ...fields, ..."low high ratio_low ratio_high step_p5 step_p95 command".split(" ")];
  const heldOut = (row) => (isKnown(row.held_out) ? row.texts.held_out : null); // says which figure that is
  const made = (row) => [...(row.rank || [null, null]), row.runs.length, heldOut(row)];
  const options = Object.keys(report.options);
  const optionsOf = (row) => options.map((option) => report.options[option][row.number]);
  const rows = sortedRows(model).map((row) => [...plain.map((field) => row[field]), ...made(row), ...optionsOf(row)]);
  downloadCsv(name, [...plain, "best_rank", "worst_rank", "runs", "val", ...options], rows);
}

const nameAmongAll = (model, row) => (report.models.length > 1 ? `${model.name}: ${row.name}` : row.name);

function failures() {
  const ofRow = (row, name) =>
    row.runs
      .filter((run) => run.failed)
      .map((run) => [name, run.status, run.reason, path(run.directory), row.command]);
  const failed = report.models.flatMap((model) => model.rows.flatMap((row) => ofRow(row, nameAmongAll(model, row))));
  failed.push(...report.others.flatMap((other) => ofRow(other, other.title)));
  if (!failed.length) return null;
  const shown = failed.slice(0, MOST_DATA);
  const table = plainTable(["configuration", "status", "reason", "directory", "command"], shown);
  const left = failed.length - shown.length;
  const rest = left ? element("p", {}, `and ${left} more, in the rows of the tables`) : null;
  return section("failed", `Failed runs (${failed.length})`, {}, framed("Failed runs", table), rest);
}

function otherSection(other, place) {
  const command = other.command ? element("pre", { class: "command" }, other.command) : null;
  const [run] = other.runs;
  const where = run.environment === null ? "" : `, environment ${run.environment + 1}`;
  return section(
    `other-${place + 1}`,
    other.title,
    { "data-other": place },
    element("p", { class: "about" }, path(run.directory), where),
    command,
    folded("terminal output", other.text.split("\n").length <= 40, element("pre", { tabindex: 0 }, other.text)),
  );
}

const folded = (title, isOpen, inside) =>
  element("details", { open: isOpen ? "" : null }, element("summary", {}, title), inside);

function howToRepeat() {
  const titles = Object.keys(report.environments);
  const environments = titles.map((title) => folded(title, titles.length === 1, definitions(report.environments[title])));
  const common = Object.keys(report.common).length
    ? folded("options common to all rows", false, definitions(report.common))
    : null;
  return section("repeat", "Commands and environments", {}, commands(), common, ...environments);
}

/** What to type for each configuration; it is made when it is looked at, or printed. */
function commands() {
  const named = report.models.flatMap((model) => model.rows.map((row) => ({ ...row, name: nameAmongAll(model, row) })));
  const rows = named.filter((row) => row.command);
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

let latest = 0;

/** Draw all that the filter shows: tables at once, figures one after the other, so that the page answers meanwhile. */
async function update() {
  const own = ++latest;
  const rows = report.models.map(sortedRows);
  report.models.forEach(drawTable);
  const count = rows.reduce((sum, of) => sum + of.length, 0);
  const total = report.models.reduce((sum, model) => sum + model.rows.length, 0);
  const found = document.getElementById("found");
  state.count = total ? `${count} of ${total} configurations` : "";
  found.textContent = state.count;
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

/** Draw what the filter shows; while it means nothing, the field says why and the tables stay, and say so. */
function readAndUpdate() {
  clearTimeout(waiting);
  const field = document.getElementById("filter");
  let problem = null;
  try {
    state.filter = readFilter(field.value);
    waiting = setTimeout(update, 150);
  } catch (error) {
    problem = error.message;
    document.getElementById("found").textContent = `${problem} (still shown: ${state.count})`;
  }
  field.setAttribute("aria-invalid", String(problem !== null));
}

const THEMES = { "": "system", light: "light", dark: "dark" };

function nextTheme() {
  const names = Object.keys(THEMES);
  const root = document.documentElement;
  const next = names[(names.indexOf(root.dataset.theme || "") + 1) % names.length];
  root.dataset.theme = next;
  document.getElementById("theme").textContent = `theme: ${THEMES[next]}`;
}

build();
document.getElementById(location.hash.slice(1))?.scrollIntoView();
update();
