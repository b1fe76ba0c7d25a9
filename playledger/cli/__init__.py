"""The command line: `playledger VERB`.

Laws (UX section 3): stdout is the answer, stderr is the talk; with `--json` stdout is JSON alone;
every error is two lines, never a traceback; every answer ends with the next command to type.
"""

from playledger.cli.entry import main

__all__ = ["main"]
