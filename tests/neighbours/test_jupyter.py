"""A notebook, whose cells run in the thread of an event loop."""

import json

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

SETUP = """
import json, django
from django.conf import settings
settings.configure(INSTALLED_APPS=["django_redislock"], REDISLOCK=json.loads({redislock!r}))
django.setup()
from django_redislock import distributed_lock
"""
AWAITED = """
async with distributed_lock("lottery") as lease:
    print(lease.held)
"""
IN_A_THREAD = """
import asyncio

def draw():
    with distributed_lock("lottery") as lease:
        return lease.held

print(await asyncio.to_thread(draw))
"""
BLOCKING = """
with distributed_lock("lottery"):
    pass
"""


@pytest.fixture
def printed(settings):
    """Run cells in a kernel of its own, and return what the last one printed."""

    def run(*cells):
        setup = SETUP.format(redislock=json.dumps(settings.REDISLOCK))
        cells = [nbformat.v4.new_code_cell(cell) for cell in (setup, *cells)]
        notebook = nbformat.v4.new_notebook(cells=cells)
        nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
        return "".join(output.text for output in notebook.cells[-1].outputs).strip()

    return run


def test_a_cell_takes_a_lock_by_async_with_or_in_a_thread(locks, printed):
    assert printed(AWAITED) == "True"
    assert printed(IN_A_THREAD) == "True"


def test_a_cell_that_would_block_the_loop_is_told_what_to_write(locks, printed):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="Use `async with`"):
        printed(BLOCKING)
