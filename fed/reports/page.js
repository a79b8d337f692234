// Script of a report: sorts and filters tables, shows values under the pointer, saves pictures and tables. It asks the
// network for nothing, and a page reads and prints without it.
"use strict";
(() => {
  const make = (tag, keys, ...children) => {
    const element = Object.assign(document.createElement(tag), keys);
    element.append(...children);
    return element;
  };

  const save = (name, type, text) => {
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };

  const csv = (rows) =>
    rows.map((row) => row.map((cell) => (/[",\r\n]/.test(cell) ? `"${`${cell}`.replaceAll('"', '""')}"` : cell)).join(",")).join("\r\n") + "\r\n";

  const button = (text, act) => {
    const made = make("button", { type: "button" }, text);
    made.addEventListener("click", act);
    return made;
  };

  const fileName = (element) => {
    const heading = element.closest("section").querySelector("h2").textContent;
    return `${document.title} ${heading}`.replace(/[^\p{L}\p{N}.=+-]+/gu, "-").slice(0, 80);
  };

  // Tables

  const sortKey = (cell) => {
    const text = cell.textContent.trim();
    const number = Number(cell.dataset.value ?? parseFloat(text));
    return cell.classList.contains("number") ? number : text;
  };

  const compared = (a, b) => {
    if (typeof a === "string") return a.localeCompare(b, undefined, { numeric: true });
    return a - b;
  };

  const sortBy = (table, head, index) => {
    const descends = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", descends ? "descending" : "ascending");
    const body = table.tBodies[0];
    const keyed = [...body.rows].map((row) => [sortKey(row.cells[index]), row]);
    const isMissing = ([key]) => Number.isNaN(key);
    const known = keyed.filter((one) => !isMissing(one)).sort((a, b) => compared(a[0], b[0]) * (descends ? -1 : 1));
    // What has no value is last in either direction.
    body.append(...[...known, ...keyed.filter(isMissing)].map(([, row]) => row));
  };

  for (const table of document.querySelectorAll("table.rows")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, index) => {
      head.scope = "col";
      head.replaceChildren(button(head.textContent, () => sortBy(table, head, index)));
    });
    const rows = [...table.tBodies[0].rows];
    const found = make("span", { role: "status" });
    const filter = make("input", { type: "search", placeholder: "filter rows", ariaLabel: `filter: ${table.caption.textContent}` });
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      const shown = rows.filter((row) => !row.hidden).length;
      found.textContent = shown < rows.length ? `${shown} of ${rows.length} rows` : "";
    });
    const saved = button("save CSV", () => {
      const shown = [...table.rows].filter((row) => !row.hidden);
      const texts = shown.map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
      save(`${fileName(table)}.csv`, "text/csv", csv(texts));
    });
    table.closest("section").querySelector("h2").after(make("div", { className: "tools" }, ...(rows.length > 1 ? [filter, found] : []), saved));
  }

  // Pictures

  const shortNumber = (value, label) => {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    if (!label.startsWith("bytes")) return `${Number(value.toPrecision(4))}`;
    const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(value || 1) / 3)));
    return `${Number((value / 1000 ** power).toPrecision(3))} ${units[power]}`;
  };

  const pictureOf = (svg) => {
    const copy = svg.cloneNode(true);
    copy.querySelector("metadata")?.remove();
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("style", "background: #ffffff; color: #1c1e21");
    return new XMLSerializer().serializeToString(copy);
  };

  const valuesOf = (panels) => {
    const maps = panels.filter((panel) => panel.cells);
    if (maps.length) {
      // The last map has the values of those above it, which are its sums.
      const { labels, columns, rows, cells } = maps.at(-1);
      return csv([labels, ...rows.flatMap((row, y) => columns.map((column, x) => [column, row, cells[y][x]]))]);
    }
    const rows = [["line", "x axis", "x", "y axis", "y"]];
    for (const { labels, lines } of panels)
      for (const line of lines) line.y.forEach((y, index) => rows.push([line.name, labels[0], line.x[index] ?? "", labels[1], y]));
    return csv(rows);
  };

  // Values beside a pointer or, with the arrow keys, at one point after another.
  const showValues = (picture, svg, panels) => {
    const tip = make("div", { className: "tip", role: "status", hidden: true });
    const rule = make("div", { className: "rule", hidden: true });
    picture.append(rule, tip);
    picture.tabIndex = 0;
    const { width, height } = svg.viewBox.baseVal;
    const at = (panel, x) => {
      if (panel.cells) return panel.box[0] + ((x + 0.5) / panel.columns.length) * (panel.box[2] - panel.box[0]);
      const [low, high, value] = panel.log ? [...panel.x, x].map(Math.log10) : [...panel.x, x];
      return panel.box[0] + ((value - low) / (high - low)) * (panel.box[2] - panel.box[0]);
    };
    const nearest = (panel, xs, place) =>
      xs.reduce((best, x, index) => (Math.abs(at(panel, x) - place) < Math.abs(at(panel, xs[best]) - place) ? index : best), 0);
    const hide = () => (tip.hidden = rule.hidden = true);

    const put = (panel, place, ...lines) => {
      tip.replaceChildren(...lines);
      const scale = svg.clientWidth / width;
      const left = place * scale;
      tip.hidden = rule.hidden = false;
      Object.assign(rule.style, { left: `${left}px`, top: `${panel.box[1] * scale}px`, height: `${(panel.box[3] - panel.box[1]) * scale}px` });
      const beside = left + 12 + tip.offsetWidth > picture.clientWidth ? left - 12 - tip.offsetWidth : left + 12;
      Object.assign(tip.style, { left: `${Math.max(0, beside)}px`, top: `${panel.box[1] * scale}px` });
    };

    // Number of the part of a panel that a place lies in, of so many parts of equal size.
    const part = (place, low, high, count) => Math.min(count - 1, Math.max(0, Math.floor(((place - low) / (high - low)) * count)));

    const showCell = (panel, place, height) => {
      const x = part(place, panel.box[0], panel.box[2], panel.columns.length);
      const y = part(height ?? panel.box[1], panel.box[1], panel.box[3], panel.rows.length);
      const [columns, rows, what] = panel.labels;
      const where = [`${columns}: ${panel.columns[x]}`, ...(panel.rows.length > 1 ? [`${rows}: ${panel.rows[y]}`] : [])];
      put(panel, at(panel, x), make("b", {}, where.join(", ")), make("div", {}, `${what}: ${panel.cells[y][x]}`));
    };

    const show = (panel, place, height) => {
      if (panel.cells) return showCell(panel, place, height);
      const found = panel.lines.map((line) => {
        const index = line.x.length ? nearest(panel, line.x, place) : 0;
        return { ...line, x: line.x[index], y: line.y[index] };
      });
      // Lines that end before this point, or begin after it, have no value here.
      const reach = (panel.box[2] - panel.box[0]) / 20;
      const distance = (one) => (one.x === undefined ? 0 : Math.abs(at(panel, one.x) - place));
      const closest = Math.min(...found.filter((one) => one.x !== undefined).map(distance));
      const here = found.filter((one) => distance(one) <= Math.max(reach, closest)).sort((a, b) => b.y - a.y);
      const x = here.find((one) => distance(one) === closest && one.x !== undefined)?.x;
      const head = make("b", {}, x === undefined ? panel.labels[1] : `${panel.labels[0]}: ${shortNumber(x, panel.labels[0])}`);
      const values = [
        head,
        ...here.map((one) => {
          const dot = make("i", {});
          dot.style.background = one.colour;
          return make("div", {}, dot, `${one.name || panel.labels[1]}: ${shortNumber(one.y, panel.labels[1])}`);
        }),
      ];
      put(panel, x === undefined ? place : at(panel, x), ...values);
    };

    svg.addEventListener("pointermove", (event) => {
      const seen = svg.getBoundingClientRect();
      const x = ((event.clientX - seen.left) * width) / seen.width;
      const y = ((event.clientY - seen.top) * height) / seen.height;
      const panel = panels.find(({ box }) => x >= box[0] - 3 && x <= box[2] + 3 && y >= box[1] && y <= box[3]);
      if (panel) show(panel, x, y);
      else hide();
    });
    picture.addEventListener("pointerleave", hide);
    picture.addEventListener("blur", hide);

    const stops = panels.flatMap((panel) => {
      if (panel.cells) return panel.rows.flatMap((_, y) => panel.columns.map((_, x) => [panel, at(panel, x), panel.box[1] + ((y + 0.5) / panel.rows.length) * (panel.box[3] - panel.box[1])]));
      const longest = panel.lines.reduce((most, line) => (line.x.length > most.length ? line.x : most), []);
      return longest.map((x) => [panel, at(panel, x)]);
    });
    let stop = -1;
    picture.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: stop + 1, ArrowLeft: stop - 1, Home: 0, End: stops.length - 1 };
      if (event.key === "Escape") hide();
      if (!(event.key in moves) || !stops.length) return;
      event.preventDefault();
      stop = Math.min(stops.length - 1, Math.max(0, moves[event.key]));
      show(...stops[stop]);
    });
  };

  for (const figure of document.querySelectorAll("figure")) {
    const drawn = [...figure.querySelectorAll(".picture")].map((picture) => {
      const svg = picture.querySelector("svg");
      const kept = svg.querySelector("metadata");
      return { picture, svg, panels: kept ? JSON.parse(kept.textContent) : [] };
    });
    for (const { picture, svg, panels } of drawn) if (panels.length) showValues(picture, svg, panels);
    const shown = () => drawn.find(({ picture }) => picture.offsetParent) ?? drawn[0];
    const tools = [button("save picture", () => save(`${fileName(figure)}.svg`, "image/svg+xml", pictureOf(shown().svg)))];
    if (drawn[0].panels.length) tools.push(button("save CSV", () => save(`${fileName(figure)}.csv`, "text/csv", valuesOf(drawn[0].panels))));
    figure.append(make("div", { className: "tools" }, ...tools));
  }
})();
