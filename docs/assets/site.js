// Wide tables can be scrolled with the keys.
window.addEventListener("load", () => {
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap")) each.tabIndex = 0;
});
