(() => {
  for (const tabbed of document.querySelectorAll(".tabbed")) {
    const buttons = [...tabbed.querySelectorAll(".tabs button")], tables = [...tabbed.querySelectorAll(".tab")];
    const show = (place) => {
      tables.forEach((table, i) => { table.hidden = i !== place; });
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === place)));
    };
    tabbed.firstElementChild.hidden = false;
    buttons.forEach((button, i) => button.addEventListener("click", () => show(i)));
    show(0);
  }

  const table = document.getElementById("records");
  if (!table) return;
  const data = JSON.parse(document.getElementById("record-data").textContent);
  const dash = "\u2013";
  // The same rules as flopwatch/numbers.py, which writes all other numbers of this page.
  const digits = (v) => v >= 100 ? Math.round(v).toLocaleString("en") : v >= 10 ? v.toFixed(1) : v >= 0.1 ? v.toFixed(2) : String(Number(v.toPrecision(2)));
  const written = {
    text: (v) => v, count: (v) => v.toLocaleString("en"), rate: digits,
    seconds: (v) => v >= 1 ? digits(v) + " s" : digits(1e3 * v) + " ms",
    bytes: (v) => v >= 2 ** 30 ? digits(v / 2 ** 30) + " GiB" : digits(v / 2 ** 20) + " MiB",
    share: (v) => (v === 1 ? "100" : v >= 0.01 ? (100 * v).toFixed(1) : String(Number((100 * v).toPrecision(2)))) + " %",
  };
  const value = (row, column) => {
    const found = row[column];
    return data.columns[column].words ? data.columns[column].words[found] : found;
  };
  const search = data.rows.map((row) => data.columns.map((c, i) => c.kind === "text" ? value(row, i) : "").join(" ").toLowerCase());
  const batch = 200;
  const box = document.getElementById("record-filter"), choice = document.getElementById("record-choice");
  const more = document.getElementById("more-records"), told = document.getElementById("record-count");
  let order = data.rows.map((_, i) => i), kept = order, limit = batch, sorted = -1, up = true;

  const cell = (row, column) => {
    const td = document.createElement("td"), found = value(row, column), { kind, mark } = data.columns[column];
    if (kind !== "text") td.className = "n";
    td.textContent = found === null || found === undefined ? dash : written[kind](found);
    if (mark !== undefined && row[mark]) td.textContent = "~" + td.textContent;
    if (column === data.choice) td.className = "f-" + data.tones[row[column]];
    return td;
  };
  const draw = () => {
    const body = document.createElement("tbody");
    for (const place of kept.slice(0, limit)) {
      const tr = document.createElement("tr");
      tr.dataset.place = place;
      data.columns.forEach((column, i) => { if (column.shown) tr.append(cell(data.rows[place], i)); });
      body.append(tr);
    }
    table.tBodies[0].replaceWith(body);
    const numbers = [Math.min(limit, kept.length), kept.length, order.length];
    const said = kept.length < order.length ? data.texts.found : data.texts.shown;
    told.textContent = said.replace(/\{(\d)\}/g, (_, place) => numbers[place].toLocaleString("en"));
    more.hidden = kept.length <= limit;
  };
  const filter = () => {
    const terms = box.value.toLowerCase().split(/\s+/).filter(Boolean), wanted = choice.value;
    kept = order.filter((i) => (!wanted || value(data.rows[i], data.choice) === wanted) && terms.every((t) => search[i].includes(t)));
    limit = batch; draw();
  };
  table.tHead.addEventListener("click", (event) => {
    const th = event.target.closest("th"); if (!th) return;
    const column = Number(th.dataset.column);
    up = sorted === column ? !up : data.columns[column].kind === "text" || data.columns[column].kind === "count";
    sorted = column;
    const sign = up ? 1 : -1;
    order.sort((a, b) => {
      const x = value(data.rows[a], column), y = value(data.rows[b], column);
      if (x === y) return a - b;
      if (x === null) return 1;
      if (y === null) return -1;
      return x < y ? -sign : sign;
    });
    for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", up ? "ascending" : "descending");
    filter();
  });
  table.addEventListener("click", (event) => {
    const tr = event.target.closest("tbody tr"); if (!tr || tr.className === "more") return;
    if (tr.nextSibling && tr.nextSibling.className === "more") { tr.nextSibling.remove(); return; }
    const row = data.rows[Number(tr.dataset.place)], line = document.createElement("tr"), td = document.createElement("td");
    line.className = "more"; td.colSpan = tr.children.length;
    td.textContent = data.columns.map((c, i) => c.shown ? "" : value(row, i)).filter((t) => typeof t === "string" && t).join("\n") || data.texts.nothing;
    line.append(td); tr.after(line);
  });
  box.addEventListener("input", filter); choice.addEventListener("change", filter);
  more.addEventListener("click", () => { limit += batch; draw(); });
  draw();
})();
