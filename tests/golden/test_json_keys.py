"""The JSON keys in docs/locks-command.md are those printed. --write-golden writes them anew."""

import json
import re
import textwrap
from pathlib import Path

from tests import ROOT

PAGE = ROOT / "docs" / "locks-command.md"
PRINTED = Path(__file__).parent / "json.txt"

# What has these keys, and where it stands in the printed document of which act.
OBJECTS = {
    "A held lock (`list`, `watch`; `clean` adds `released`)": ("list", ""),
    "`show` adds, and leaves out most of a free lock": ("show a held lock", ""),
    "`owner`, wherever it stands": ("list", ".owner"),
    "`waiting`": ("show a held lock", ".waiting"),
    "`past`": ("show a free lock with a past", ".past"),
    "A record (`runs`)": ("runs", ""),
    "A run": ("runs", ".last_success"),
    "`by_job`": ("runs", ".by_job"),
    "`explain`": ("explain a run", ""),
    "A fact": ("explain a run", ".facts"),
    "`release`": ("release what is free", ""),
    "`resume`": ("resume what nobody holds", ""),
}
SAID_BEFORE = {"`show` adds, and leaves out most of a free lock": ("list", "")}


def printed():
    """The keys of each kind of object that an act has printed, by (act, place)."""
    found = {}
    for part in re.split(r"^# ", PRINTED.read_text(), flags=re.MULTILINE)[1:]:
        head, _, text = part.partition("\n")
        if text.startswith(("[", "{")):
            unmasked = re.sub(r"(?<=[ \[\n])<\w+>", "0", text)
            document, _ = json.JSONDecoder().raw_decode(unmasked)
            look(document, head.partition(": ")[0], "", found)
    return found


def look(value, act, place, found):
    if isinstance(value, list):
        for one in value:
            look(one, act, place, found)
    elif isinstance(value, dict):
        found.setdefault((act, place), dict.fromkeys(value))
        for key, one in value.items():
            look(one, act, f"{place}.{key}", found)


def lines():
    found = printed()
    for title, at in OBJECTS.items():
        before = found[SAID_BEFORE[title]] if title in SAID_BEFORE else ()
        keys = [f"`{key}`" for key in found[at] if key not in before]
        line = f"- {title}: {', '.join(keys)}."
        yield textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False)


def test_the_keys_in_the_document_are_those_printed(request):
    text, listed = PAGE.read_text(), "\n".join(lines())
    found = re.search(r"<!-- json -->\n\n(.*?)\n\n<!-- end of json -->", text, flags=re.DOTALL)
    if request.config.getoption("write_golden"):
        PAGE.write_text(text[: found.start(1)] + listed + text[found.end(1) :])
    else:
        assert found[1] == listed
