// The live page: fetches the report periodically, keeps showing the last one if that fails, and shows its age.
"use strict";

const KEPT = "miner-guard token";
const EVERY_MS = 10000;
const STALE_S = 60;
const form = document.querySelector("form");
const field = document.querySelector("#token");
const state = document.querySelector("#state");
const gone = document.querySelector("#gone");
const report = document.querySelector("#report");
const ranges = document.querySelector("#ranges");
const reset = document.querySelector("#reset");
let range = "24h";
let chosen = null; // the range selected by dragging on a curve: {from, to}, seconds since 1970
let updated = null; // when the guard last answered, ms
let trouble = "";
let next = 0;

// A header holds bytes; a token may be any text.
const asBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));
const clock = (ms) => `${new Date(ms).toISOString().slice(11, 19)} UTC`;

function tell() {
  if (updated === null) {
    state.textContent = trouble;
    return;
  }
  const age = Math.round((Date.now() - updated) / 1000);
  const stale = trouble !== "" || age > STALE_S;
  gone.hidden = !stale;
  report.classList.toggle("stale", stale);
  if (stale) document.title = "GUARD GONE · miner-guard";
  if (stale) {
    gone.querySelector("h1").textContent = `GUARD GONE since ${clock(updated).replace(/:\d\d UTC/, " UTC")}`;
    gone.querySelector("#why").textContent = `the guard is not responding${trouble && ` (${trouble})`}`;
  }
  const now = `Now ${clock(Date.now())}`;
  state.textContent = stale
    ? `${now}. Below is the last data, from ${clock(updated)}; retrying.`
    : `${now}, last updated ${age} s ago`;
}

function ask(why) {
  sessionStorage.removeItem(KEPT);
  report.replaceChildren();
  updated = null;
  trouble = why;
  form.hidden = false;
  ranges.hidden = true;
  tell();
  field.focus();
}

const selecting = () => !document.getSelection().isCollapsed;

function replace(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const open = [...report.querySelectorAll("details[open] summary")].map((summary) => summary.textContent);
  const focused = areas().indexOf(document.activeElement);
  document.title = page.title;
  report.replaceChildren(...page.body.childNodes);
  for (const summary of report.querySelectorAll("details summary")) {
    if (open.includes(summary.textContent)) summary.parentElement.open = true;
  }
  if (focused >= 0 && areas()[focused]) areas()[focused].focus({ preventScroll: true });
}

async function show() {
  clearTimeout(next);
  next = setTimeout(show, EVERY_MS);
  const token = sessionStorage.getItem(KEPT);
  const headers = token === null ? {} : { Authorization: `Bearer ${asBytes(token)}` };
  const asked = chosen ? `from=${chosen.from}&to=${chosen.to}` : `range=${range}`;
  try {
    const answer = await fetch(`report?${asked}`, { headers, cache: "no-store" });
    if (answer.status === 401) {
      clearTimeout(next);
      ask(token === null ? "" : "Wrong token; try again.");
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const text = await answer.text();
    // Do not replace text that the user is selecting or a curve that the user is dragging in until they are done.
    if (!selecting() && !drag) replace(text);
    updated = Date.now();
    trouble = "";
    form.hidden = true;
    ranges.hidden = false;
  } catch (error) {
    trouble = error.message;
  }
  tell();
}

function choose(window) {
  chosen = window;
  reset.hidden = chosen === null;
  for (const button of ranges.querySelectorAll("[value]")) {
    button.setAttribute("aria-pressed", String(chosen === null && button.value === range));
  }
  show();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEPT, field.value.trim());
  field.value = "";
  show();
});
ranges.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.value) range = button.value;
  choose(null);
});
document.addEventListener("zoomed", (event) => {
  // Zooming out of a chosen range returns to the button's range.
  choose(event.detail);
});
document.addEventListener("dblclick", (event) => {
  if (chosen && event.target.closest(".area")) choose(null);
});
setInterval(tell, 1000);
show();
