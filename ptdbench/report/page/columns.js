// The columns of tables, and the filter, which speaks of them.

/** `name` is typed in the filter, `of` is what is compared and sorted, `text` what is shown; `most`: the largest is best. */
function columnsOf(unit) {
  const fixed = report.columns.map(({ name, head, field, scale, most, words }) => {
    const valueOf = (row) => (Array.isArray(row[field]) ? row[field][0] : row[field]);
    const of = (row) => (scale !== 1 && valueOf(row) ? scale * valueOf(row) : valueOf(row));
    const text = (row) => row.texts[name] ?? String(of(row));
    return { name, head: head.replace("{unit}", unit), of, text, most, words };
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
  column.text(row) === value || (value !== "" && column.of(row) === Number(value)) || column.of(row) === value;

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
