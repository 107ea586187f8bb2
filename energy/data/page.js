"use strict";
(function () {
  const root = document.documentElement;
  const toggle = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (toggle) toggle.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });

  const download = document.getElementById("download");
  if (download) download.addEventListener("click", () => {
    const text = document.getElementById("report").textContent;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = "energy.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  const value = (row, column) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? parseFloat(cell.dataset.value) : cell.textContent;
  };
  // A value that is missing stays last, whichever way the column is sorted.
  const order = (a, b, sign) => {
    const gone = (x) => x === "–" || Number.isNaN(x);
    if (gone(a) || gone(b)) return gone(a) - gone(b);
    return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  };
  document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    head.parentNode.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const column = head.cellIndex, sign = down ? -1 : 1;
    [...body.rows].sort((a, b) => order(value(a, column), value(b, column), sign)).forEach((row) => body.append(row));
  }));

  const choose = document.getElementById("raster-choice");
  if (choose) {
    const show = () => document.querySelectorAll(".rasterbox").forEach((box) => { box.hidden = box.id !== choose.value; });
    choose.addEventListener("change", show);
    show();
  }
})();
