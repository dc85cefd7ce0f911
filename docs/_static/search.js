// The search finds sections, the best first. Sphinx's own finds pages, of which each has all words,
// in the order of the alphabet; no page has all words of a pasted message, with its names and numbers.
// SECTIONS is written by docs/site_texts.py: address, title and text of each.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // Every page has this file, one has the search.

  const MOST = 25; // Sections shown.
  const OF_TITLE = 4; // A word of the title counts as often as so many of the text.
  const OF_NAME = 0.7; // What is said of one name of the reference counts less than a guide.
  const SATURATED = 1.2; // The constants of BM25: how soon one more occurrence counts no more,
  const BY_LENGTH = 0.6; // and how much a long section needs more of them.
  const stemmer = new Stemmer();
  const stems = new Map();
  const wordsOf = (text) => splitQuery(text.toLowerCase());
  const stemOf = (word) => {
    if (!stems.has(word)) stems.set(word, stemmer.stemWord(word));
    return stems.get(word);
  };

  const read = ([address, title, text]) => {
    const worth = address.includes("#django_redislock.") ? OF_NAME : 1;
    const words = wordsOf(text);
    const counts = new Map();
    for (const [list, weight] of [[wordsOf(title), OF_TITLE], [words, 1]]) {
      for (const word of list) counts.set(stemOf(word), (counts.get(stemOf(word)) ?? 0) + weight);
    }
    const line = ` ${words.join(" ")} `;
    return { address, title, text, worth, counts, size: words.length, line };
  };
  const sections = SECTIONS.map(read);

  Search.find = (query) => {
    const usual = sections.reduce((sum, one) => sum + one.size, 0) / sections.length;
    const words = wordsOf(query);
    const terms = [...new Set(words.filter((word) => !stopwords.has(word)).map(stemOf))];
    const weights = new Map(); // A word that few sections have says more.
    for (const term of terms) {
      const having = sections.filter((one) => one.counts.has(term)).length;
      if (having) weights.set(term, Math.log(1 + sections.length / having));
    }
    const pairs = words.slice(1).map((word, i) => ` ${words[i]} ${word} `);
    for (const one of sections) {
      one.score = 0;
      for (const [term, weight] of weights) {
        const count = one.counts.get(term) ?? 0;
        const enough = SATURATED * (1 - BY_LENGTH + (BY_LENGTH * one.size) / usual);
        one.score += (weight * count * (SATURATED + 1)) / (count + enough);
      }
      // Words that stand together there as well: most of a pasted message.
      if (one.score) one.score += pairs.filter((pair) => one.line.includes(pair)).length;
      one.score *= one.worth;
    }
    const found = sections.filter((one) => one.score > 0).sort((a, b) => b.score - a.score);
    return found.slice(0, MOST);
  };

  // The part of a text that has the most of the words.
  const excerpt = (text, terms) => {
    const parts = text.split(/(?<=[.:;!?])\s+/);
    const worth = (part) => new Set(wordsOf(part).map(stemOf).filter((one) => terms.has(one))).size;
    const best = parts.reduce((a, b, i) => (worth(b) > worth(parts[a]) ? i : a), 0);
    const from = parts.slice(best).join(" ");
    return (best ? "… " : "") + (from.length > 240 ? `${from.slice(0, 240)} …` : from);
  };

  Search.query = (query) => {
    const [, terms, , highlighted] = Search._parseQuery(query);
    const found = Search.find(query);
    for (const { address, title, text } of found) {
      const item = document.createElement("li");
      const link = item.appendChild(document.createElement("a"));
      link.href = address;
      link.textContent = title;
      const context = item.appendChild(document.createElement("p"));
      context.className = "context";
      context.textContent = excerpt(text, terms);
      highlighted.forEach((word) => _highlightText(context, word, "highlighted"));
      Search.output.appendChild(item);
    }
    _finishSearch(found.length);
    const most = found.length === MOST ? `The best ${MOST} places` : `${found.length} places`;
    if (found.length) Search.status.innerText = `${most} for “${query}”.`;
  };
});
