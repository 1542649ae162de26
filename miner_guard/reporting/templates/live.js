// The live page where the port wants a token: asks for it once, then fetches the report again and again.
"use strict";

const KEPT = "miner-guard token";
const EVERY_MS = 10000;
const form = document.querySelector("form");
const field = document.querySelector("#token");
const said = document.querySelector("#said");
const report = document.querySelector("#report");
let answered = "";
let next = 0;

// A header holds bytes; a token may be any text.
const asBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

function ask(why) {
  sessionStorage.removeItem(KEPT);
  report.replaceChildren();
  said.textContent = why;
  form.hidden = false;
  field.focus();
}

async function show() {
  clearTimeout(next);
  const token = sessionStorage.getItem(KEPT);
  if (token === null) return ask("");
  try {
    const answer = await fetch("./", { headers: { Authorization: `Bearer ${asBytes(token)}` }, cache: "no-store" });
    if (answer.status === 401) return ask("This is not the token.");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.title = page.title;
    report.replaceChildren(...page.body.childNodes);
    answered = new Date().toLocaleTimeString();
    said.textContent = "";
    form.hidden = true;
  } catch (error) {
    said.textContent = `The guard does not answer (${error.message}). ` + (answered && `What is shown is of ${answered}.`);
  }
  next = setTimeout(show, EVERY_MS);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEPT, field.value.trim());
  field.value = "";
  show();
});
show();
