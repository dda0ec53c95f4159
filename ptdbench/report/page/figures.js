// Figures on the page: which there are, how they are drawn again, and what downloads.

const FIGURES = [
  {
    id: "throughput",
    title: "Throughput",
    about: "Geometric mean over runs, with its 95% interval if there are at least three. Hatched: predicted.",
    draw: drawThroughput,
  },
  {
    id: "phases",
    title: "Step time by phase",
    about: "Mean over ranks. Patterned phases are spent waiting.",
    draw: drawPhases,
    said: (model) => model.why,
  },
  {
    id: "schedule",
    title: "Pipeline schedule of a step",
    about:
      "When each rank computes which micro-batch, from the trace of the median run. Numbers are micro-batches, " +
      "after their stage on ranks with several stages.",
    draw: drawSchedules,
    said: (model) => model.schedules.flatMap((schedule) => schedule.lines),
  },
  {
    id: "scaling",
    title: "Scaling",
    about: "Strong: constant global batch; weak: constant batch per rank. Dotted: linear scaling from the first point.",
    draw: (model) => drawScaling(model, report.models.flatMap(sortedRows)),
  },
  {
    id: "memory",
    title: "Memory vs throughput",
    about: "Upper left is better. On the dotted Pareto front, no other row is both faster and smaller. Hollow: predicted.",
    draw: drawMemory,
  },
  {
    id: "kinds",
    title: "Memory by kind",
    about: "Memory allocated by torch at the peak of a step.",
    draw: drawKinds,
  },
  {
    id: "steps",
    title: "Step times",
    about: "Slowest rank, including warm-up; repeats show the median run.",
    draw: (model, rows) => bySteps(model, rows, "seconds", 1e3, "ms", { rangemode: "tozero" }),
  },
  {
    id: "losses",
    title: "Losses",
    about: "Layouts of the same training should coincide; repeats show the median run.",
    draw: (model, rows) => bySteps(model, rows, "loss", 1, "loss", {}),
  },
];

/** A figure and its element, which is hidden while `draw` has nothing to show. */
function figureElement(id, title, about, draw, said = []) {
  const plot = element("div", { class: "plot", "data-figure": id, role: "img", "aria-label": `${title}. ${about}` });
  const note = element("p", { class: "about" }, about);
  const data = element("details", {}, element("summary", {}, "data"));
  const made = { plot, draw, drawn: null, about, note, data, link: link(id, title) };
  made.link.hidden = true;
  data.addEventListener("toggle", () => fillData(made));
  const buttons = element(
    "div",
    { class: "buttons" },
    button("SVG", () => downloadImage(made, id, "svg")),
    button("PNG", () => downloadImage(made, id, "png")),
    button("CSV", () => downloadCsv(id, made.drawn.head, made.drawn.rows)),
  );
  made.element = element(
    "figure",
    { id, hidden: "" },
    element("div", { class: "head" }, element("h3", {}, link(id, title)), buttons),
    note,
    plot,
    listed(said),
    data,
  );
  return made;
}

async function drawFigure(made, ...shown) {
  let drawn = null;
  try {
    drawn = made.draw(...shown);
  } catch (error) {
    console.error(made.plot.dataset.figure, error); // the other figures are drawn all the same
  }
  const isNew = !made.drawn;
  made.drawn = drawn;
  made.element.hidden = made.link.hidden = !drawn;
  if (!drawn) return;
  if (isNew && location.hash === `#${made.element.id}`) made.element.scrollIntoView();
  made.note.textContent = drawn.note ? `${made.about} Shown: ${drawn.note}.` : made.about;
  await Plotly.react(made.plot, drawn.traces, drawn.layout, { displayModeBar: false, responsive: true });
  if (made.data.open) fillData(made);
}

const MOST_DATA = 2000;

function fillData(made) {
  const rows = made.drawn.rows.slice(0, MOST_DATA);
  const rest = made.drawn.rows.length - rows.length;
  const table = plainTable(made.drawn.head, rows);
  made.data.replaceChildren(
    made.data.firstChild,
    framed(`data of ${made.element.id}`, table),
    rest > 0 ? `and ${rest} more rows in the CSV` : "",
  );
}

function downloadImage(made, name, format) {
  const { offsetWidth: width, offsetHeight: height } = made.plot;
  return Plotly.downloadImage(made.plot, { format, filename: name, width, height, scale: format === "png" ? 2 : 1 });
}

function downloadCsv(name, head, rows) {
  const cell = (value) => {
    const written = isKnown(value) ? String(value) : "";
    const text = /^[=+\-@\t]/.test(written) && isNaN(written) ? `'${written}` : written; // no formula of a spreadsheet
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [head, ...rows].map((row) => row.map(cell).join(","));
  const address = URL.createObjectURL(new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" }));
  element("a", { href: address, download: `${name}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
