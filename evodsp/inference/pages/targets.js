// The page of many predictions: a click on a heading, or Enter on it, sorts the targets; numbers begin with the largest one.
"use strict";
document.querySelectorAll(".targets th").forEach((heading, column) => {
  const rows = () => [...document.querySelectorAll(".targets tr")].slice(1), cell = (row) => row.cells[column].textContent.trim();
  if (!rows().some(cell)) return; // pictures have no order
  const number = (row) => (cell(row) === "" ? -1 : parseFloat(cell(row).replaceAll(",", "")));
  const isNumber = heading.classList.contains("number");
  const compare = isNumber ? (a, b) => number(a) - number(b) : (a, b) => cell(a).localeCompare(cell(b), "en", { numeric: true });
  const sort = () => {
    const down = heading.ariaSort ? heading.ariaSort === "ascending" : isNumber;
    document.querySelectorAll(".targets [aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const sorted = rows().sort((a, b) => (down ? compare(b, a) : compare(a, b)));
    heading.closest("tbody").append(...sorted);
  };
  heading.classList.add("sorts");
  heading.tabIndex = 0;
  heading.addEventListener("click", sort);
  heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
});
