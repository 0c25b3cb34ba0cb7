"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;  // never innerHTML: texts come from a model
    return element;
  };

  // Light and dark: as the system has it, until the button is used.
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("ngu-theme"); } catch { return null; } };
  const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const named = () => { find("theme").textContent = isDark() ? "Light" : "Dark"; };
  if (stored()) root.dataset.theme = stored();
  find("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("ngu-theme", root.dataset.theme); } catch { /* a page from a file may not store */ }
    named();
  });
  dark.addEventListener("change", named);
  named();

  // What a word means, beside it: on hover, on touch and by keyboard.
  const tip = make("div");
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  document.body.append(tip);
  let term = null;
  const explain = () => {
    tip.hidden = !term;
    if (!term) return;
    tip.textContent = term.dataset.tip;
    const at = term.getBoundingClientRect();
    const below = at.bottom + 6 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(16, Math.min(at.left, innerWidth - tip.offsetWidth - 16))}px`;
    tip.style.top = `${below ? at.bottom + 6 : at.top - 6 - tip.offsetHeight}px`;
  };
  for (const name of ["pointerover", "focusin", "focusout"]) {
    document.addEventListener(name, (event) => {
      term = name !== "focusout" && event.target.closest ? event.target.closest(".term") : null;
      explain();
    });
  }
  document.addEventListener("scroll", () => {
    if (term && !term.matches(":hover, :focus")) term = null;
    explain();
  }, true);

  // Files of the prompts that were given up.
  const save = (name, type, text) => {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const exports = {
    csv: () => {
      const keys = Object.keys(data.given_up[0]);
      const rows = [keys, ...data.given_up.map((row) => keys.map((key) => row[key]))];
      save("given-up.csv", "text/csv", rows.map((row) => row.map(cell).join(",") + "\r\n").join(""));
    },
    json: () => save("given-up.json", "application/json", JSON.stringify(data.given_up, null, 1)),
  };
  for (const button of document.querySelectorAll("[data-export]")) {
    button.addEventListener("click", exports[button.dataset.export]);
  }

  // The browser of texts.
  if (!find("browser-list")) return;
  const MOST = 150;
  const LONG = 320;  // characters that are shown at once
  const number = (x) => (x === null ? "–" : String(Math.round(x * 1000) / 1000).replace("-", "−"));
  const several = data.runs.length > 1;
  const prompts = data.runs.flatMap((run, i) => run.prompts.map((prompt) => ({ ...prompt, run: i })));
  for (const prompt of prompts) prompt.haystack = `${prompt.id} ${prompt.text} ${prompt.answer}`.toLowerCase();
  let chosen = null;

  const matches = (prompt) => {
    const outcome = find("outcome").value;
    return prompt.haystack.includes(find("search").value.toLowerCase())
      && (!find("bucket").value || prompt.bucket === find("bucket").value)
      && (!outcome || prompt.outcomes.includes(outcome))
      && (!find("which-run").value || prompt.run === Number(find("which-run").value));
  };
  const list = () => {
    const shown = prompts.filter(matches);
    find("browser-list").replaceChildren(...shown.slice(0, MOST).map((prompt) => {
      const button = make("button");
      button.setAttribute("aria-current", String(prompt === chosen));
      const id = make("span", "id");
      if (several) id.append(make("span", `dot r${prompt.run}`));
      id.append(prompt.text ? prompt.text.trim().replace(/\s+/g, " ").slice(0, 60) : prompt.id);
      const facts = [prompt.bucket.replace("_", " "), `${prompt.right} of ${prompt.tried} right`];
      if (prompt.given_up) facts.push(`given up ${prompt.given_up}×`);
      button.append(id, make("small", "", facts.filter(Boolean).join(", ")));
      button.addEventListener("click", () => choose(prompt));
      return button;
    }));
    find("n-shown").textContent = `${Math.min(shown.length, MOST)} of ${prompts.length} prompts`
      + (shown.length > MOST ? `; ${shown.length - MOST} more match` : "");
    return shown;
  };
  const alike = (rows) => {  // completions of a round that are the same in all that is shown: once, with their number
    const kinds = new Map();
    for (const row of rows) {
      const key = JSON.stringify(row);
      kinds.set(key, { row, n: (kinds.has(key) ? kinds.get(key).n : 0) + 1 });
    }
    return [...kinds.values()];
  };
  const attempt = ({ row, n }) => {
    const [reward, reason, version, isCut, nTokens, text, advantage, step] = row;
    const box = make("div", "try");
    const kind = reward === null ? "silent" : reward >= 1 ? "right" : "wrong";
    box.append(make("div", `reward ${kind}`, (reward === null ? "no verdict" : number(reward)) + (n > 1 ? `  × ${n}` : "")));
    const whole = make("pre", "mono", data.words[text] || "(empty)");
    box.append(whole);
    if (data.words[text].length > LONG) {
      whole.classList.add("long-text");
      const more = make("button", "more", "show all");
      more.addEventListener("click", () => {
        more.textContent = whole.classList.toggle("long-text") ? "show all" : "show less";
      });
      box.append(more);
    }
    const facts = [];
    if (data.words[reason]) facts.push(data.words[reason]);
    facts.push(version === null ? "version unknown" : `version ${version}`);
    facts.push(`${nTokens} ${nTokens === 1 ? "token" : "tokens"}, ${isCut ? "cut by the length limit" : "finished"}`);
    if (step !== null) facts.push(advantage === null ? `left out of step ${step}` : `advantage ${advantage > 0 ? "+" : ""}${number(advantage)} in step ${step}`);
    box.append(make("small", "", facts.join(" · ")));
    return box;
  };
  const choose = (prompt) => {
    chosen = prompt;
    const head = make("p", "note", `${several ? data.runs[prompt.run].label + ", " : ""}prompt ${prompt.id}${prompt.bucket ? ", " + prompt.bucket.replace("_", " ") : ""}`);
    const parts = [head];
    if (prompt.text) parts.push(make("div", "prompt mono", prompt.text));
    if (prompt.answer) parts.push(make("p", "mono", `gold answer: ${prompt.answer}`));
    const left = prompt.dropped ? `; ${prompt.dropped} rounds between them are left out` : "";
    parts.push(make("p", "note", `${prompt.visits} visits, ${prompt.right} of ${prompt.tried} completions right, given up ${prompt.given_up} times. Shown: ${prompt.rounds.length} rounds${left}.`));
    for (const [visit, round, t, tries] of prompt.rounds) {
      parts.push(make("div", "round", `visit ${visit + 1}, round ${round}, after ${Math.round(t)} s`), ...alike(tries).map(attempt));
    }
    find("browser-detail").replaceChildren(...parts);
    find("browser-detail").scrollTop = 0;
    list();
  };
  for (const id of ["search", "bucket", "outcome", "which-run"]) find(id).addEventListener("input", list);
  const follow = () => {
    const match = /^#prompt\/(\d+)\/(.*)$/.exec(location.hash);
    if (!match) return;
    let id = match[2];
    try { id = decodeURIComponent(id); } catch { /* as it is */ }
    const prompt = prompts.find((p) => p.run === Number(match[1]) && p.id === id);
    if (!prompt) return;
    for (const control of ["search", "bucket", "outcome", "which-run"]) find(control).value = "";
    choose(prompt);
    find("browser").scrollIntoView();
  };
  addEventListener("hashchange", follow);
  const shown = list();
  if (shown.length) choose(shown[0]);
  follow();
})();
