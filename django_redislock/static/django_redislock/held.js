/* Counts the clocks on, and brings the page up to date without losing what is ticked, the focus or
   the place one has scrolled to. Without it the page works too, it only stands still. */
"use strict";
{
    const STOPPED = "redislock-stopped";
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

    function show(clock, seconds) {
        const text = words(seconds);
        // A new text would take its mark away.
        if (clock.textContent !== text && !marked().some((range) => range.intersectsNode(clock))) {
            clock.textContent = text;
        }
    }

    /* What somebody marks on the page, to copy it. */
    function marked() {
        const selection = document.getSelection();
        if (!selection || selection.isCollapsed) {
            return [];
        }
        const content = document.getElementById("content");
        return Array.from({length: selection.rangeCount}, (_, number) => selection.getRangeAt(number))
            .filter((range) => range.intersectsNode(content));
    }

    function tick() {
        const passed = (performance.now() - loaded) / 1000;
        for (const clock of document.querySelectorAll("[data-redislock-up]")) {
            show(clock, Number(clock.dataset.redislockUp) + passed);
        }
        for (const clock of document.querySelectorAll("[data-redislock-down]")) {
            const left = Math.max(0, Number(clock.dataset.redislockDown) - passed);
            show(clock, left);
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

    function watchBoxes() {
        if (boxes().length && window.Actions) {
            window.Actions(nowThere, {parent: document}); // unfold's own script wants the latter.
        }
    }

    function showCount() {
        const counter = document.querySelector("span.action-counter");
        const toggle = document.querySelector("#action-toggle, .action-toggle");
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

    /* What a person may have typed, chosen or opened is theirs, and not the server's. */
    const THEIRS = "input, select, textarea";
    const THEIR_ATTRIBUTES = {DETAILS: ["open"]};
    /* What other scripts of the page have set or put there, and no answer of the server has: unfold's
       shows and hides, jazzmin's draws its own select. */
    const OF_SCRIPTS = ["style", "x-cloak"];
    const BY_SCRIPTS = ".select2";

    /* What tells a child from its neighbours, however many came or went: a row by the link to its
       lock, whoever holds that now. */
    function keyOf(node) {
        if (node.nodeType !== Node.ELEMENT_NODE) {
            return node.nodeName;
        }
        const link = node.matches("tr, li") && node.querySelector("a");
        return `${node.nodeName} ${node.id || (link && link.getAttribute("href")) || ""}`;
    }

    /* Make *node* look like *other* with as few changes as possible: what stays the same keeps the
       focus, what was typed, and what is marked. */
    function update(node, other) {
        if (node.isEqualNode(other)) {
            return;
        }
        if (node.nodeType !== Node.ELEMENT_NODE) {
            node.nodeValue = other.nodeValue;
        } else if (node.matches("input.action-select") && node.value !== other.value) {
            // A box stands for a lease: that of a newer one is not ticked because the old one was.
            node.replaceWith(document.importNode(other, true));
        } else if (!node.matches(THEIRS)) {
            updateAttributes(node, other);
            updateChildren(node, other);
        }
    }

    function updateAttributes(node, other) {
        const theirs = THEIR_ATTRIBUTES[node.nodeName] || [];
        for (const name of new Set([...node.getAttributeNames(), ...other.getAttributeNames()])) {
            const value = other.getAttribute(name);
            if (OF_SCRIPTS.includes(name) || theirs.includes(name) || node.getAttribute(name) === value) {
                continue;
            }
            if (value === null) {
                node.removeAttribute(name);
            } else {
                node.setAttribute(name, value);
            }
        }
    }

    function updateChildren(node, other) {
        const old = new Map();
        for (const child of node.childNodes) {
            const key = keyOf(child);
            old.set(key, [...old.get(key) || [], child]);
        }
        const pairs = Array.from(other.childNodes, (child) => [(old.get(keyOf(child)) || []).shift(), child]);
        for (const gone of Array.from(old.values()).flat()) {
            if (!(gone instanceof Element && gone.matches(BY_SCRIPTS))) {
                gone.remove();
            }
        }
        let next = node.firstChild;
        for (const [child, fresh] of pairs) {
            if (child && child === next) {
                next = next.nextSibling;
            } else {
                node.insertBefore(child || document.importNode(fresh, true), next);
            }
            if (child) {
                update(child, fresh);
            }
        }
    }

    function updateList(fresh) {
        const form = document.getElementById("changelist-form");
        if (!form) {
            return; // It is the page of one lock.
        }
        const table = rows(document);
        const ticked = new Set(boxes().filter((box) => box.checked).map((box) => box.value));
        update(form, fresh.getElementById("changelist-form"));
        for (const box of boxes()) {
            box.checked = ticked.has(box.value);
            box.closest("tr").classList.toggle("selected", box.checked);
        }
        if (table !== rows(document)) {
            watchBoxes();
        }
        showCount();
        for (const selector of ["#changelist-filter", "#toolbar"]) {
            const part = document.querySelector(selector);
            const other = fresh.querySelector(selector);
            if (part && other) {
                update(part, other);
            }
        }
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
        updateParts(fresh, "#redislock-problems");
        // Better what was true a moment ago than nothing, as long as it says when that was.
        const stale = !fresh.getElementById("redislock-as-of").textContent;
        showStale(stale);
        if (stale) {
            return;
        }
        const focused = document.activeElement;
        updateList(fresh);
        updateParts(fresh, "[data-redislock-live]:not(#redislock-problems)");
        if (focused.isConnected && focused !== document.activeElement) {
            focused.focus({preventScroll: true}); // It was moved.
        }
        loaded = performance.now();
        tick();
    }

    function updateParts(fresh, selector) {
        for (const part of document.querySelectorAll(selector)) {
            const other = fresh.getElementById(part.id);
            if (other) {
                update(part, other);
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
        let stopped = sessionStorage.getItem(STOPPED) === "yes";
        let timer = 0;

        function say() {
            button.textContent = stopped ? "Refresh again" : "Stop refreshing";
        }

        function busy() {
            return document.hidden || marked().length > 0;
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
            if (!stopped && !busy()) {
                const fresh = await fetched();
                trouble.textContent = fresh ? "" : "the site cannot be reached, trying again";
                if (!fresh) {
                    showStale(true);
                } else if (!fresh.querySelector("[data-redislock-refresh]")) {
                    // Signed out, or no longer allowed: let the browser show what there is.
                    location.reload();
                    return;
                } else if (!stopped && !busy()) {
                    replace(fresh);
                }
            }
            timer = setTimeout(refresh, seconds * 1000);
        }

        button.addEventListener("click", () => {
            stopped = !stopped;
            sessionStorage.setItem(STOPPED, stopped ? "yes" : "no");
            say();
            if (!stopped) {
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
    window.addEventListener("load", watchBoxes);
}
