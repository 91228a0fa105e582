// While a run is at work, its page regularly fetches the parts that change and replaces them; when
// another stage begins, or the run ends, it replaces all parts. Selections, opened details and
// scroll positions are kept.
"use strict";
(() => {
  const shown = new Map();
  const name = (part) => part.dataset.part;
  const here = (part) => document.querySelector(`[data-part="${CSS.escape(part)}"]`);
  const parts = (page) => [...page.querySelectorAll("[data-part]")];
  const read = async (address) => {
    const answer = await fetch(address, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${answer.status} from ${address}`);
    return new DOMParser().parseFromString(await answer.text(), "text/html");
  };
  const chosen = (part) => {
    const selection = getSelection();
    return selection.rangeCount > 0 && !selection.isCollapsed && selection.getRangeAt(0).intersectsNode(part);
  };
  const put = (part, above) => {
    const before = here(name(part));
    if (!before) {
      if (above) here(above).after(part);
      else document.querySelector("main").prepend(part);
    } else if (shown.get(name(part)) !== part.outerHTML && !chosen(before)) {
      shown.set(name(part), part.outerHTML);
      const focus = before.contains(document.activeElement) && document.activeElement.getAttribute("href");
      const scrolled = [...before.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
      [...before.querySelectorAll("details")].forEach((one, at) => {
        const now = part.querySelectorAll("details")[at];
        if (now) now.open = one.open;
      });
      before.replaceWith(part);
      [...part.querySelectorAll(".scroll")].forEach((box, at) => box.scrollTo(...(scrolled[at] ?? [0, 0])));
      if (focus) part.querySelector(`[href="${CSS.escape(focus)}"]`)?.focus({ preventScroll: true });
    }
  };
  const turn = async () => {
    const main = document.querySelector("main");
    const { live, state, every } = main.dataset;
    let page = await read(live);
    const next = page.querySelector("main").dataset;
    const whole = next.state !== state || next.live === undefined;
    if (whole && live !== location.pathname) page = await read(location.href);
    const [left, top] = [scrollX, scrollY];
    const now = page.querySelector("main").dataset;
    const there = new Set(parts(page).map(name));
    // The first part of all is in the head of the page.
    [...there].forEach((one, at) => put(parts(page).find((part) => name(part) === one), at > 1 ? [...there][at - 1] : ""));
    if (whole) {
      parts(document).filter((part) => !there.has(name(part)) && !chosen(part)).forEach((part) => part.remove());
    }
    scrollTo(left, top);
    if (now.live === undefined) return;
    Object.assign(main.dataset, { live: now.live, state: now.state, every: now.every });
    setTimeout(again, 1000 * Number(every));
  };
  // A hidden page fetches nothing.
  const again = () => {
    if (document.hidden) document.addEventListener("visibilitychange", again, { once: true });
    // The server may be away for a moment.
    else turn().catch(() => setTimeout(again, 10000));
  };
  if (document.querySelector("main[data-live]")) setTimeout(again, 1000);
})();
