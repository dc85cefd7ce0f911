/* Counts the clocks on, and brings the page up to date without losing what is ticked, the focus or
   the place one has scrolled to. Without it the page works too, it only stands still. */
"use strict";
{
    const PAUSED = "redislock-paused";
    const LONGEST_WAIT = 60_000; // ms
    let loaded = performance.now();

    /* The same words as humanize.duration(). */
    function words(seconds) {
        if (seconds < 10) {
            return `${seconds.toFixed(1)} s`;
        }
        const two = (number) => String(number).padStart(2, "0");
        const whole = Math.floor(seconds);
        if (whole < 60) {
            return `${whole} s`;
        }
        if (whole < 3600) {
            return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
        }
        if (whole < 86400) {
            return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
        }
        return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
    }

    function tick() {
        const passed = (performance.now() - loaded) / 1000;
        for (const clock of document.querySelectorAll("[data-redislock-up]")) {
            clock.textContent = words(Number(clock.dataset.redislockUp) + passed);
        }
        for (const clock of document.querySelectorAll("[data-redislock-down]")) {
            const left = Math.max(0, Number(clock.dataset.redislockDown) - passed);
            clock.textContent = words(left);
            const gauge = clock.nextElementSibling;
            if (gauge instanceof HTMLProgressElement) {
                gauge.value = left;
            }
        }
    }

    function rows(root) {
        return root.querySelector("#result_list tbody");
    }

    function boxes() {
        return Array.from(document.querySelectorAll("#result_list input.action-select"));
    }

    /* Django's script counts the boxes that were there when the page was loaded; this is for those
       that are there now. */
    const nowThere = {
        forEach: (each) => boxes().forEach(each),
        get length() { return boxes().length; },
        [Symbol.iterator]: () => boxes()[Symbol.iterator](),
    };

    function showCount() {
        const counter = document.querySelector("span.action-counter");
        const toggle = document.getElementById("action-toggle");
        if (!counter || !toggle) {
            return;
        }
        const all = boxes();
        const ticked = all.filter((box) => box.checked).length;
        counter.dataset.actionsIcnt = all.length;
        counter.textContent = interpolate(
            ngettext("%(sel)s of %(cnt)s selected", "%(sel)s of %(cnt)s selected", ticked),
            {sel: ticked, cnt: all.length},
            true
        );
        toggle.checked = all.length > 0 && ticked === all.length;
    }

    function replaceRows(fresh) {
        const table = rows(document);
        // A box stands for a lease: that of a newer one is not ticked because the old one was.
        const ticked = new Set(boxes().filter((box) => box.checked).map((box) => box.value));
        const focused = document.activeElement;
        const within = table.contains(focused) ? focused.getAttribute("href") || focused.value : null;
        table.replaceChildren(...rows(fresh).children);
        for (const box of boxes()) {
            box.checked = ticked.has(box.value);
            box.closest("tr").classList.toggle("selected", box.checked);
        }
        if (within !== null) {
            const again = Array.from(table.querySelectorAll("a, input")).find(
                (one) => (one.getAttribute("href") || one.value) === within
            );
            if (again) {
                again.focus({preventScroll: true});
            }
        }
        showCount();
    }

    function replace(fresh) {
        // Messages are shown once: those that came with this answer must not get lost.
        const news = fresh.querySelector("#content-start > .messagelist");
        const list = document.querySelector("#content-start > .messagelist");
        if (news && list) {
            list.append(...news.children);
        } else if (news) {
            document.getElementById("content").before(news);
        }
        replaceParts(fresh, "#redislock-problems");
        // Better what was true a moment ago than nothing, as long as it says when that was.
        const stale = !fresh.getElementById("redislock-as-of").textContent;
        showStale(stale);
        if (stale) {
            return;
        }
        if (rows(document) && rows(fresh)) {
            replaceRows(fresh);
        } else if (rows(document) || rows(fresh)) {
            // The first lock of an empty list, or the last one went: Django's page differs.
            location.reload();
            return;
        }
        replaceParts(fresh, "[data-redislock-live]:not(#redislock-problems)");
        for (const selector of [".paginator", "#changelist-filter", "#toolbar .small"]) {
            const part = document.querySelector(selector);
            const other = fresh.querySelector(selector);
            if (part && other && !part.contains(document.activeElement)) {
                part.replaceChildren(...other.childNodes);
            }
        }
        loaded = performance.now();
        tick();
    }

    function replaceParts(fresh, selector) {
        for (const part of document.querySelectorAll(selector)) {
            const other = fresh.getElementById(part.id);
            if (other) {
                part.replaceChildren(...other.childNodes);
            }
        }
    }

    function showStale(stale) {
        document.body.classList.toggle("redislock-stale", stale);
    }

    function start(bar) {
        const seconds = Number(bar.dataset.redislockRefresh);
        const trouble = document.createElement("span");
        trouble.setAttribute("role", "status");
        const button = document.createElement("button");
        button.type = "button";
        bar.append(trouble, button);
        let paused = sessionStorage.getItem(PAUSED) === "yes";
        let timer = 0;

        function say() {
            button.textContent = paused ? "Resume" : "Pause";
            bar.classList.toggle("redislock-paused", paused);
        }

        function busy() {
            // Somebody marks text in the table, to copy it.
            const marked = document.getSelection();
            const where = document.getElementById("content-main");
            return document.hidden
                || (marked && !marked.isCollapsed && where.contains(marked.anchorNode));
        }

        /* The page as it is now; null if the site cannot be reached, or answers that it cannot. */
        async function fetched() {
            try {
                const answer = await fetch(location.href, {
                    credentials: "same-origin",
                    signal: AbortSignal.timeout(LONGEST_WAIT),
                });
                const text = await answer.text();
                return answer.status < 500 ? new DOMParser().parseFromString(text, "text/html") : null;
            } catch {
                return null;
            }
        }

        async function refresh() {
            if (!paused && !busy()) {
                const fresh = await fetched();
                trouble.textContent = fresh ? "" : "the site cannot be reached, trying again";
                if (!fresh) {
                    showStale(true);
                } else if (!fresh.querySelector("[data-redislock-refresh]")) {
                    // Signed out, or no longer allowed: let the browser show what there is.
                    location.reload();
                    return;
                } else if (!paused && !busy()) {
                    replace(fresh);
                }
            }
            timer = setTimeout(refresh, seconds * 1000);
        }

        button.addEventListener("click", () => {
            paused = !paused;
            sessionStorage.setItem(PAUSED, paused ? "yes" : "no");
            say();
            if (!paused) {
                clearTimeout(timer);
                refresh();
            }
        });
        say();
        timer = setTimeout(refresh, seconds * 1000);
    }

    document.addEventListener("DOMContentLoaded", () => {
        tick();
        setInterval(tick, 250);
        const bar = document.querySelector("[data-redislock-refresh]");
        if (bar) {
            start(bar);
        }
    });

    // After Django's own script has begun to watch the boxes: the last one to count is right.
    window.addEventListener("load", () => {
        if (boxes().length && window.Actions) {
            window.Actions(nowThere);
        }
    });
}
