"""Answers requests that met a lock: busy is the client's to try again, unavailable is ours."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from django.http import HttpResponse, JsonResponse
from django.utils.deprecation import MiddlewareMixin

from django_redislock.exceptions import LockTimeout, LockUnavailable

if TYPE_CHECKING:
    from django.http import HttpRequest

logger = logging.getLogger("django_redislock.request")


class LockErrorsMiddleware(MiddlewareMixin):
    """Turn a LockTimeout of a view into 409, and a LockUnavailable into 503.

    A subclass may name another status for a busy lock: ``busy_status = 423``, or 503, and another
    ``longest_retry_after``. The answer says neither which lock it was nor who holds it; the log
    does.
    """

    busy_status = 409
    # Seconds that Retry-After names at most while somebody holds the lock, who may be done before
    # the lease ends, or renew it. What cools down ends when it says.
    longest_retry_after: float = 30

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Called by Django with what a view has raised, after its transaction was rolled back."""
        if isinstance(exception, LockTimeout):
            logger.info("Answered a request with %s: %s", self.busy_status, exception)
            text = "Somebody else is at this. Try again in {} s; it may take longer."
            wait = min(exception.expires_in or 0, self.longest_retry_after)
            if exception.cooling:
                text = "This was done already. Try again in {} s."
                wait = exception.expires_in or 0
            if math.isinf(wait):  # It never ends by itself, and a subclass has no bound.
                wait = LockErrorsMiddleware.longest_retry_after
            seconds = max(1, math.ceil(wait))
            response = _answer(request, text.format(seconds), self.busy_status)
            response["Retry-After"] = str(seconds)
            return response
        if isinstance(exception, LockUnavailable):
            logger.error("Answered a request with 503: %s", exception, exc_info=exception)
            return _answer(request, "This does not work at the moment. Try again later.", 503)
        return None


def _answer(request: HttpRequest, text: str, status: int) -> HttpResponse:
    kind = request.get_preferred_type(["text/plain", "application/json"])
    if kind == "application/json":
        return JsonResponse({"detail": text}, status=status)
    return HttpResponse(text, status=status, content_type="text/plain; charset=utf-8")
