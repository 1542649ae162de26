// The curves: show the values at the pointer or the arrow keys' position, with one cursor in all curves; drag to zoom.
// The page contains each point only once, in the paths: this script reads the values from there.
"use strict";

const WIDTH = 1000;
const HEIGHT = 220;
const utc = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC";
const areas = () => [...document.querySelectorAll(".area")];

function linesOf(area) {
  if (!area.lines) {
    const low = Number(area.dataset.low);
    const high = Number(area.dataset.high);
    area.lines = [...area.querySelectorAll("path.line")].map((path) => ({
      name: path.dataset.name,
      points: [...path.getAttribute("d").matchAll(/[ML]([\d.]+) ([\d.]+)/g)].map(([, x, y]) => [
        Number(x),
        high - (Number(y) / HEIGHT) * (high - low),
      ]),
    }));
  }
  return area.lines;
}

// The visible part: the drawing's x from start to start + width.
function viewOf(area) {
  const [start, , width] = area.querySelector("svg").getAttribute("viewBox").split(" ").map(Number);
  return { start, width };
}

const timeAt = (area, x) => Number(area.dataset.first) + (x / WIDTH) * Number(area.dataset.span);

function nearest(points, x) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle;
    else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? low : high;
}

const figure = (value) => String(Number(value.toPrecision(4)));

function showAt(area, x) {
  const lines = linesOf(area).filter((line) => line.points.length > 0);
  if (lines.length === 0) return;
  const place = nearest(lines[0].points, x);
  const at = lines[0].points[place][0];
  area.place = place;
  const values = lines.map((line) => {
    const value = `${figure(line.points[nearest(line.points, at)][1])} ${area.dataset.unit}`.trim();
    return lines.length > 1 ? `${line.name} ${value}` : value;
  });
  const output = area.querySelector("output");
  output.textContent = `${values.join(", ")} at ${utc(timeAt(area, at))}`;
  output.classList.add("on");
  for (const other of areas()) {
    other.querySelector(".cursor").setAttribute("d", `M${at} 0V${HEIGHT}`);
  }
}

function labelTimes(area, start, width) {
  const labels = area.parentElement.querySelectorAll(".x span");
  const seconds = (width / WIDTH) * Number(area.dataset.span);
  const [from, to] = seconds < 172800 ? [11, seconds < 3600 ? 19 : 16] : [5, 16];
  labels.forEach((label, number) => {
    const moment = timeAt(area, start + (width * number) / (labels.length - 1));
    label.textContent = new Date(moment * 1000).toISOString().slice(from, to).replace("T", " ");
  });
}

// All curves share one time axis, so they zoom together. The live page answers the event with finer data.
function zoom(start, end) {
  const left = Math.max(0, start);
  const width = Math.min(WIDTH, end) - left;
  if (width < 2) return;
  for (const area of areas()) {
    area.querySelector("svg").setAttribute("viewBox", `${left} 0 ${width} ${HEIGHT}`);
    labelTimes(area, left, width);
  }
  const [area] = areas();
  const whole = left === 0 && width === WIDTH;
  const detail = whole ? null : { from: timeAt(area, left), to: timeAt(area, left + width) };
  document.dispatchEvent(new CustomEvent("zoomed", { detail }));
}

function xOf(area, event) {
  const box = area.getBoundingClientRect();
  const { start, width } = viewOf(area);
  return start + (Math.min(Math.max(event.clientX - box.left, 0), box.width) / box.width) * width;
}

const areaOf = (event) => event.target.closest && event.target.closest(".area");
let drag = null;

document.addEventListener("pointerdown", (event) => {
  const area = areaOf(event);
  if (area && event.button === 0) drag = { area, from: xOf(area, event) };
});

document.addEventListener("pointermove", (event) => {
  const area = drag ? drag.area : areaOf(event);
  if (!area || !area.isConnected) return;
  const x = xOf(area, event);
  showAt(area, x);
  if (drag && Math.abs(x - drag.from) > 1) {
    const [left, right] = [Math.min(drag.from, x), Math.max(drag.from, x)];
    area.querySelector(".cursor").setAttribute("d", `M${left} 0H${right}V${HEIGHT}H${left}Z`);
    getSelection().removeAllRanges();
  }
});

document.addEventListener("pointerup", (event) => {
  const held = drag;
  drag = null;
  if (!held || !held.area.isConnected) return;
  const to = xOf(held.area, event);
  const { width } = viewOf(held.area);
  if (Math.abs(to - held.from) > width / 50) zoom(Math.min(held.from, to), Math.max(held.from, to));
});

document.addEventListener("dblclick", (event) => {
  if (areaOf(event)) zoom(0, WIDTH);
});

document.addEventListener("keydown", (event) => {
  const area = document.activeElement;
  if (!area || !area.classList.contains("area") || event.ctrlKey || event.metaKey) return;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
  const [line] = linesOf(area).filter((each) => each.points.length > 0);
  if (!line || (!step && !factor)) return;
  const place = Math.min(line.points.length - 1, Math.max(0, (area.place || 0) + (step || 0)));
  const [x] = line.points[place];
  if (step) showAt(area, x);
  else {
    const width = Math.min(WIDTH, viewOf(area).width * factor);
    const left = Math.min(WIDTH - width, Math.max(0, x - width / 2));
    zoom(left, left + width);
  }
  event.preventDefault();
});
