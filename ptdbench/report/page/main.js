// The page: a section for each model, what failed, what other workloads found, and how to repeat it all.

function build() {
  const main = document.getElementById("main");
  report.models.forEach((model, place) => main.append(modelSection(model, place)));
  const failed = failures();
  if (failed) main.append(failed);
  report.others.forEach((other, place) => main.append(otherSection(other, place)));
  main.append(howToRepeat());
  document.querySelectorAll("h1, h2").forEach(keepWordsWhole);
  const names = report.models.length
    ? [...columnsOf("").map((column) => column.name), ...Object.keys(report.common)]
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

function modelSection(model, place) {
  const suffix = place ? `-${place + 1}` : "";
  model.columns = columnsOf(model.unit);
  model.shown = new Set(usualColumns(model).map((column) => column.name));
  model.page = PAGE;
  model.open = new Set();
  model.table = element("div", {});
  model.figures = FIGURES.map(({ id, title, about, draw, said }) =>
    figureElement(`${id}${suffix}`, title, about, draw, said ? said(model) : []),
  );
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
  const ofPlans = report.columns.map((column) => column.field).filter((field) => field.startsWith("plan_"));
  const plain =
    "number name sweep status rate low high ratio ratio_low ratio_high step step_p5 step_p95 memory reserved mfu " +
    "mfu_causal of_ceiling joules loss held_out ranks nodes batch command " +
    ofPlans.join(" ");
  const heldOut = (row) => (isKnown(row.held_out) ? row.texts.held_out : null); // says which figure that is
  const made = (row) => [...(row.rank || [null, null]), row.runs.length, heldOut(row)];
  const options = Object.keys(report.options);
  const optionsOf = (row) => options.map((option) => report.options[option][row.number]);
  const rows = sortedRows(model).map((row) => [...pick(row, plain), ...made(row), ...optionsOf(row)]);
  downloadCsv(name, [...plain.split(" "), "best_rank", "worst_rank", "runs", "val", ...options], rows);
}

function failures() {
  const failed = [...report.models.flatMap((model) => model.rows), ...report.others].flatMap((row) =>
    row.runs
      .filter((run) => run.failed)
      .map((run) => [row.name || row.title, run.status, run.reason, run.directory, row.command]),
  );
  if (!failed.length) return null;
  const shown = failed.slice(0, MOST_DATA);
  const table = plainTable(["configuration", "status", "reason", "directory", "command"], shown);
  const left = failed.length - shown.length;
  const rest = left ? element("p", {}, `and ${left} more, in the rows of the tables`) : null;
  return element(
    "section",
    { id: "failed" },
    element("h2", {}, `Runs that are not ok (${failed.length})`),
    element("div", { class: "table" }, table),
    rest,
  );
}

function otherSection(other, place) {
  other.figures = other.curves.map((curve, number) =>
    figureElement(`other-${place + 1}-${number + 1}`, curve.title, "", () => drawCurves(curve)),
  );
  const command = other.command ? element("pre", { class: "command" }, other.command) : null;
  const [run] = other.runs;
  const where = `${run.directory}${run.environment === null ? "" : `, environment ${run.environment + 1} below`}`;
  return element(
    "section",
    { "data-other": place },
    element("h2", {}, other.title),
    element("p", { class: "about" }, where),
    command,
    folded("as in the terminal", other.text.split("\n").length <= 40, element("pre", {}, other.text)),
    ...other.figures.map((figure) => figure.element),
  );
}

const folded = (title, isOpen, inside) =>
  element("details", { open: isOpen ? "" : null }, element("summary", {}, title), inside);

function howToRepeat() {
  const isAlone = report.environments.length === 1;
  const environments = report.environments.map(({ title, values }, place) =>
    folded(`environment ${place + 1}: ${title}`, isAlone, definitions(values)),
  );
  const common = Object.keys(report.common).length
    ? folded("options common to all rows", false, definitions(report.common))
    : null;
  const heading = element("h2", {}, "How to reproduce it");
  return element("section", { id: "repeat" }, heading, commands(), common, ...environments);
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

function readAndUpdate() {
  clearTimeout(waiting);
  try {
    state.filter = readFilter(document.getElementById("filter").value);
  } catch (error) {
    const found = document.getElementById("found");
    found.classList.add("wrong");
    found.textContent = `${error.message} (still shown: ${state.count})`;
    return;
  }
  waiting = setTimeout(update, 150);
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
report.others.forEach((other) => other.figures.forEach((figure) => drawFigure(figure)));
update();
