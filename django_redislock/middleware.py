"""Answers requests that found a lock busy, or no server."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse, JsonResponse
from django.utils.deprecation import MiddlewareMixin

from django_redislock import logs
from django_redislock.conf import Conf, conf
from django_redislock.exceptions import LockTimeout, LockUnavailable
from django_redislock.rules.arguments import seconds as seconds_of

if TYPE_CHECKING:
    from datetime import timedelta

    from django.http import HttpRequest

logger = logs.logger("django_redislock.request")


class LockErrorsMiddleware(MiddlewareMixin):
    """Turn a LockTimeout of a view into 409, or 429 of a Rate; and a LockUnavailable into 503.

    The answer names neither the lock nor its holder; the log does. A subclass may change these:

    Attributes:
        busy_status: The status if a lock is busy: 409, 423 or 503, say. That of a Rate is 429.
        longest_retry_after: The most seconds, or a timedelta, in Retry-After while somebody holds
            the lock; None means the setting LONGEST_RETRY_AFTER of its alias. The holder may
            release the lock sooner, or renew its lease. For a Rate, and for a lock that cools down,
            Retry-After is exact.
    """

    busy_status = 409
    longest_retry_after: float | timedelta | None = None

    def __init__(self, get_response: Any) -> None:
        """Django makes it when a server starts.

        Raises:
            ValueError: longest_retry_after is no duration of a second or more.
        """
        super().__init__(get_response)
        longest, name = self.longest_retry_after, "longest_retry_after"
        self._own_longest = (
            None if longest is None else seconds_of(longest, name, least=1.0, endless=True)
        )

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Answer for a view that has raised. Django has rolled its transaction back."""
        exception = _only_one_of(exception)
        if isinstance(exception, LockTimeout):
            extra = logs.of(lock=exception.name, alias=exception.alias, reason="busy")
            says = "Answered a request with %s: %s"
            status = 429 if exception.rate else self.busy_status
            logger.warning(says, status, exception, extra=extra)
            text = "Somebody else is at this. Try again in {} s; it may take longer."
            wait = exception.expires_in or 0
            if exception.rate:
                text = "Too many of these were made. Try again in {} s."
            elif exception.cooling:
                text = "This was done already. Try again in {} s."
            else:
                wait = min(wait, self._longest_retry_after(exception.alias))
            if math.isinf(wait):  # The lease never ends by itself, and there is no bound.
                wait = Conf.longest_retry_after
            seconds = max(1, math.ceil(wait))
            response = _answer(request, text.format(seconds), status)
            response["Retry-After"] = str(seconds)
            return response
        if isinstance(exception, LockUnavailable):
            extra = logs.of(lock=exception.name, reason=exception.reason)
            says = "Answered a request with 503: %s"
            logger.error(says, exception, exc_info=exception, extra=extra)
            return _answer(request, "This does not work at the moment. Try again later.", 503)
        return None

    def _longest_retry_after(self, alias: str) -> float:
        if self._own_longest is not None:
            return self._own_longest
        try:
            return conf(alias).longest_retry_after
        except ImproperlyConfigured:  # In tests without a setting; or the view made the exception.
            return Conf.longest_retry_after


def _only_one_of(exception: Exception) -> Exception:
    """The one exception of an asyncio.TaskGroup, if there is only one; else the group itself."""
    one = exception
    while isinstance(one, ExceptionGroup):
        if len(one.exceptions) > 1:
            return exception
        one = one.exceptions[0]
    return one


def _answer(request: HttpRequest, text: str, status: int) -> HttpResponse:
    kind = request.get_preferred_type(["text/plain", "application/json"])
    if kind == "application/json":
        return JsonResponse({"detail": text}, status=status)
    return HttpResponse(text, status=status, content_type="text/plain; charset=utf-8")
