// Draws the page from one JSON document: embedded in the file, or asked for from the port every ten seconds.
"use strict";

const KEY = "miner-guard token";
const EVERY_MS = 10000;
const STALE_S = 60;
const FIRST_ROWS = 8;
const HUES = [0, 138, 275, 52, 190, 328, 105, 242, 20, 158, 295, 72, 210, 348, 125, 262];
const BLOCKED = "blocked by the gate";
const SHADES = { hang: "--hang", restart: "--bad", NaN: "--nan", [BLOCKED]: "--warn" };
const saved = JSON.parse(document.getElementById("data").textContent);
const $ = (query) => document.querySelector(query);
const when = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ");
// A time beside another one; with its date only if they are of different days.
const apart = (seconds, other) => when(seconds).slice(when(seconds).slice(0, 10) === when(other).slice(0, 10) ? 11 : 0);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const figure = (value) => String(Number(value.toPrecision(4)));
const amount = (value, unit, digits = 0) =>
  typeof value === "number" ? `${value.toLocaleString("en-US", { maximumFractionDigits: digits })} ${unit}` : "unknown";

// Every text goes through here: it becomes text, never markup.
function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

const coded = (text) => text.split("`").map((part, place) => (place % 2 ? el("code", {}, part) : part));
const runbookLink = (page, event) => (event in page.runbook ? el("a", { href: `#runbook-${event}` }, event) : event);

function stateSection(page) {
  const { kind, line, age, cause, earning, next, event } = page.state;
  const more = event ? el("small", {}, " (runbook: ", runbookLink(page, event), ")") : null;
  return el("section", { class: `state ${kind}`, "aria-label": "State" },
    el("h1", {}, line, age ? el("small", {}, ` (${age})`) : null),
    el("dl", {}, el("dt", {}, "Why"), el("dd", {}, cause), el("dt", {}, "Earning"), el("dd", {}, earning), el("dt", {}, "Next step"), el("dd", {}, coded(next), more)));
}

function aboutLine(page) {
  const { run, name, host, first, last, now } = page.about;
  const log = first === null ? "no events in the log yet" : `log ${when(first)} to ${when(last)} UTC`;
  const words = [name, host, run && `run ${run}`, log].filter(Boolean).join(" · ");
  // The live page has its clock beside the ranges.
  const clock = saved && now !== null ? [el("b", {}, `${when(now)} UTC`), " · "] : [];
  return el("p", { class: "soft about" }, clock, words);
}

// Only the live page knows them.
function othersSection(page) {
  if (!(page.others || []).length) return null;
  const rows = page.others.map(({ name, state, kind, url }) =>
    el("li", {}, url ? el("a", { href: url }, name) : el("b", {}, name), ": ", el("span", { class: kind }, state)));
  return el("nav", { class: "others", "aria-label": "Other miners on this machine" }, "Also on this machine: ", el("ul", {}, rows));
}

function weekSection(page) {
  if (!page.week) return null;
  const { cells, start, end, cell_s: width, words, legend, how } = page.week;
  const drawn = cells.map((kind, place) =>
    el("i", { class: kind, title: `${when(start + place * width).slice(0, 16)} UTC: ${legend[kind]}` }));
  const strip = el("div", { class: "strip", role: "img", "aria-label": `States, ${words}` }, drawn);
  strip.style.width = `${Math.min(100, (100 * cells.length) / 24)}%`;
  const keys = Object.entries(legend).map(([kind, text]) => el("span", {}, el("i", { class: kind }), text));
  return el("section", { class: "week", "aria-label": `States, ${words.split(":")[0]}` }, strip,
    el("small", {}, `${when(start).slice(0, 16)} to ${apart(end, start).slice(0, -3)} UTC · ${words}`),
    el("details", {}, el("summary", {}, "What the colours mean"), el("div", { class: "legend" }, keys, el("span", {}, how))));
}

function incidentSection(page) {
  const card = page.incident;
  if (!card) return null;
  const fact = (name, ...words) => (words.flat().filter(Boolean).length ? [el("dt", {}, name), el("dd", {}, ...words)] : []);
  const seen = card.before ? `${card.before === 1 ? "once" : `${card.before} times`} before in this record` : "";
  const timeline = card.timeline.map(({ time, event, text }) => el("tr", {}, td("when", apart(time, card.start)), td("event", event), td("", text)));
  return el("details", { class: `incident ${card.over === null ? "bad" : "idle"}` },
    el("summary", {}, el("b", {}, card.over === null ? "Incident, open" : "Last incident"), ` ${when(card.start)} UTC · ${card.sentence}`),
    el("dl", {}, fact("Where", [card.culprits.length ? `rank ${card.culprits.join(", ")}` : "", card.frame].filter(Boolean).join(" at ")),
      fact("Collectives", card.collective), fact("The guard did", card.guard.join(" · ")), fact("Fix", card.fix ? coded(card.fix) : ""), fact("Seen", seen)),
    card.stack ? el("pre", { role: "region", tabindex: 0, "aria-label": "Stack of the culprit" }, card.stack) : null,
    el("details", {}, el("summary", {}, "Timeline of the incident"), el("table", { class: "log" }, timeline)));
}

function tilesSection(page) {
  const drawn = page.tiles.map(({ name, value, kind, note }) =>
    el("div", { class: page.live ? "tile" : "tile old" }, el("b", { class: kind }, value), el("span", {}, name), note ? el("small", {}, note) : null));
  return el("section", { "aria-label": "Figures", class: "tiles" }, drawn);
}

function table(title, head, rows, kind = "") {
  if (!rows.length) return [el("h2", {}, title), el("p", { class: "soft" }, "none")];
  const columns = () => el("tr", {}, head.map((name) => el("th", { scope: "col", class: name.endsWith("#") ? "n" : "" }, name.replace("#", ""))));
  const cell = (value, place) => (value instanceof Element && value.tagName === "TD" ? value : el("td", { class: head[place].endsWith("#") ? "n" : "" }, value));
  const drawn = rows.map((row) => el("tr", row.id ? { id: row.id } : {}, row.map(cell)));
  const box = (name, lines) => el("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": name }, el("table", { class: kind }, columns(), lines));
  const parts = [el("h2", {}, title), box(title, drawn.slice(0, FIRST_ROWS))];
  const more = drawn.slice(FIRST_ROWS);
  if (more.length) parts.push(el("details", {}, el("summary", {}, `${title}: ${more.length} more`), box(`${title}, more`, more)));
  return parts;
}

const td = (kind, ...children) => el("td", { class: kind }, ...children);

function ranksFigure(page) {
  if (!page.ranks.length) return null;
  const gpus = page.ranks.some((row) => row.gpu_mem_gb !== null);
  const longest = Math.max(...page.ranks.map((row) => row.work_s || 0)) || 1;
  const rows = page.ranks.map((row) => {
    const bar = el("i", { class: "work" });
    bar.style.width = `${(100 * (row.work_s || 0)) / longest}%`;
    const age = amount(row.last_step_age_s, "s ago");
    return el("tr", { class: { BEHIND: "bad", SLOW: "warn" }[row.mark] || "" }, el("th", { scope: "row" }, `rank ${row.rank}`),
      td("bars", bar, el("span", {}, amount(row.work_s, "s", 2))), td("n", amount(row.step_time_s, "s", 2)), td("n", age),
      gpus ? td("n", amount(row.gpu_mem_gb, "GB", 1)) : null);
  });
  const head = el("tr", {}, ["", "own work", "step", "last step", ...(gpus ? ["GPU memory"] : [])].map((name) => (name ? el("th", { scope: "col" }, name) : el("td"))));
  return el("figure", { class: "ranks" }, el("figcaption", {}, "Ranks ", el("small", {}, "those behind first, then the slowest")),
    el("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": "Ranks" }, el("table", {}, head, rows)));
}

function tables(page) {
  const parts = [];
  const again = (row) => (row.count === 1 ? null : el("small", {}, ` ${row.count} times since ${apart(row.since, row.time)}`));
  parts.push(...table("Incidents and alarms", ["when (UTC)", "event", "what"], page.alarms.map((row) =>
    [td("when", when(row.time)), td(`event ${row.kind}`, runbookLink(page, row.event)), td("", row.text, again(row))]), "log"));
  const fates = { verified: "good", failed: "bad", refuted: "bad" };
  parts.push(...table("Uploads", ["when (UTC)", "tag", "outcome", "bytes#", "took#", "attempts#", "why"], page.uploads.map((row) =>
    [td("when", when(row.wall)), row.tag || "unknown", td(fates[row.outcome] || "warn", row.outcome), amount(row.bytes, ""), amount(row.seconds, "s", 1),
      amount(row.attempts, ""), row.error || ""]), "wide"));
  const gib = (size) => amount(size === null || size === undefined ? null : size / 1024 ** 3, "GB", 1);
  const gpus = page.gpus.map((row) => [String(row.index), td(row.state === "ok" ? "good" : "bad", row.state), amount(row.utilization_ratio && 100 * row.utilization_ratio, "%"),
    `${gib(row.memory_used_bytes)} of ${gib(row.memory_total_bytes)}`, amount(row.temperature_c, "°C"), amount(row.power_w, "W")]);
  if (gpus.length) parts.push(...table("GPUs", ["GPU", "state", "use#", "memory#", "temperature#", "power#"], gpus, "narrow"));
  else parts.push(el("h2", {}, "GPUs"), el("p", { class: "soft" }, page.without_gpu));
  const shares = Object.entries(page.time);
  if (shares.length) {
    const bar = el("div", { class: "bar" }, shares.map(([, share], place) => {
      const part = el("i", {});
      part.style.width = share.replace("<", "");
      part.style.background = `hsl(${HUES[(place + 1) % HUES.length]} 45% 45%)`;
      return part;
    }));
    const words = shares.map(([name, share]) => `${name.replaceAll("_", " ")} ${share}`).join(" · ");
    parts.push(el("h2", {}, "Where the time went"), bar, el("p", { class: "soft" }, words));
  }
  if (page.costs) {
    const rows = Object.entries(page.costs.operations).sort((a, b) => b[1].total_time - a[1].total_time);
    const title = `What monitoring costs: ${page.costs.total_percentage.toFixed(2)}% of training time (budget ${page.costs.budget_percentage}%)`;
    parts.push(...table(title, ["operation", "calls#", "blocking time#", "background CPU#", "share#", "impact", "status"], rows.map(([name, row]) =>
      [name, String(row.calls), `${row.total_time.toFixed(2)} s`, `${row.background_time.toFixed(2)} s`, `${row.percentage.toFixed(3)}%`, row.impact, row.status]), "wide"));
  }
  if ((page.milestones || []).length) {
    const rows = page.milestones.map((row) => [row.stage, row.title, row.reached === null ? td("warn", "not yet") : td("good", "reached"), row.reached === null ? row.why : when(row.reached)]);
    const [, box, more] = table("Milestones", ["stage", "milestone", "state", "when (UTC), or why not"], rows, "milestones");
    parts.push(el("details", {}, el("summary", {}, "Milestones"), box, more || ""));
  }
  const book = Object.entries(page.runbook).map(([event, row]) => Object.assign([td("event", event), td("", coded(row.meaning)), td("", coded(row.action))], { id: `runbook-${event}` }));
  if (book.length) parts.push(...table("Runbook: what to do about these events", ["event", "what it means", "what to do"], book, "runbook"));
  parts.push(el("p", {}, el("small", {}, `${page.about.events} read. Scores come from validators; miner-guard does not estimate them.`)));
  return parts;
}

// --- curves ---

let plots = [];
let extent = [0, 1]; // the time that all curves share
let dragged = false;
let origin = null; // the plot in which a selection began; the others follow it

function extentOf(page) {
  const times = page.curves.flatMap(({ columns }) => [columns[0][0], columns[0].at(-1)]);
  times.push(...Object.values(page.outages).flat(2));
  return times.length ? [Math.min(...times), Math.max(...times)] : [0, 1];
}

// 24 hours, UTC; the date where a day begins.
function times(_, ticks, axis, space, step) {
  return ticks.map((tick, place) => {
    const text = new Date(tick * 1000).toISOString();
    const day = text.slice(5, 10);
    if (step >= 86400) return day;
    const hour = text.slice(11, step < 60 ? 19 : 16);
    return place === 0 || tick % 86400 === 0 ? `${hour}\n${day}` : hour;
  });
}

function described(curve) {
  const values = curve.columns[1].filter((value) => value !== null);
  const ends = `from ${figure(values[0])} to ${figure(values.at(-1))} ${curve.unit}`.trim();
  const marks = curve.marks.filter(([, , times]) => times.length).map(([, words, times]) => `; ${words} ${times.length} times`);
  return `${curve.title}: ${ends}, lowest ${figure(Math.min(...values))}, highest ${figure(Math.max(...values))}${marks.join("")}`;
}

// The gate's blocks belong to the age of the repo, the other outages to every other curve.
const outagesOf = (curve, outages) => Object.entries(outages).filter(([kind]) => (kind === BLOCKED) === (curve.title === "Repo age"));

function shaded(curve, outages) {
  return (u) => {
    const { ctx, bbox } = u;
    const x = (time) => Math.min(bbox.left + bbox.width, Math.max(bbox.left, u.valToPos(time, "x", true)));
    ctx.save();
    for (const [kind, spans] of outagesOf(curve, outages)) {
      ctx.fillStyle = colour(SHADES[kind]);
      ctx.globalAlpha = 0.2;
      for (const [start, end] of spans) {
        if (end >= u.scales.x.min && start <= u.scales.x.max) ctx.fillRect(x(start), bbox.top, Math.max(2, x(end) - x(start)), bbox.height);
      }
    }
    ctx.globalAlpha = 1;
    for (const [kind, , times] of curve.marks) {
      ctx.fillStyle = colour(`--${kind}`);
      for (const time of times) {
        if (time >= u.scales.x.min && time <= u.scales.x.max) ctx.fillRect(x(time) - 1, bbox.top + bbox.height - 10 * devicePixelRatio, 2 * devicePixelRatio, 10 * devicePixelRatio);
      }
    }
    if (curve.limit && curve.limit <= u.scales.y.max) {
      ctx.strokeStyle = colour("--bad");
      ctx.setLineDash([6, 4]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, u.valToPos(curve.limit, "y", true));
      ctx.lineTo(bbox.left + bbox.width, u.valToPos(curve.limit, "y", true));
      ctx.stroke();
    }
    ctx.restore();
  };
}

function stroke(curve, place) {
  if (curve.names.length <= 2) return colour(curve.names.length === 2 && place === 0 ? "--faint" : "--line");
  return `hsl(${HUES[place % HUES.length]} 65% ${matchMedia("(prefers-color-scheme: dark)").matches ? 68 : 35}%)`;
}

function range(curve) {
  return (u, low, high) => {
    if (low === null) return [0, 1];
    const top = Math.max(curve.top || high, curve.limit && curve.limit < 3 * high ? curve.limit : 0);
    const bottom = curve.zero ? Math.min(0, low) : low;
    const room = 0.08 * (top - bottom || Math.abs(top) || 1);
    return [curve.zero ? bottom : bottom - room, top + room];
  };
}

function keysOf(curve, outages) {
  const keys = curve.names.length > 1 ? curve.names.map((name, place) => [stroke(curve, place), name]) : [];
  for (const [kind, words, times] of curve.marks) if (times.length) keys.push([colour(`--${kind}`), words]);
  for (const [kind, spans] of outagesOf(curve, outages)) if (spans.length) keys.push([colour(SHADES[kind]), kind]);
  if (curve.limit) keys.push([colour("--bad"), `limit ${figure(curve.limit)}`]);
  return keys.map(([shade, words]) => {
    const dot = el("i", {});
    dot.style.background = shade;
    return el("span", { class: "key" }, dot, words);
  });
}

function showAt(u, curve, output) {
  const at = u.cursor.idx;
  if (at === null || at === undefined || curve.columns[1][at] === null) return;
  const values = curve.names.map((name, place) => {
    const value = curve.columns[place + 1][at];
    const words = value === null ? "unknown" : `${figure(value)} ${curve.unit.split(" ")[0]}`.trim();
    return curve.names.length > 1 ? `${name} ${words}` : words;
  });
  output.textContent = `${values.join(", ")} at ${when(curve.columns[0][at])} UTC`;
}

function plot(curve, page) {
  const keys = keysOf(curve, page.outages);
  const caption = el("figcaption", {}, `${curve.title} `, el("small", {}, curve.unit), keys,
    curve.top ? el("span", { class: "key" }, "first step off the axis") : null);
  const area = el("div", { class: "area", tabindex: 0, role: "img", "aria-label": described(curve) });
  const output = el("output", {});
  const drawn = el("figure", {}, caption, area, output);
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--edge"), width: 1 }, ticks: { stroke: colour("--edge"), width: 1 } };
  const make = () => {
    const u = new uPlot({
      width: area.clientWidth || 400,
      height: 190,
      legend: { show: false },
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      cursor: { sync: { key: "run" }, drag: { x: true, y: false, setScale: false }, y: false },
      scales: { y: { range: range(curve) } },
      axes: [{ ...axis, values: times }, { ...axis, size: 46, values: (_, ticks) => ticks.map(figure) }],
      series: [{}, ...curve.names.map((name, place) => ({ label: name, stroke: stroke(curve, place), width: 1.5, points: { show: curve.columns[0].length < 3 } }))],
      hooks: {
        draw: [shaded(curve, page.outages)],
        setCursor: [(self) => showAt(self, curve, output)],
        setSelect: [(self) => {
          if (self !== origin || self.select.width < 8) return;
          const [from, to] = [self.posToVal(self.select.left, "x"), self.posToVal(self.select.left + self.select.width, "x")];
          self.setSelect({ width: 0, height: 0 }, false);
          zoom(from, to);
        }],
      },
    }, curve.columns, area);
    u.setScale("x", { min: extent[0], max: extent[1] });
    u.over.addEventListener("mousedown", () => {
      dragged = true;
      origin = u;
    });
    u.over.addEventListener("dblclick", () => zoom(null, null));
    area.addEventListener("keydown", (event) => keyed(event, u, curve, output));
    plots.push({ u, area, curve });
  };
  return Object.assign(drawn, { make });
}

document.addEventListener("mouseup", () => { dragged = false; });

// Arrow keys move along the curve, + and − zoom.
function keyed(event, u, curve, output) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
  if ((!step && !factor) || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const moments = curve.columns[0];
  const at = Math.min(moments.length - 1, Math.max(0, (u.cursor.idx ?? 0) + (step || 0)));
  u.setCursor({ left: u.valToPos(moments[at], "x"), top: 10 });
  u.cursor.idx = at;
  showAt(u, curve, output);
  if (!factor) return;
  const half = (factor * (u.scales.x.max - u.scales.x.min)) / 2;
  const [first, last] = extent;
  if (2 * half >= last - first) zoom(null, null);
  else zoom(Math.max(first, moments[at] - half), Math.min(last, moments[at] + half));
}

// All curves share one time axis. The port answers with finer data for the window.
function zoom(from, to) {
  for (const { u } of plots) u.setScale("x", { min: from ?? extent[0], max: to ?? extent[1] });
  if (!saved) choose(from === null ? null : { from: Math.floor(from), to: Math.ceil(to) });
}

function showCurves(page) {
  const focused = plots.findIndex(({ area }) => area === document.activeElement);
  for (const { u } of plots) u.destroy();
  plots = [];
  extent = extentOf(page);
  const figures = page.curves.map((curve) => plot(curve, page));
  const ranks = ranksFigure(page);
  if (ranks) figures.splice(2, 0, ranks);
  const hint = "All times in UTC. Hover over a curve for its values; drag to zoom in, double-click to zoom out; arrow keys move, + and − zoom.";
  $("#curves").replaceChildren(...figures, el("p", { class: "soft hint" }, figures.length ? hint : "No curves yet: no step has been recorded."));
  for (const each of figures) if (each.make) each.make();
  if (focused >= 0 && plots[focused]) plots[focused].area.focus({ preventScroll: true });
}

const known = new Set(); // open incidents that were unfolded once

function icon(kind) {
  const shade = { good: "%23176b32", warn: "%23b58900", bad: "%23b3261e" }[kind] || "%23525c6b";
  $("link[rel=icon]").href = `data:image/svg+xml,<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8"><circle cx="4" cy="4" r="4" fill="${shade}"/></svg>`;
}

function show(page) {
  const open = [...document.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent);
  document.title = page.title;
  icon(page.state.kind);
  $("#head").replaceChildren(...[stateSection(page), incidentSection(page), weekSection(page), tilesSection(page), othersSection(page), aboutLine(page)].filter(Boolean));
  if (page.curves) showCurves(page);
  else if ($("figure.ranks") && page.ranks.length) $("figure.ranks").replaceWith(ranksFigure(page));
  $("#tables").replaceChildren(...tables(page));
  const shown = $(".incident.bad");
  if (shown && !known.has(page.incident.start)) shown.open = true;
  if (shown) known.add(page.incident.start);
  for (const summary of document.querySelectorAll("details > summary")) {
    if (open.includes(summary.textContent)) summary.parentElement.open = true;
  }
}

addEventListener("resize", () => {
  for (const { u, area } of plots) u.setSize({ width: area.clientWidth, height: 190 });
});
addEventListener("beforeprint", () => {
  for (const summary of document.querySelectorAll("details")) summary.open = true;
});
$("#find").replaceChildren(...coded($("#find").textContent));

// --- live ---

let chosen = null; // the window selected on a curve: {from, to}, seconds since 1970
let ranged = "24h";
let updated = null; // when the port last answered, ms
let drawnAt = -Infinity;
let patience = EVERY_MS;
let milestones = [];
let trouble = "";
let next = 0;

// A header holds bytes; a token may be any text.
const asBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));
const clock = (ms) => `${new Date(ms).toISOString().slice(11, 19)} UTC`;

function tell() {
  if (updated === null) {
    $("#fresh").textContent = trouble;
    return;
  }
  const age = Math.round((Date.now() - updated) / 1000);
  const stale = trouble !== "" || age > STALE_S;
  $("#gone").hidden = !stale;
  document.body.classList.toggle("stale", stale);
  if (stale) {
    icon("bad");
    document.title = "GUARD GONE · miner-guard";
    $("#gone h1").textContent = `GUARD GONE since ${clock(updated).replace(/:\d\d UTC/, " UTC")}`;
    $("#why").textContent = `the guard is not responding${trouble && ` (${trouble})`}`;
  }
  const now = `Now ${clock(Date.now())}`;
  $("#fresh").textContent = stale ? `${now}. Below is the last data, from ${clock(updated)}; retrying.` : `${now}, last updated ${age} s ago`;
}

function askForToken(why) {
  sessionStorage.removeItem(KEY);
  for (const part of ["#head", "#curves", "#tables"]) $(part).replaceChildren();
  plots = [];
  updated = null;
  trouble = why;
  $("form").hidden = false;
  $("#ranges").hidden = why === "";
  for (const button of $("#ranges").querySelectorAll("button")) button.disabled = true;
  tell();
  $("#token").focus();
}

async function refresh() {
  clearTimeout(next);
  next = setTimeout(refresh, EVERY_MS);
  const token = sessionStorage.getItem(KEY);
  const headers = token === null ? {} : { Authorization: `Bearer ${asBytes(token)}` };
  const curves = Date.now() - drawnAt >= patience - 1000;
  const wanted = chosen ? `from=${chosen.from}&to=${chosen.to}` : `range=${ranged}`;
  try {
    const answer = await fetch(`data?${wanted}${curves ? "" : "&curves=0"}`, { headers, cache: "no-store" });
    if (answer.status === 401) {
      clearTimeout(next);
      askForToken(token === null ? "" : "Wrong token; try again.");
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const page = await answer.json();
    // Do not replace text that a person is selecting, or a curve that is being dragged over.
    if (document.getSelection().isCollapsed && !dragged) {
      if (page.curves) {
        drawnAt = Date.now();
        const [first, last] = extentOf(page);
        // A week's curves change by one column every ten minutes.
        patience = Math.min(120000, Math.max(EVERY_MS, (1000 * (last - first)) / 500));
        milestones = page.milestones;
      } else page.milestones = milestones;
      show(page);
    }
    updated = Date.now();
    trouble = "";
    $("form").hidden = true;
    $("#ranges").hidden = false;
    for (const button of $("#ranges").querySelectorAll("button")) button.disabled = false;
  } catch (error) {
    trouble = error.message;
  }
  tell();
}

function choose(window) {
  chosen = window;
  drawnAt = -Infinity;
  $("#reset").hidden = chosen === null;
  for (const button of $("#ranges").querySelectorAll("[value]")) button.setAttribute("aria-pressed", String(chosen === null && button.value === ranged));
  refresh();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("#token").value.trim());
  $("#token").value = "";
  refresh();
});
$("#ranges").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.value) ranged = button.value;
  choose(null);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (saved ? show(saved) : choose(chosen)));

if (saved) show(saved);
else {
  choose(null);
  setInterval(tell, 1000);
}
