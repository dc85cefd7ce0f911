"""Settings of a worker whose default database is one that the test has made."""

import json
import os
from importlib.util import find_spec

from tests.settings import *  # noqa: F403

if find_spec("django_celery_results"):
    INSTALLED_APPS = [*INSTALLED_APPS, "django_celery_results"]  # noqa: F405
DATABASES = {"default": json.loads(os.environ["TESTS_DATABASE"])}
if DATABASES["default"]["ENGINE"].endswith(".mysql"):
    import pymysql

    pymysql.install_as_MySQLdb()
