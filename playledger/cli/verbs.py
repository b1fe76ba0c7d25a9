"""What `playledger --help` says: every command in one sentence, under what a reader wants to do.

It stands apart from the commands so that the help is there before their parser is imported; a test
holds the two together.
"""

from __future__ import annotations

from typing import Final

PANELS: Final = {
    "Run": {
        "run": "Run a play to its end, here, with the embedded defaults.",
        "serve": "Serve the HTTP API and the page, and run what is submitted.",
        "submit": "Hand a run to the log and return at once.",
    },
    "Look": {
        "runs": "List runs, newest first.",
        "status": "Show one run as it is now.",
        "tail": "Print a run's events; --follow until it ends.",
        "why": "Explain why a run is where it is, and what would move it.",
    },
    "Act": {
        "signal": "Send a signal to a run.",
        "cancel": "Ask a run, and its children, to end.",
        "retry": "Do now what waits: skip a backoff, try a parked item again.",
        "rerun": "Start a new run from an old one's input.",
    },
    "Replay and prove": {
        "replay": "Read the tape: show, state, diff, verify.",
        "export": "Write events as JSON lines, exactly the bytes stored.",
    },
    "Keep": {
        "projections": "Rebuild or verify what is derived from the log.",
        "db": "Create, migrate, check and back up the database.",
        "config": "Show every setting, its value and where it came from.",
    },
}
EVERYWHERE: Final = """\
Everywhere: --db PATH|URL  --json  --quiet  --config FILE  --ascii  --help"""
END: Final = f"""\
{EVERYWHERE}
Try: playledger run examples/hello.py:hello --input '"world"'
See: playledger help exit-codes | environment | json"""


def top_help() -> str:
    """Returns the whole text of `playledger --help`."""
    lines = [
        "Usage: playledger [OPTIONS] COMMAND [ARGS]...",
        "",
        "  Run plays, and replay, explain and prove what happened.",
        "",
    ]
    for panel, verbs in PANELS.items():
        lines.append(f"{panel}:")
        lines += [f"  {name:<11} {text}" for name, text in verbs.items()]
    return "\n".join([*lines, END])
