// Names and keyboard access that axe-core misses in the theme; it adds some of these elements after loading.
"use strict";

function name() {
  const label = (selector, words) =>
    document.querySelectorAll(selector).forEach((element, place) => {
      if (!element.hasAttribute("aria-label")) element.setAttribute("aria-label", `${words} ${place + 1}`);
    });
  label("[data-md-component=search][role=dialog]", "Search");
  label(".md-code__nav", "Code block");
  // The palette follows the system: its hidden radio buttons need no keyboard.
  for (const option of document.querySelectorAll(".md-option")) option.tabIndex = -1;
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
}

name();
new MutationObserver(name).observe(document.body, { childList: true, subtree: true });
