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

    A subclass may name another status for a busy lock: ``busy_status = 423``, or 503. The answer
    says neither which lock it was nor who holds it; the log does.
    """

    busy_status = 409

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Called by Django with what a view has raised, after its transaction was rolled back."""
        if isinstance(exception, LockTimeout):
            logger.info("Answered a request with %s: %s", self.busy_status, exception)
            # How long it may take at most, if its holder does not renew it: nobody knows better.
            seconds = max(1, math.ceil(exception.expires_in or 0))
            text = f"Somebody else is at this. Try again in {seconds} s."
            response = _answer(request, text, self.busy_status)
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
