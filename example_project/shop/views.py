"""A request that holds a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.http import HttpResponse

from django_redislock import LockTimeout, distributed_lock
from shop.work import work

if TYPE_CHECKING:
    from django.http import HttpRequest


def export_orders(request: HttpRequest) -> HttpResponse:
    """Export the orders, for one reader at a time."""
    try:
        with distributed_lock("orders:export", ttl=10, wait=5) as lease:
            work(lease, 20)
    except LockTimeout as busy:
        return HttpResponse(f"{busy}\n", status=503, content_type="text/plain")
    return HttpResponse("order,total\n1,19.90\n", content_type="text/plain")
