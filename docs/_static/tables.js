// Gives each cell of a table with more than four columns its column's heading, which site.css shows on a phone.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
    if (headings.length <= 4) continue;
    table.classList.add("wide");
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, i) => { cell.dataset.label = headings[i]; });
    }
  }
});
