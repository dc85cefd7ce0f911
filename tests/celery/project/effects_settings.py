"""Settings of a worker whose default database is one that the test has made."""

import json
import os

from tests.settings import *  # noqa: F403

DATABASES = {"default": json.loads(os.environ["TESTS_DATABASE"])}
if DATABASES["default"]["ENGINE"].endswith(".mysql"):
    import pymysql

    pymysql.install_as_MySQLdb()
