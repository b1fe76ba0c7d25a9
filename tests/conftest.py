"""What every test needs before it runs.

hypothesis is imported here, and so compiled at collection: its pytest plugin would do it when the
session ends, and Python 3.11 before 3.11.8 may fail to compile while garbage is collected
(gh-106905).
"""

import hypothesis

__all__ = ["hypothesis"]
