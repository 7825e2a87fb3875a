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

// Every table can be copied, as it is sorted, with tabs between its cells: a spreadsheet takes it so.
const asText = (table) =>
  Array.from(table.rows, (row) =>
    Array.from(row.cells, (cell) => cell.textContent.trim().replace(/\s+/g, " ")).join("\t"),
  ).join("\n") + "\n";

const copy = async (text) => {
  if (navigator.clipboard && window.isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Refused: the old way may still be open.
    }
  }
  const area = document.createElement("textarea");
  area.value = text;
  area.style.position = "fixed";
  area.style.opacity = "0";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
};

for (const tools of document.querySelectorAll(".tools")) {
  const holder = tools.nextElementSibling;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy table";
  button.setAttribute("aria-label", `Copy table: ${holder.getAttribute("aria-label")}`);
  const said = document.createElement("span");
  said.className = "note";
  said.setAttribute("role", "status");
  button.addEventListener("click", async () => {
    said.textContent = (await copy(asText(holder.querySelector("table")))) ? "copied" : "the browser does not let a page copy";
    button.focus();
    setTimeout(() => {
      said.textContent = "";
    }, 2500);
  });
  tools.append(button, said);
}

// Shapes and cells with a title say it at once, to the pointer and to the keyboard. One shape of a picture is in the order of the
// tab key, the arrow keys go on from it.
const tip = document.createElement("div");
tip.className = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);

const show = (element, text, x, y) => {
  tip.textContent = text;
  tip.hidden = false;
  const box = element.getBoundingClientRect();
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const left = (x ?? box.left + box.width / 2) + 12;
  const under = (y ?? box.bottom) + 14;
  const over = (y ?? box.top) - height - 10;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  tip.style.top = `${under + height <= innerHeight - 8 || over < 8 ? under : over}px`;
};

const hide = () => {
  tip.hidden = true;
};

const tell = (element, text) => {
  element.addEventListener("pointermove", (event) => show(element, text, event.clientX, event.clientY));
  element.addEventListener("pointerleave", hide);
};

for (const svg of document.querySelectorAll("svg")) {
  const hits = Array.from(svg.querySelectorAll(".hit"));
  hits.forEach((hit, index) => {
    const title = hit.querySelector("title");
    const text = title.textContent;
    title.remove();
    hit.setAttribute("role", "img");
    hit.setAttribute("aria-label", text);
    hit.setAttribute("tabindex", index === 0 ? "0" : "-1");
    tell(hit, text);
    hit.addEventListener("focus", () => show(hit, text));
    hit.addEventListener("blur", hide);
    hit.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const ends = { Home: 0, End: hits.length - 1 };
      const to = step === undefined ? ends[event.key] : (index + step + hits.length) % hits.length;
      if (to === undefined) {
        return;
      }
      event.preventDefault();
      hit.setAttribute("tabindex", "-1");
      hits[to].setAttribute("tabindex", "0");
      hits[to].focus();
    });
  });
}

for (const cell of document.querySelectorAll("td[title]")) {
  const text = cell.title;
  cell.removeAttribute("title");
  tell(cell, text);
}

// Paper has no button to open what is folded.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) {
    details.open = true;
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    hide();
  }
});
