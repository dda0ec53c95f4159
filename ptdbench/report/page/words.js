"use strict";
// The data of the report, how its numbers are written, and elements of the page.

const report = JSON.parse(document.getElementById("data").textContent);

const isKnown = (value) => value !== null && value !== undefined;
const plainly = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // plotly reads marks

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Three significant digits, all digits before the point kept. */
function digits(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return grouped.format(value);
  if (size > 0 && size < 0.09995) return String(Number(value.toPrecision(3)));
  return value.toFixed(size >= 9.995 ? 1 : size >= 0.9995 || size === 0 ? 2 : 3);
}

/** The values of fields, which are named with spaces between them. */
const pick = (row, names) => names.split(" ").map((name) => row[name]);
const short = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

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
  return sentences.length
    ? element("ul", { class: "said" }, ...sentences.map((text) => element("li", {}, text)))
    : null;
}

const definitions = (texts) =>
  element("dl", {}, ...Object.entries(texts).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));

/** A path that breaks after slashes only. */
const path = (text) =>
  element("span", {}, ...text.split(/(?<=\/)/).flatMap((part) => [element("wbr"), element("span", { class: "part" }, part)]));

/** A table in a frame that scrolls, by keyboard too. */
const framed = (label, table) =>
  element("div", { class: "table", tabindex: 0, role: "region", "aria-label": label }, table);

const link = (id, text) => element("a", { href: `#${id}` }, text);

function plainTable(head, rows) {
  const line = (tag, cells) =>
    element("tr", {}, ...cells.map((cell) => element(tag, {}, cell instanceof Node ? cell : String(cell ?? ""))));
  return element(
    "table",
    {},
    element("thead", {}, line("th", head)),
    element("tbody", {}, ...rows.map((row) => line("td", row))),
  );
}
