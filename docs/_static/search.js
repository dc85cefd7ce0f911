// The search finds sections, the best first. Sphinx's own finds pages, of which each has all words,
// in the order of the alphabet; no page has all words of a pasted message, with its names and numbers.
// SECTIONS is written by docs/site_texts.py: address, title and text of each, and what it explains: its
// heading, and messages, options and other names at the beginnings of rows and items.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // Every page has this file, one has the search.

  const MOST = 25; // Sections shown.
  const OF_TITLE = 4; // A word of the title counts as often as so many of the text.
  const OF_ASIDE = 0.7; // Names of the reference, and pages about the package, count less than a guide.
  const ASIDE = /#django_redislock\.|^(architecture|changelog|contributing)\./;
  const OF_EXPLAINED = 4; // So does each word of a name or message that is explained there,
  const MOST_EXPLAINED = 8; // of which a long message has no more.
  // A message is explained best where all messages are, a name not in a comparison or a summary.
  const TROUBLE = /^(troubleshooting|monitoring)\./;
  const SUMMARY = /^(architecture|changelog|contributing|index|migrating)\./;
  const SATURATED = 1.2; // The constants of BM25: how soon one more occurrence counts no more,
  const BY_LENGTH = 0.6; // and how much a long section needs more of them.
  const stemmer = new Stemmer();
  const stems = new Map();
  const LONG = 8; // More words than this are a message. Its names and numbers say nothing:
  const NAMES = /\S*[-:.]\d\S*/g; // web-2:4711, order:7, 28.6.
  const wordsOf = (text) => splitQuery(text.toLowerCase());
  const stemOf = (word) => {
    if (!stems.has(word)) stems.set(word, stemmer.stemWord(word));
    return stems.get(word);
  };

  // A name or a message, of which … may be anything: 28.6, or a lock's name.
  const pattern = (name) => {
    const parts = name.split("…").map((part) => part.trim().replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    const regex = `(?<!\\w)${parts.join(".*?").replace(/\s+/g, "\\s+")}(?!\\w)`;
    const worth = Math.min(wordsOf(name).length, MOST_EXPLAINED);
    return { worth, exact: new RegExp(regex, "s"), any: new RegExp(regex, "is") };
  };

  const read = ([address, title, text, explained]) => {
    const worth = ASIDE.test(address) ? OF_ASIDE : 1;
    const ofExplained = OF_EXPLAINED * (TROUBLE.test(address) ? 1.5 : SUMMARY.test(address) ? 0.25 : 1);
    const words = wordsOf(text);
    const counts = new Map();
    for (const [list, times] of [[wordsOf(title), OF_TITLE], [words, 1]]) {
      for (const word of list) counts.set(stemOf(word), (counts.get(stemOf(word)) ?? 0) + times);
    }
    const line = ` ${words.join(" ")} `;
    const heading = ` ${wordsOf(title).join(" ")} `;
    const patterns = explained.map(pattern).filter((one) => one.worth);
    return { address, title, text, worth, counts, size: words.length, line, heading, patterns, ofExplained };
  };
  const sections = SECTIONS.map(read);

  // How much of the query a pattern has; less if capitals differ, as those of TTL and ttl.
  const part = (pattern, query, size) => {
    const worth = pattern.worth * (1 + pattern.worth / size);
    return pattern.exact.test(query) ? worth : pattern.any.test(query) ? worth * 0.5 : 0;
  };

  Search.find = (query) => {
    const usual = sections.reduce((sum, one) => sum + one.size, 0) / sections.length;
    const plain = query.replaceAll("`", ""); // As texts here are.
    const isMessage = query.trim().split(/\s+/).length > LONG;
    const words = wordsOf(isMessage ? query.replace(NAMES, " ") : query);
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
      if (one.score) {
        one.score += pairs.filter((pair) => one.line.includes(pair)).length;
        one.score += OF_TITLE * pairs.filter((pair) => one.heading.includes(pair)).length;
      }
      const parts = one.patterns.map((each) => part(each, plain, words.length));
      one.score += one.ofExplained * Math.max(0, ...parts);
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
