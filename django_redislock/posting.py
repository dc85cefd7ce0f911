"""An HTTP POST with a time limit for the whole request.

The timeout of urllib limits each step alone, so a server that sends a byte a second is read for
ever.
"""

from __future__ import annotations

import http.client
import io
import time
import urllib.error
import urllib.request
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

LONGEST_ANSWER = 200  # Bytes.


def post(url: str, body: bytes, timeout: float) -> bytes:
    """Post a text, and return the beginning of the answer. Redirects and proxies are followed.

    Args:
        url: It begins with http:// or https://.
        body: UTF-8.
        timeout: Seconds for all of it. It may take longer only if the resolver of names does not
            answer, or if several addresses of a name do not: each is tried that long.

    Raises:
        OSError: There was no answer in time, or it was no success.
    """
    request = urllib.request.Request(url, data=body, method="POST")
    request.add_header("Content-Type", "text/plain; charset=utf-8")
    request.add_header("User-Agent", "django_redislock")
    deadline = time.monotonic() + timeout
    opener = urllib.request.build_opener(_HTTP(deadline), _HTTPS(deadline), _Redirected())
    try:
        with opener.open(request) as answer:
            said: bytes = answer.read(LONGEST_ANSWER)
            return said
    except urllib.error.HTTPError as error:
        with error:  # It has the connection.
            raise OSError(str(error)) from None
    except http.client.RemoteDisconnected:  # It is an OSError, and a HTTPException too.
        raise
    except http.client.HTTPException as error:
        raise OSError(f"The answer is no HTTP: {error!r}") from None
    except ValueError as error:  # A host that is no name, or a redirect to no URL.
        raise OSError(f"There is no such address: {error}") from None


class _Redirected(urllib.request.HTTPRedirectHandler):
    """Posts to where a redirect leads. urllib refuses a 308, and follows a 301 or 302 by GET."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """See the base class. Only a 303 says that the body has arrived."""
        if code == HTTPStatus.SEE_OTHER:
            return super().redirect_request(req, fp, code, msg, headers, newurl)
        return urllib.request.Request(newurl, req.data, req.headers, method="POST")


class _Until(urllib.request.AbstractHTTPHandler):
    """Opens connections that are read until a deadline."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def do_open(self, http_class: Any, req: Any, **how: Any) -> Any:
        """See the base class, which calls it for each request, also for those of a redirect."""

        def connection(*args: Any, **more: Any) -> http.client.HTTPConnection:
            made: http.client.HTTPConnection = http_class(*args, **more)
            made.response_class = partial(_Answer, self._deadline)  # type: ignore[assignment]
            return made

        req.timeout = _left(self._deadline)
        return super().do_open(connection, req, **how)


class _HTTP(_Until, urllib.request.HTTPHandler):
    pass


class _HTTPS(_Until, urllib.request.HTTPSHandler):
    pass


class _Answer(http.client.HTTPResponse):
    """An answer that is read until a deadline."""

    def __init__(self, deadline: float, sock: socket.socket, **how: Any) -> None:
        super().__init__(sock, **how)
        self.fp = io.BufferedReader(_Received(self.fp.detach(), sock, deadline))


class _Received(io.RawIOBase):
    """Reads from a socket until a deadline."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left(deadline: float) -> float:
    """Seconds until the deadline.

    Raises:
        TimeoutError: The deadline is over.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
