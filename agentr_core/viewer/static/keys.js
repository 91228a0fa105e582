// Keys: j and k for the next and previous step, n and p for pages, / for the search.
"use strict";
(() => {
  const steps = [...document.querySelectorAll(".step, .hit")];
  const search = document.querySelector("input[type=search]");
  const go = (by) => {
    const at = steps.findIndex((step) => step === document.activeElement);
    const next = steps[at < 0 ? (by > 0 ? 0 : -1) : at + by];
    if (next) {
      next.focus({ preventScroll: true });
      next.scrollIntoView({ block: "center" });
    }
  };
  const turn = (rel) => document.querySelector(`a[rel=${rel}]`)?.click();
  const keys = {
    j: () => go(1), k: () => go(-1), n: () => turn("next"), p: () => turn("prev"),
    "/": () => { search?.focus(); search?.select(); },
  };
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (typing && event.key === "Escape") event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
})();
