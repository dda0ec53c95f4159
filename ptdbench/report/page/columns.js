// The columns of tables, and the filter, which speaks of them.

/** `name` is typed in the filter, `of` is what is compared and sorted, `text` what is shown; `most`: the largest is best. */
function columnsOf(unit) {
  const fixed = [
    { name: "rank", head: "#", of: (row) => row.rank && row.rank[0], text: (row) => range(row.rank) },
    { name: "configuration", of: (row) => row.label, words: true },
    { name: "runs", of: (row) => row.runs.length },
    { name: "ranks", of: (row) => row.ranks },
    { name: "nodes", of: (row) => row.nodes },
    { name: "batch", of: (row) => row.batch },
    { name: "throughput", head: `${unit}/s`, of: (row) => row.rate, text: throughputText, most: true },
    { name: "ratio", head: "vs best", of: (row) => row.ratio, text: ratioText, most: true },
    { name: "step_ms", head: "step ms (p5-p95)", of: (row) => row.step && 1e3 * row.step, text: stepText },
    {
      name: "memory_mib",
      head: "memory",
      of: (row) => row.memory && row.memory / 2 ** 20,
      text: (row) => bytes(row.memory),
    },
    { name: "mfu", head: "MFU", of: (row) => row.mfu && 100 * row.mfu, text: (row) => percent(row.mfu), most: true },
    {
      name: "mfu_causal",
      head: "MFU causal",
      of: (row) => row.mfu_causal && 100 * row.mfu_causal,
      text: (row) => percent(row.mfu_causal),
      most: true,
    },
    {
      name: "of_ceiling",
      head: "of ceiling",
      of: (row) => row.of_ceiling && 100 * row.of_ceiling,
      text: (row) => percent(row.of_ceiling),
      most: true,
    },
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

const textOf = (column, row) => (column.text ? column.text(row) : String(column.of(row)));

// Options that the configuration, the batch and the ranks of a row tell.
const TOLD = ["parallel", "train.global_batch", "cluster.ranks_per_node"];

/** Columns with a figure, of words that are all alike none, and of a group whose choice differs the choice alone. */
function usualColumns(model) {
  const differ = (column) => new Set(model.rows.map(column.of)).size > 1;
  const chosen = new Set(
    model.columns.filter((column) => !column.name.includes(".") && differ(column)).map((column) => column.name),
  );
  return model.columns.filter((column) => {
    if (column.name === "runs") return model.rows.some((row) => row.runs.length > 1);
    if (column.name === "nodes") return model.rows.some((row) => row.nodes > 1);
    if (column.name !== "sweep" && !column.option) return model.rows.some((row) => isKnown(column.of(row)));
    const group = column.name.includes(".") ? column.name.split(".")[0] : null;
    return differ(column) && !TOLD.includes(column.name) && !chosen.has(group);
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
      if (value === "" || Number.isNaN(Number(value))) throw new Error(`${word}: ${value || "nothing"} is no number`);
      const rows = report.models.flatMap((model) => model.rows);
      if (!rows.some((row) => typeof column.of(row) === "number"))
        throw new Error(`${word}: ${name} is no number; try ${name}=`);
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
function columnCalled(typed) {
  const name = typed.endsWith("/s") ? "throughput" : typed; // tokens/s, samples/s
  const all = columnsOf("");
  const shared = Object.entries(report.common).map(([key, text]) => ({
    name: key,
    of: () => asNumber(text),
    text: () => text,
  }));
  const found = [...all, ...shared];
  const exact = found.find((column) => column.name === name || column.head === name);
  const ending = found.filter((column) => column.name.endsWith(`.${name}`));
  if (exact || ending.length === 1) return exact || ending[0];
  const like = (ending.length ? ending : found.filter((column) => column.name.includes(name))).slice(0, 5);
  const remedy = (like.length ? like : all).map((column) => column.name);
  throw new Error(
    `${name}: ${ending.length ? "several options end so" : "no option is called so"}; try ${remedy.join(", ")}`,
  );
}
