// Keeps the part of a page with id "live" up to date: a job's page by its events, or by asking where those do not
// come; the list of jobs by asking. Everything else on the pages works without this file.
"use strict";
(() => {
  const live = document.getElementById("live");
  if (!live) return;
  const job = live.dataset.job;
  const FINAL = ["done", "failed", "cancelled"];
  let refreshing = false;
  let refreshed = 0;

  async function refresh() {
    if (refreshing) return;
    refreshing = true;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      if (!answer.ok) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = [...live.querySelectorAll("details")].map((part) => part.open);
      live.replaceChildren(...page.getElementById("live").childNodes);
      live.querySelectorAll("details").forEach((part, number) => (part.open = open[number] || false));
    } catch {
      // The next look may find the service again.
    } finally {
      refreshing = false;
      refreshed = Date.now();
    }
  }

  function show(state) {
    const done = document.getElementById("done");
    const progress = document.getElementById("progress");
    if (done) done.textContent = state.done;
    if (progress) progress.value = state.done;
    if (FINAL.includes(state.state)) {
      refreshed = 0;
      void refresh();
      return true;
    }
    const badge = live.querySelector(".state");
    if (badge && badge.textContent !== state.state) void refresh();
    else if (Date.now() - refreshed > 2000) void refresh();
    return false;
  }

  function ask() {
    const timer = setInterval(async () => {
      try {
        const answer = await fetch(`/v1/jobs/${job}`, { credentials: "same-origin" });
        if (answer.ok && show(await answer.json())) clearInterval(timer);
      } catch {
        // Asked again in two seconds.
      }
    }, 2000);
  }

  function listen() {
    if (!window.EventSource) return ask();
    const events = new EventSource(`/v1/jobs/${job}/events`);
    const heard = (event) => {
      if (show(JSON.parse(event.data))) events.close();
    };
    for (const name of ["job", "end"]) events.addEventListener(name, heard);
    events.onerror = () => {
      if (events.readyState === EventSource.CLOSED) ask();
    };
  }

  if (job) listen();
  else if (Number(live.dataset.refresh)) setInterval(refresh, 1000 * Number(live.dataset.refresh));
})();
