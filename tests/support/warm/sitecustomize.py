"""Python imports this first in each program that a test starts, for `tests/conftest.py` puts this
folder on their path: what the warm process can be is run by a fork of it. All others, and all where
there is no warm process, start as they would without this file.
"""

import os
import sys

# Nothing is imported for a program that is not named by `-m`.
if "WARM_PROCESS" in os.environ and sys.orig_argv[1:2] == ["-m"]:
    import warm_client

    warm_client.take_place()
