// Shows the value under the pointer in every chart; keys left and right move it when a chart has the focus.
"use strict";

const utc = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC";

function pointsOf(area) {
  if (!area.points) {
    area.points = area.dataset.points.split(" ").filter(Boolean).map((pair) => pair.split(":").map(Number));
  }
  return area.points;
}

function showAt(area, share) {
  const at = share * Number(area.dataset.span);
  const points = pointsOf(area);
  if (points.length === 0) return;
  let best = 0;
  for (let i = 1; i < points.length; i += 1) {
    if (Math.abs(points[i][0] - at) < Math.abs(points[best][0] - at)) best = i;
  }
  const [seconds, value] = points[best];
  area.place = best;
  const output = area.querySelector("output");
  output.textContent = `${value} ${area.dataset.unit} at ${utc(Number(area.dataset.first) + seconds)}`;
  output.style.left = `${Math.min(70, (100 * seconds) / Number(area.dataset.span))}%`;
}

document.addEventListener("pointermove", (event) => {
  const area = event.target.closest && event.target.closest(".area");
  if (!area) return;
  const box = area.getBoundingClientRect();
  showAt(area, (event.clientX - box.left) / box.width);
});

document.addEventListener("keydown", (event) => {
  const area = document.activeElement;
  if (!area || !area.classList.contains("area")) return;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  const points = pointsOf(area);
  const next = Math.min(points.length - 1, Math.max(0, (area.place || 0) + step));
  if (points[next]) showAt(area, points[next][0] / Number(area.dataset.span));
  event.preventDefault();
});
