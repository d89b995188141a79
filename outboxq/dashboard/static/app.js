// The theme, live pages that rest in hidden tabs, charts, shortcuts, and a box that selects all rows. Every page works without this file.
(() => {
  "use strict";
  const root = document.documentElement;
  const find = (selector, within = document) => within.querySelector(selector);
  const store = {
    get: (key) => { try { return localStorage.getItem(key); } catch { return null; } },
    set: (key, value) => { try { localStorage.setItem(key, value); } catch { /* private windows */ } },
  };

  // Theme: the system's, until a user chooses.
  const themes = ["auto", "light", "dark"];
  const showTheme = (theme) => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    const button = find("#theme");
    if (button) button.textContent = { auto: "◐ auto", light: "○ light", dark: "● dark" }[theme];
    button?.setAttribute("aria-label", `Theme: ${theme}`);
  };
  let theme = themes.includes(store.get("outboxq-theme")) ? store.get("outboxq-theme") : "auto";

  // Live: a stream while the tab is seen, and the user has not paused it.
  let wanted = store.get("outboxq-live") !== "off";
  const setLive = () => {
    const stream = find("#stream"), button = find("#live");
    if (!stream || !window.htmx) return;
    const on = wanted && !document.hidden;
    const source = find("template", stream.parentElement);
    window.htmx.swap(stream, on ? source.innerHTML : "", { swapStyle: "innerHTML", swapDelay: 0, settleDelay: 0 });
    button.hidden = false;
    button.setAttribute("aria-pressed", String(wanted));
    button.classList.toggle("on", on);
    button.classList.remove("trouble");
    find("span:last-child", button).textContent = wanted ? `Live, every ${button.dataset.seconds} s` : "Paused";
  };

  // Charts: the numbers are those of the page's own JSON. The SVG below stays if they do not come.
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const seriesOf = {
    wait: (row) => [row.wait_p50_seconds, row.wait_p95_seconds, row.wait_p99_seconds],
    run: (row) => [row.run_p50_seconds, row.run_p95_seconds, row.run_p99_seconds],
  };
  const inTime = (_, seconds) => (
    seconds == null ? "" : !seconds ? "0" : seconds < 1 ? `${(seconds * 1000).toPrecision(3)} ms` : `${seconds.toPrecision(3)} s`
  );
  const draw = (figure, history) => {
    const name = figure.dataset.plot, svg = find("svg", figure);
    if (!history.length || !window.uPlot || !svg) return;
    const labels = [...figure.querySelectorAll(".legend li")].map((item) => item.textContent.trim());
    const strokes = ["a", "b", "c"];
    const rows = history.map(seriesOf[name]);
    const data = [history.map((row) => Date.parse(row.at) / 1000)];
    labels.forEach((_, place) => data.push(rows.map((row) => row[place])));
    const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
    // `light-dark()` has no meaning for a canvas: colours are read from elements that have them.
    const probe = document.createElement("span");
    figure.append(probe);
    const seen = (tone) => { probe.className = `key tone-${tone}`; return getComputedStyle(probe).backgroundColor; };
    const series = labels.map((label, place) => (
      { label, stroke: seen(strokes[place]), width: 1.5, points: { show: history.length < 3 }, value: inTime }
    ));
    axis.stroke = getComputedStyle(find(".legend", figure)).color;
    axis.grid.stroke = getComputedStyle(figure.closest(".card")).borderTopColor;
    probe.remove();
    // In UTC, as everywhere else here: times of a day, or days.
    const parts = data[0].at(-1) - data[0][0] > 172800 ? { month: "short", day: "numeric" } : { timeStyle: "short", hour12: false };
    const clock = (time) => new Date(time * 1000).toLocaleString([], { ...parts, timeZone: "UTC" });
    axis.values = (_, splits) => splits.map(clock);
    axis.size = 24;
    // Whole minutes: what happened is known by the minute.
    const incrs = [1, 2, 5, 10, 15, 30, 60, 120, 240, 360, 720, 1440, 2880, 7200].map((minutes) => minutes * 60);
    const seconds = { ...axis, size: 58, values: (_, splits) => splits.map((each) => inTime(null, each)) };
    const legend = { markers: { width: 0, fill: (chart, place) => chart.series[place].stroke(chart, place) } };
    const at = { label: "\u00a0", value: (_, time) => (time == null ? "" : clock(time)) };
    const box = document.createElement("div");
    box.className = "plot";
    const size = () => ({ width: figure.clientWidth - 32, height: 149 });
    const plot = new window.uPlot({ ...size(), padding: [8, 18, 0, 0], legend, series: [at, ...series], axes: [{ ...axis, incrs }, seconds] }, data, box);
    svg.replaceWith(box);
    find(".legend", figure).hidden = true;
    new ResizeObserver(() => plot.setSize(size())).observe(figure);
  };
  const drawAll = async () => {
    const figures = document.querySelectorAll("[data-plot]");
    if (!figures.length || !window.uPlot) return;
    const answer = await fetch(location.href, { headers: { accept: "application/json" } });
    if (answer.ok) { const { history } = await answer.json(); figures.forEach((figure) => draw(figure, history)); }
  };

  // Shortcuts: g and a letter goes to a page, / to the first filter, ? lists them.
  let before = "";
  const typing = (element) => element.closest("input, textarea, select, [contenteditable]");
  const press = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
    const link = before === "g" && find(`.side [data-key="${CSS.escape(event.key)}"]`);
    if (link) link.click();
    else if (event.key === "?") find("#keys")?.showModal();
    else if (event.key === "/" && find("main input:not([type=hidden])")) {
      event.preventDefault();
      find("main input:not([type=hidden])").focus();
    } else if (event.key === "p" && find("#live")) find("#live").click();
    before = event.key;
  };

  showTheme(theme);
  document.addEventListener("DOMContentLoaded", () => {
    const themeButton = find("#theme"), liveButton = find("#live"), keysButton = find("#show-keys");
    if (themeButton) {
      themeButton.hidden = false;
      showTheme(theme);
      themeButton.addEventListener("click", () => {
        theme = themes[(themes.indexOf(theme) + 1) % themes.length];
        store.set("outboxq-theme", theme);
        showTheme(theme);
      });
    }
    if (keysButton) {
      keysButton.hidden = false;
      keysButton.addEventListener("click", () => find("#keys").showModal());
    }
    if (liveButton) {
      liveButton.addEventListener("click", () => {
        wanted = !wanted;
        store.set("outboxq-live", wanted ? "on" : "off");
        setLive();
      });
      document.addEventListener("visibilitychange", setLive);
      const trouble = (on) => liveButton.classList.toggle("trouble", on);
      document.body.addEventListener("htmx:sseError", () => trouble(true));
      document.body.addEventListener("htmx:sseOpen", () => trouble(false));
      setLive();
    }
    const all = find("#pick-all");
    if (all) {
      all.hidden = false;
      all.addEventListener("change", () => document.querySelectorAll("[form=selected]").forEach((box) => { box.checked = all.checked; }));
    }
    find(".side [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
    document.addEventListener("keydown", press);
    drawAll().catch(() => { /* the SVG stays */ });
  });
})();
