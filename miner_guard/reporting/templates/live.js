// The live page: fetches the report again and again, keeps what was shown last, and says how old it is.
"use strict";

const KEPT = "miner-guard token";
const EVERY_MS = 10000;
const STALE_S = 60;
const form = document.querySelector("form");
const field = document.querySelector("#token");
const state = document.querySelector("#state");
const report = document.querySelector("#report");
const ranges = document.querySelector("#ranges");
let range = "24h";
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
  state.className = stale ? "bad" : "none";
  state.textContent = stale
    ? `The guard does not answer${trouble && ` (${trouble})`}. Last updated ${clock(updated)}; retrying.`
    : `Last updated ${age} s ago`;
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
  document.title = page.title;
  report.replaceChildren(...page.body.childNodes);
  for (const summary of report.querySelectorAll("details summary")) {
    if (open.includes(summary.textContent)) summary.parentElement.open = true;
  }
}

async function show() {
  clearTimeout(next);
  next = setTimeout(show, EVERY_MS);
  const token = sessionStorage.getItem(KEPT);
  const headers = token === null ? {} : { Authorization: `Bearer ${asBytes(token)}` };
  try {
    const answer = await fetch(`report?range=${range}`, { headers, cache: "no-store" });
    if (answer.status === 401) {
      clearTimeout(next);
      ask(token === null ? "" : "Wrong token; try again.");
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const text = await answer.text();
    // Text that a person is marking stays as it is until they are done.
    if (!selecting()) replace(text);
    updated = Date.now();
    trouble = "";
    form.hidden = true;
    ranges.hidden = false;
  } catch (error) {
    trouble = error.message;
  }
  tell();
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
  range = button.value;
  for (const other of ranges.children) other.setAttribute("aria-pressed", String(other === button));
  show();
});
setInterval(tell, 1000);
show();
