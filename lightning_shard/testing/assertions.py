"""Has asserts in test modules that are imported from now on rewritten as pytest does, so that ``a == b`` shows a and b.

Imported by a rank's process, or once by the server that it is forked from: asking pytest for its settings takes 50 ms.
Uses private names of pytest 8 and 9, since only a whole pytest run installs the hook otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import sys

with contextlib.suppress(Exception):
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    _hook = install_importhook(get_config([]))
    _hook.fnpats = ["test_*.py", "*_test.py"]
    atexit.register(sys.meta_path.remove, _hook)
