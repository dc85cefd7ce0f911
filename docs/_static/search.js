// A pasted message has names and numbers that stand on no page. If no page has all of its words,
// the search finds the pages that have the most of them.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // Every page has this file, one has the search.
  const withAll = Search.performTermsSearch;
  Search.performTermsSearch = (words, excluded) => {
    const found = withAll(words, excluded);
    if (found.length > 0) return found;
    const pages = new Map();
    for (const word of words) {
      for (const page of withAll(new Set([word]), excluded)) {
        pages.set(page[0], [page, 1 + (pages.get(page[0])?.[1] ?? 0)]);
      }
    }
    const most = Math.max(0, ...[...pages.values()].map(([, count]) => count));
    return [...pages.values()].filter(([, count]) => count === most).map(([page]) => page);
  };
});
