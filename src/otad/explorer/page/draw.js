"use strict";
// How things are drawn. All text goes through textContent, so that no name can be read as HTML.

const PALETTE = ["#2f7ed8", "#e4812f", "#2aa876", "#d1495b", "#8a63d2", "#a0714f", "#d66fb0", "#7f8c8d", "#b5a02a", "#22a7c4"];
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shape(tag, attributes, title) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (title !== undefined) node.append(Object.assign(shape("title", {}), { textContent: title }));
  return node;
}

function swatch(color) {
  const mark = make("i");
  mark.style.background = color;
  return mark;
}

function number(value, digits = 3) {
  return value === null || value === undefined ? "none" : String(Number(value.toPrecision(digits)));
}

// Lengths keep their three digits, so that 1.00 does not read as exactly one.
const measure = (value) => (value < 100 ? value.toPrecision(3) : number(value));
const signed = (value) => (value === null ? "none" : (value > 0 ? "+" : "") + number(value));
const percent = (value) => (100 * value).toFixed(1) + "%";

// The setup of the page knows the names and colors of answers.
const nameOf = (setup, answer) =>
  answer === null ? "no answer" : setup.classes ? setup.classes[answer] : number(answer, 5);

function valueRange(setup) {
  const values = setup.map.points.map((point) => point[2]);
  return [Math.min(...values), Math.max(...values)];
}

function colorOf(setup, answer) {
  if (answer === null) return "var(--unsure)";
  if (setup.classes) return PALETTE[answer] || `hsl(${(answer * 137.5) % 360} 60% 50%)`;
  const [low, high] = valueRange(setup);
  const share = Math.min(1, Math.max(0, (answer - low) / (high - low || 1)));
  return `hsl(${Math.round(215 + 170 * share) % 360} 65% 52%)`;
}

// An image (C,H,W), as a flat list, on a canvas of its own size.
function drawPixels(canvas, values, setup) {
  const [channels, height, width] = setup.shape, [low, high] = setup.levels, plane = height * width;
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  for (let place = 0; place < plane; place++) {
    for (let color = 0; color < 3; color++) {
      const value = values[place + (channels === 3 ? color * plane : 0)];
      image.data[4 * place + color] = Math.round((255 * (value - low)) / (high - low || 1));
    }
    image.data[4 * place + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

function drawMap(setup, found, step) {
  const svg = byId("map"), points = setup.map.points, place = found && found.places[step];
  const near = found ? found.neighbors[step].map(([index, weight]) => [found.points[index], weight]) : [];
  const known = found ? Object.values(found.points).map((point) => point.place) : [];
  const all = [...points, ...(found ? found.places : []), ...known], ring = found ? found.certificate.ring || 0 : 0;
  if (ring) for (const side of [-ring, ring]) all.push(found.places[0].map((value) => value + side));
  const ends = [0, 1].map((axis) => all.map((point) => point[axis]));
  const lows = ends.map((end) => Math.min(...end)), highs = ends.map((end) => Math.max(...end));
  const scale = Math.min(...[376, 296].map((size, axis) => size / (highs[axis] - lows[axis] || 1)));
  const middle = lows.map((low, axis) => (low + highs[axis]) / 2);
  const at = (point) => [200 + scale * (point[0] - middle[0]), 160 - scale * (point[1] - middle[1])];
  const dot = (point, radius, more, title) => {
    const [cx, cy] = at(point);
    return shape("circle", { cx, cy, r: radius, ...more }, title);
  };
  svg.replaceChildren(...points.map((point) => dot(point, 3, { fill: colorOf(setup, point[2]), opacity: 0.45 })));
  if (!found) return;
  const start = found.places[0];
  if (ring) svg.append(dot(start, Math.max(2, scale * ring), { fill: "var(--accent)", "fill-opacity": 0.12, stroke: "var(--accent)", "stroke-width": 1.5, class: "ring" }, "The certified radius"));
  const proved = provedSteps(found);
  const line = (from, to, more) => {
    const [x1, y1] = at(from), [x2, y2] = at(to);
    svg.append(shape("line", { x1, y1, x2, y2, ...more }));
  };
  for (const [point, weight] of near) {
    if (weight) line(place, point.place, { stroke: "var(--soft)", "stroke-width": 0.5 + 2.5 * weight, opacity: 0.6 });
  }
  line(start, found.places.at(-1), { stroke: "var(--ink)", "stroke-width": 1.6, "stroke-dasharray": "4 3" });
  if (proved > 1) line(start, found.places[proved - 1], { stroke: "var(--accent)", "stroke-width": 3.5, "stroke-linecap": "round" });
  for (const [point, weight] of near) {
    const radius = 3.2 + 4 * (weight || 0);
    svg.append(dot(point.place, radius, { fill: colorOf(setup, point.label), stroke: "var(--ink)", "stroke-width": 1.1 }, `${nameOf(setup, point.label)}, ${point.title}`));
  }
  svg.append(dot(start, 3, { fill: "var(--paper)", stroke: "var(--ink)", "stroke-width": 1.6 }));
  svg.append(dot(place, 6, { fill: colorOf(setup, found.answer[step]), stroke: "var(--paper)", "stroke-width": 2, class: "query" }, "The input at this step"));
}

// Distances from the input, in every direction alike: the proved ring, the first other answer, and
// the place of the slider.
function drawDial(setup, found, step) {
  byId("facts").classList.toggle("value", !setup.classes);
  byId("dial").toggleAttribute("hidden", !setup.classes);
  const svg = byId("dial"), { radius, everywhere } = found.certificate, furthest = found.distance.at(-1) || 1;
  const size = Math.max(furthest, radius || 0) * 1.04, scale = 54 / size;
  const circle = (distance, more, title) => shape("circle", { r: scale * distance, fill: "none", ...more }, title);
  svg.replaceChildren(circle(size, { stroke: "var(--line)", fill: everywhere ? "var(--pale)" : "none" }));
  if (radius) svg.append(circle(radius, { fill: "var(--pale)", stroke: "var(--accent)", "stroke-width": 2.5, class: "ring" }, `Proved within ${measure(radius)}`));
  const flip = found.answer_flip;
  if (flip !== null) svg.append(circle(found.distance[flip], { stroke: "var(--wrong)", "stroke-width": 1.5, "stroke-dasharray": "3 3" }, `Another answer at ${measure(found.distance[flip])}`));
  const along = (distance) => ({ x: scale * distance * Math.SQRT1_2, y: -scale * distance * Math.SQRT1_2 });
  const end = along(furthest), here = along(found.distance[step]);
  svg.append(shape("line", { x1: 0, y1: 0, x2: end.x, y2: end.y, stroke: "var(--soft)", "stroke-width": 1 }));
  svg.append(shape("circle", { r: 2.2, fill: "var(--ink)" }));
  svg.append(shape("circle", { cx: here.x, cy: here.y, r: 4.5, fill: colorOf(setup, found.answer[step]), stroke: "var(--paper)", "stroke-width": 1.5 }));
}

const provedSteps = (found) => {
  const { radius, everywhere } = found.certificate;
  return everywhere ? found.distance.length : found.distance.filter((distance) => distance < (radius || 0)).length;
};

// One band of color for each step of the path.
function drawTrack(node, colors) {
  const count = colors.length;
  const stops = colors.map((color, step) => `${color} ${(100 * step) / count}% ${(100 * (step + 1)) / count}%`);
  node.style.background = `linear-gradient(to right, ${stops.join(",")})`;
}

function drawTracks(setup, found) {
  const proved = provedSteps(found), count = found.distance.length;
  for (const id of ["proved-name", "proved-track"]) byId(id).hidden = !setup.classes;
  drawTrack(byId("proved-track"), found.distance.map((_, step) => (step < proved ? "var(--accent)" : "var(--line)")));
  drawTrack(byId("answer-track"), found.answer.map((answer) => colorOf(setup, answer)));
  drawTrack(byId("bare-track"), found.undefended.map((answer) => colorOf(setup, answer)));
  const mark = byId("flip-mark"), label = mark.firstElementChild, flip = found.answer_flip;
  mark.hidden = flip === null;
  if (flip === null) return;
  const share = flip / count;
  label.style.left = `${100 * share}%`;
  label.className = share > 0.6 ? "left" : "";
  label.textContent = `${nameOf(setup, found.answer[flip])} from ${measure(found.distance[flip])}`;
}

function drawBars(setup, found, step) {
  const table = byId("bars");
  byId("chances").hidden = !found.shown;
  if (!found.shown) return;
  const meter = (share, color) => {
    const fill = make("u"), cell = make("td", {}, make("div", { class: "meter" }, make("b", {}, fill), make("span", {}, percent(share))));
    fill.style.width = percent(share);
    fill.style.background = color;
    return cell;
  };
  const head = make("thead", {}, make("tr", {}, ...["class", "defended", "undefended"].map((name) => make("th", { scope: "col" }, name))));
  const body = make("tbody");
  found.shown.forEach((label, place) => {
    const color = colorOf(setup, label), name = make("th", { scope: "row", title: nameOf(setup, label) }, swatch(color), nameOf(setup, label));
    const shares = [found.probabilities, found.undefended_probabilities].map((rows) => meter(rows[step][place], color));
    body.append(make("tr", {}, name, ...shares));
  });
  table.replaceChildren(table.caption, head, body);
}

function drawPoints(setup, found, step, before) {
  const answer = found.answer[step], isRow = setup.kind === "row" && found.columns.length > 0;
  const has = (point) => (point.row !== undefined || point.picture !== undefined);
  const list = byId("points"), rows = byId("rows"), near = found.neighbors[step];
  const earlier = new Set(before === null ? near.map(([index]) => index) : found.neighbors[before].map(([index]) => index));
  const looks = (index, weight, point) =>
    [point.label === answer || !setup.classes ? "" : "differs", weight === 0 ? "idle" : "", earlier.has(index) ? "" : "new"].join(" ");
  const asTable = isRow && near.every(([index]) => has(found.points[index]));
  list.hidden = asTable;
  rows.hidden = !asTable;
  if (asTable) return drawRows(setup, found, step, looks);
  list.replaceChildren(...near.map(([index, weight, contribution, distance]) => {
    const point = found.points[index], name = nameOf(setup, point.label), fill = make("i");
    const picture = point.picture
      ? make("img", { class: "pixels", src: point.picture, alt: `training point labeled ${name}`, title: point.title })
      : make("div", { class: "no-picture" }, point.title);
    fill.style.width = percent(weight || 0);
    const facts = { weight: weight === null ? "none" : weight.toFixed(3), contribution: signed(contribution), distance: measure(distance) };
    const listed = Object.entries(facts).map(([key, value]) => make("div", {}, make("dt", {}, key), make("dd", {}, value)));
    return make("li", { class: looks(index, weight, point) }, picture, make("b", {}, name), make("span", { class: "bar" }, fill), make("dl", {}, ...listed));
  }));
}

function drawRows(setup, found, step, looks) {
  const names = found.columns.map((column) => columnName(setup, column)), here = inputAt(setup, found, step);
  const head = [setup.classes ? "label" : "value", "weight", "contribution", ...names].map((name) => make("th", { scope: "col" }, name));
  const query = [make("th", { scope: "row" }, "input here"), make("td"), make("td"), ...found.columns.map((column) => make("td", {}, number(here[column], 4)))];
  const body = make("tbody", {}, make("tr", { class: "query" }, ...query));
  for (const [index, weight, contribution] of found.neighbors[step]) {
    const point = found.points[index], name = make("th", { scope: "row", title: point.title }, make("b", {}, nameOf(setup, point.label)));
    const cells = [weight === null ? "none" : weight.toFixed(3), signed(contribution), ...point.row.map((value) => number(value, 4))];
    body.append(make("tr", { class: looks(index, weight, point) }, name, ...cells.map((cell) => make("td", {}, cell))));
  }
  byId("rows").className = "scroll rows";
  byId("rows").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...head)), body));
}

function columnName(setup, column) {
  for (const field of setup.fields) {
    if (field.at === column) return field.name;
    const place = field.choice ? field.choice.indexOf(column) : -1;
    if (place >= 0) return `${field.name} = ${field.options[place]}`;
  }
  return String(column);
}

// The path is a straight line, cut at the bounds: the browser computes its inputs itself.
function inputAt(setup, found, step) {
  const time = found.times[step], [low, high] = setup.bounds || [-Infinity, Infinity];
  return found.input.map((value, place) => Math.min(high, Math.max(low, value + time * (found.end[place] - value))));
}

function drawMoved(setup, found, step) {
  const here = inputAt(setup, found, step);
  if (setup.kind === "image") return drawPixels(byId("moving"), here, setup);
  const order = found.end.map((value, place) => [Math.abs(value - found.input[place]) / (setup.units[place] || 1), place]);
  order.sort((one, other) => other[0] - one[0]);
  const lines = order.slice(0, 5).map(([, place]) =>
    make("tr", {}, make("th", { scope: "row" }, columnName(setup, place)), make("td", {}, number(found.input[place], 4)), make("td", {}, number(here[place], 4))));
  const head = ["what the attack changes", "input", "here"].map((name) => make("th", { scope: "col" }, name));
  const figure = byId("moving-figure");
  figure.className = "moving table";
  figure.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines)));
}
