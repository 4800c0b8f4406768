"use strict";
const HITS_WITHIN = 22;
const COLOUR = /(?:stroke|fill): (var\(--[a-z]+\)|#[0-9a-f]{6})/g;
const PLAIN = /var\(--(ink|soft|line|card)\)/;

// Values under the pointer.
const tip = document.body.appendChild(document.createElement("output"));
tip.id = "tip";
tip.hidden = true;
const nearest = (svg, event) => {
  const matrix = svg.getScreenCTM();
  if (!matrix) return null;
  const hidden = (svg.dataset.hidden ?? "").split(" ");
  let found = null, least = HITS_WITHIN;
  for (const [x, y, said, colour] of JSON.parse(svg.dataset.points)) {
    const across = matrix.a * x + matrix.e, up = matrix.d * y + matrix.f;
    const distance = Math.hypot(across - event.clientX, up - event.clientY);
    if (distance < least && !hidden.includes(colour)) [found, least] = [{ across, up, said }, distance];
  }
  return found;
};
const show = (event) => {
  const found = nearest(event.currentTarget, event);
  tip.hidden = found === null;
  if (found === null) return;
  tip.textContent = found.said;
  const left = Math.min(found.across + 12, document.documentElement.clientWidth - tip.offsetWidth - 4);
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, found.up - tip.offsetHeight - 12) + "px";
};

// Lines that a click on their name hides.
const colours = (group) => [...group.outerHTML.matchAll(COLOUR)].map((match) => match[1]).filter((found) => !PLAIN.test(found));
// In a legend a swatch stands before each name, at the end of a line the stroke that leads to its name.
const leads = (group, legend) => legend || (/-patch_/.test(group.id) && group.outerHTML.includes("fill: none"));
const named = (parent, legend) => {
  const found = [];
  let before = [];
  for (const group of parent.children) {
    if (!/-text_\d+$/.test(group.id)) { before.push(group); continue; }
    const colour = before.length && leads(before.at(-1), legend) ? colours(before.at(-1))[0] : undefined;
    if (colour) found.push({ colour, parts: [before.at(-1), group] });
    before = [];
  }
  return found;
};
const toggle = (svg, names, colour) => {
  const hidden = new Set((svg.dataset.hidden ?? "").split(" ").filter(Boolean));
  if (!hidden.delete(colour)) hidden.add(colour);
  svg.dataset.hidden = [...hidden].join(" ");
  const labels = new Set(names.flatMap((name) => name.parts));
  for (const axes of svg.querySelectorAll('g[id*="-axes_"]'))
    for (const group of axes.children)
      if (!labels.has(group) && !/-legend_/.test(group.id) && colours(group).includes(colour)) group.classList.toggle("gone", hidden.has(colour));
  for (const name of names) for (const part of name.parts) part.classList.toggle("off", hidden.has(name.colour));
};
for (const svg of document.querySelectorAll("svg[data-points]")) {
  for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, show);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  const legend = svg.querySelector('g[id*="-legend_"]');
  const axes = [...svg.querySelectorAll('g[id*="-axes_"]')];
  const all = legend ? named(legend, true) : axes.flatMap((each) => named(each, false));
  // Lines are told apart by their colour: one that two names share cannot be hidden alone.
  const names = all.filter((name) => all.filter((other) => other.colour === name.colour).length === 1);
  for (const name of names) for (const part of name.parts) {
    part.classList.add("name");
    part.addEventListener("click", () => toggle(svg, names, name.colour));
  }
}

// Columns that a click on their heading sorts: up, down, as they were.
const value = (row, place) => {
  const text = (row.cells[place].firstChild?.textContent ?? "").trim();
  // Labels may have numbers and hyphens in them.
  const number = place === 0 ? NaN : parseFloat(text.replaceAll(",", "").replace("−", "-").replace(/^[^\d+-]+/, ""));
  return { text, number: Number.isNaN(number) ? null : number };
};
const compare = (a, b) => {
  if (a.number !== null && b.number !== null) return a.number - b.number || a.text.localeCompare(b.text);
  return (a.number === null) - (b.number === null) || a.text.localeCompare(b.text, "en", { numeric: true });
};
for (const table of document.querySelectorAll(".table table")) {
  const body = table.tBodies[0], rows = [...body.rows];
  // A row whose label stands in the one above is nothing without it.
  if (rows.length < 2 || rows.some((row) => !row.cells[0].textContent.trim())) continue;
  [...table.tHead.rows[0].cells].forEach((heading, place) => {
    heading.classList.add("sorts");
    heading.tabIndex = 0;
    const sort = () => {
      const next = { ascending: "descending", descending: "none" }[heading.ariaSort] ?? "ascending";
      for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
      heading.ariaSort = next;
      const sign = next === "descending" ? -1 : 1;
      const order = next === "none" ? rows : [...rows].sort((a, b) => sign * compare(value(a, place), value(b, place)));
      body.append(...order);
    };
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
