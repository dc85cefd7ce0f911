"""Which backend an alias has: made when it is first used, forgotten when the settings change."""

from __future__ import annotations

from contextlib import contextmanager
from inspect import isabstract
from typing import TYPE_CHECKING

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from django_redislock import process
from django_redislock.backends.base import Backend
from django_redislock.conf import conf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django_redislock.conf import Conf


class Backends(dict[str, Backend]):
    """The backend of each alias, made when first used and shared by all threads."""

    def __init__(self) -> None:
        super().__init__()
        self._source: Callable[[str], Backend] = lambda alias: make(conf(alias))
        self._resets = 0

    def __getitem__(self, alias: str) -> Backend:
        process.this()  # In a forked child, backends begin anew.
        return super().__getitem__(alias)

    def __missing__(self, alias: str) -> Backend:
        resets = self._resets
        made = self._source(alias)
        backend = self.setdefault(alias, made)
        if resets == self._resets:
            return backend
        # The settings have changed since they were read. Nothing else would forget this one.
        if self.get(alias) is made:
            self.pop(alias, None)  # Unless another thread did so just now.
            made.retire()
        return self[alias]

    @contextmanager
    def made_by(self, source: Callable[[str], Backend]) -> Iterator[None]:
        """During the block, have *source* make all backends anew; then the former ones are back.

        For tests: the settings do not matter, even if they change meanwhile. If they differ after
        the block, the former backends do not come back.
        """
        before, setting = (self._source, dict(self)), _setting()
        self._source = source
        self._resets += 1
        self.clear()
        try:
            yield
        finally:
            self._source, kept = before
            self.reset()
            self.update(kept)
            if _setting() != setting:
                self.reset()

    def reset(self) -> None:
        """Forget all backends, as when settings change. Each lease keeps the one it came from."""
        self._resets += 1  # First: what is made of the former settings is not kept from now on.
        while self:
            _, backend = self.popitem()
            backend.retire()


def make(conf: Conf) -> Backend:
    """The backend that *conf* describes."""
    try:
        cls = import_string(conf.backend)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"REDISLOCK[{conf.alias!r}]['BACKEND'] {conf.backend!r} cannot be imported: {error}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Backend)) or isabstract(cls):
        raise ImproperlyConfigured(
            f"REDISLOCK[{conf.alias!r}]['BACKEND'] {conf.backend!r} is no backend of locks."
        )
    return cls(conf)


backends = Backends()


def _setting() -> object:
    """The setting as it is, if Django knows any: what made the backends that there are."""
    return getattr(settings, "REDISLOCK", None) if settings.configured else None


def _forget(*, setting: str, **kwargs: object) -> None:
    if setting == "REDISLOCK":
        backends.reset()


setting_changed.connect(_forget, dispatch_uid="django_redislock.backends.registry.forget")
