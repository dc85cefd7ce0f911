"""Settings of the processes of demo_admin: each plays a machine of its own.

Owners of locks are shown by host. On one machine that would be one name for all; here it is what
`DEMO_MACHINE` says.
"""

from __future__ import annotations

import os
import socket

from example_project.settings import *  # noqa: F403

MACHINE = os.environ["DEMO_MACHINE"]
socket.gethostname = lambda: MACHINE
