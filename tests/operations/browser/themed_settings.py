"""Django settings of a site whose admin has another look: the environment says which package."""

import os

from tests import settings
from tests.settings import *  # noqa: F403

INSTALLED_APPS = [os.environ["TESTS_THEME"], *settings.INSTALLED_APPS]
# These packages have scripts and styles within their pages, which a strict policy forbids.
MIDDLEWARE = settings.MIDDLEWARE[1:]
