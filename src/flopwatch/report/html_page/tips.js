"use strict";
// Text of trials and runs enters the page through textContent only: nothing of it can become markup.
(() => {
  const tip = document.createElement("div");
  tip.id = "tip"; tip.hidden = true; document.body.append(tip);
  document.addEventListener("pointerover", (event) => {
    const owner = event.target.closest("[data-t]");
    tip.hidden = !owner;
    if (owner) tip.textContent = owner.dataset.t;
  });
  document.addEventListener("pointermove", (event) => {
    if (tip.hidden) return;
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    const below = event.clientY + 18;
    tip.style.top = (below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below) + "px";
  });
})();
