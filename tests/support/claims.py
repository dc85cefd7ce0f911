"""tests/CLAIMS.md: every claim of the README and of Guarantees, with what proves it.

    python -m tests.support.claims    # write the page anew

What is claimed is read from the pages that claim it, and which tests prove it from the tests.
"""

import re

from tests import ROOT
from tests.support.proofs import LIMITS, PROMISES, RULES, proofs_of_claims

PAGE = ROOT / "tests" / "CLAIMS.md"

# Each bullet and each command of the README, by how it begins, and what proves it: claims that have
# tests, or files of tests.
README = {
    "`once_per`": "celery/test_once_per",
    "`durable`": "celery/test_once_per celery/test_lifecycle effects/test_late_holders",
    "One holder": "P1",
    "No lock for ever": "P2",
    'No false "busy"': "P4",
    "A loss is noticed": "P5",
    "The lock loses no work in Celery": "P7 P8",
    "A lock cannot stop a paused process from writing late": "N1",
    'No task runs "exactly once"': "N4",
    "Locks do not survive the loss of their keys": "N2",
    "make demo": "demo/test_demo",
    "make demo-admin": "demo/test_demo_admin",
    "make test": "package/test_docs",
    "make docs": "package/test_site operations/browser/test_docs_site",
}

HEAD = """\
# Claims, and what proves each

Each claim of the [README](../README.md), of [Guarantees](../docs/guarantees.md) and of
[the protocol](../docs/protocol.md), with the tests that prove it. Run those of one claim:

```
make test ARGS='--proves P1'
```

A test is marked with what it proves, as with `@pytest.mark.proves("P1", "R2")`. This page is
written from the marks and from the claims themselves by `python -m tests.support.claims`. A test
fails if the page is not what that would write, and if a claim has no test.

Files are below `tests/`; the number is that of the marked test functions in a file. Many of them
run on each backend, blocking and in an event loop.
"""


def claims_of_the_readme():
    """How each bullet begins, and each command with its comment, up to the list of pages."""
    text = (ROOT / "README.md").read_text().partition("## Documentation")[0]
    found = {}
    for bullet in re.findall(r"^- (.+(?:\n  .+)*)", text, flags=re.MULTILINE):
        bold = re.match(r"\*\*(.+?)\.?\*\*|(`\w+`)", bullet)
        line = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", " ".join(bullet.split()))
        beginning = (bold[1] or bold[2]) if bold else re.split(r"[:.](?= |$)", line)[0]
        found[beginning] = line
    for command, comment in re.findall(r"^(make [a-z-]+) +# (.+)$", text, flags=re.MULTILINE):
        found[command] = f"`{command}`: {comment}."
    return found


def claims_of_the_docs():
    """What P1, R1 and N1 are."""
    promises = (ROOT / "docs" / "guarantees.md").read_text()
    rules = (ROOT / "docs" / "protocol.md").read_text()
    found = dict(re.findall(r"^\| (P\d+) \| (.+) \|$", promises, flags=re.MULTILINE))
    found |= dict(re.findall(r"^\| (R\d+) \| (.+?) \| .+ \|$", rules, flags=re.MULTILINE))
    found |= dict(re.findall(r"^\*\*(N\d+): (.+?)\.?\*\*", promises, flags=re.MULTILINE))
    return {name: re.sub(r"\[(.+?)\]\(.+?\)", r"\1", text) for name, text in found.items()}


def page():
    """The text of tests/CLAIMS.md."""
    claims, proofs = claims_of_the_docs(), proofs_of_claims()
    parts = [HEAD, "## The README\n"]
    for beginning, claim in claims_of_the_readme().items():
        proven_by = ", ".join(_link(one) for one in README[beginning].split())
        parts.append(f"- {claim} *Proven by* {proven_by}.")
    parts.append(
        "\nThe first example is pasted into a new project and run by `package/test_docs`, and the"
        " requirements are those\nof `package/test_packaging`."
    )
    for heading, names in {
        "Promises": PROMISES,
        "Not promised": LIMITS,
        "Rules of the protocol": RULES,
    }.items():
        parts.append(f"\n## {heading}")
        if names is LIMITS:
            parts.append("\nThe tests show the limit, and what stands in for the promise.")
        for name in names:
            files = "; ".join(f"`{file}` {count}" for file, count in proofs[name].items())
            parts.append(f"\n### {name}\n\n{claims[name].rstrip('.')}.\n\n{_wrapped(files)}")
    return "\n".join(parts) + "\n"


def _link(proof):
    return f"`{proof}`" if "/" in proof else f"[{proof}](#{proof.lower()})"


def _wrapped(files):
    lines, line = [], ""
    for part in files.split("; "):
        if len(line) + len(part) > 110:
            lines.append(line + ";")
            line = ""
        line += f"; {part}" if line else part
    return "\n".join([*lines, line])


def files_of_the_readme():
    return {
        ROOT / "tests" / f"{one}.py"
        for all_of in README.values()
        for one in all_of.split()
        if "/" in one
    }


if __name__ == "__main__":
    PAGE.write_text(page())
