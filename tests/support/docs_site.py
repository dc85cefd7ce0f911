"""The site of docs/, as `make docs` makes it."""

from tests import ROOT
from tests.support.processes import python

LONGEST = 900  # Seconds: Sphinx needs 20 of a processor, of which a busy machine has few.


def build(folder):
    """Make the site below *folder*; fail if Sphinx has a warning."""
    site = folder / "html"
    options = ["--fail-on-warning", "--keep-going", "--quiet"]
    options += ["--builder", "html", "--doctree-dir", str(folder / "doctrees")]
    python("-m", "sphinx", *options, str(ROOT / "docs"), str(site), timeout=LONGEST)
    return site
