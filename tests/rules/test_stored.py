"""What is read from the value of a lock key."""

from __future__ import annotations

import pytest

from django_redislock.rules.stored import confirmation_of

TOKEN = b"0123456789abcdef" * 2


@pytest.mark.proves("R14")
@pytest.mark.parametrize("renews", [b"r", b"-"])
def test_an_unconfirmed_lease_is_confirmed_with_its_ttl_as_its_first_renewal(renews: bytes) -> None:
    value = TOKEN + b"c" + renews + b"00000fedcba9876543210|7|1000|30000|2000|host:1|web-1 7"
    assert confirmation_of(value) == (TOKEN, b"30000", renews + b"00000")
    assert confirmation_of(value.replace(b"c" + renews, b"h" + renews)) is None
