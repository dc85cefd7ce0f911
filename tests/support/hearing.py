"""What signals tell while a block runs."""

from contextlib import contextmanager


@contextmanager
def heard(*signals):
    """What they tell, in order; a test that hears several finds in "signal" which one it was."""
    told = []

    def hear(**news):
        told.append(news)

    for one in signals:
        one.connect(hear)
    try:
        yield told
    finally:
        for one in signals:
            one.disconnect(hear)
