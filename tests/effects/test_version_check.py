"""The optimistic lock of docs/databases.md, as it stands there: no lock, and no update lost."""

import threading
from concurrent.futures import ThreadPoolExecutor

from tests import ROOT
from tests.effects.models import Stock
from tests.package.test_docs import code_of
from tests.support.waiting import HUNG

BUYERS, EACH = 4, 5


class ToEffects:
    """The example names no database."""

    def db_for_write(self, model, **hints):
        return "effects"

    db_for_read = db_for_write


def test_the_version_check_of_the_docs_loses_no_update(database, settings, in_threads):
    settings.DATABASE_ROUTERS = [ToEffects()]
    blocks = code_of((ROOT / "docs/databases.md").read_text(), "python")
    (example,) = [block for block in blocks if "def sell_one" in block]
    names = {"Stock": Stock}
    exec(example[example.index("def sell_one") :], names)
    stock = Stock.objects.create(left=100)
    start = threading.Barrier(BUYERS)

    def buy(buyer):
        start.wait(HUNG)
        for _ in range(EACH):
            names["sell_one"](stock.pk)

    with ThreadPoolExecutor(BUYERS) as buyers:
        list(buyers.map(in_threads(buy), range(BUYERS)))
    stock.refresh_from_db()
    assert (stock.left, stock.version) == (100 - BUYERS * EACH, BUYERS * EACH)
