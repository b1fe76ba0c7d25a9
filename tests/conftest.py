"""What every test needs before it runs.

hypothesis is imported here, and so compiled at collection: its pytest plugin would do it when the
session ends, and Python 3.11 before 3.11.8 may fail to compile while garbage is collected
(gh-106905).

A shell that starts the tests in the background lets them ignore SIGINT, and so every process they
start: Ctrl-C would be tested on processes that cannot hear it.
"""

import signal

import hypothesis

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["hypothesis"]
