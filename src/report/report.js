"use strict";
// A header of a sortable table is a button: first press sorts upwards, second downwards, third gives the old order back.
for (const table of document.querySelectorAll("table.sort")) {
  const body = table.tBodies[0];
  const original = Array.from(body.rows);
  const heads = Array.from(table.tHead.rows[0].cells);

  const value = (row, column) => {
    const cell = row.cells[column];
    const number = cell.dataset.v;
    return number === undefined ? cell.textContent.trim() : number === "" ? null : Number(number);
  };

  const compare = (a, b) => {
    // Empty cells stand last in either direction, so they are compared before the direction counts.
    if (typeof a === "number" && typeof b === "number") {
      return a - b;
    }
    return String(a).localeCompare(String(b), "en", { numeric: true });
  };

  heads.forEach((head, column) => {
    const text = head.textContent;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.title = "Sort by this column";
    head.replaceChildren(button);
    head.setAttribute("aria-sort", "none");

    button.addEventListener("click", () => {
      const next = { none: "ascending", ascending: "descending", descending: "none" };
      const order = next[head.getAttribute("aria-sort")];
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", order);
      if (order === "none") {
        body.replaceChildren(...original);
        return;
      }
      const sign = order === "ascending" ? 1 : -1;
      const rows = original.map((row, index) => ({ row, index, key: value(row, column) }));
      rows.sort((a, b) => {
        if (a.key === null || b.key === null) {
          return (a.key === null) - (b.key === null) || a.index - b.index;
        }
        return sign * compare(a.key, b.key) || a.index - b.index;
      });
      body.replaceChildren(...rows.map((entry) => entry.row));
    });
  });
}
