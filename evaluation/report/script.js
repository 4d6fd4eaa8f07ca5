"use strict";
(() => {
  // Charts: the figure under the pointer, or the one that the arrow keys have reached, is told in #tip.
  const tip = document.getElementById("tip");
  let current = null;
  let byKey = false;

  function show(element, x, y) {
    if (current && current !== element) current.classList.remove("at");
    current = element;
    element.classList.add("at");
    if (tip.textContent !== element.dataset.tip) tip.textContent = element.dataset.tip;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 12), Math.max(8, innerWidth - box.width - 8));
    const top = y + 16 + box.height > innerHeight ? y - box.height - 10 : y + 16;
    tip.style.left = left + "px";
    tip.style.top = Math.max(4, top) + "px";
  }

  function showAtMark(element) {
    const box = element.getBoundingClientRect();
    show(element, box.left + box.width / 2, box.top + box.height / 2);
  }

  function hide() {
    if (current) current.classList.remove("at");
    current = null;
    tip.hidden = true;
  }

  for (const drawing of document.querySelectorAll(".drawing")) {
    const marks = [...drawing.querySelectorAll("[data-tip]")];
    if (!marks.length) continue;
    drawing.setAttribute("aria-description", "Arrow keys step through the figures.");
    drawing.addEventListener("pointermove", (event) => {
      const mark = event.target.closest("[data-tip]");
      byKey = false;
      if (mark) show(mark, event.clientX, event.clientY);
      else hide();
    });
    drawing.addEventListener("pointerleave", hide);
    drawing.addEventListener("blur", hide);
    drawing.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
      let index = marks.indexOf(current);
      if (event.key === "Home") index = 0;
      else if (event.key === "End") index = marks.length - 1;
      else if (event.key in steps) index = index < 0 ? 0 : Math.min(Math.max(index + steps[event.key], 0), marks.length - 1);
      else return;
      event.preventDefault();
      const box = marks[index].getBoundingClientRect();
      const frame = drawing.getBoundingClientRect();
      if (box.left < frame.left) drawing.scrollLeft -= frame.left - box.left + 20;
      if (box.right > frame.right) drawing.scrollLeft += box.right - frame.right + 20;
      byKey = true;
      showAtMark(marks[index]);
    });
  }
  addEventListener("scroll", () => (byKey && current ? showAtMark(current) : hide()), { passive: true });

  // On paper, what is worth printing is open.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.printed:not([open])")];
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });
})();
