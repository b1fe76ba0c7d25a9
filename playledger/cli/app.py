"""The commands and their options; what each does is imported when it is called.

The help is plain and grouped, and says what UX section 3 shows.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from playledger.cli.console import Console
from playledger.cli.verbs import PANELS, top_help
from playledger.version import VERSION


class Grouped(TyperGroup):
    """Shows the grouped help, whichever way it is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes it."""
        del ctx
        formatter.write(top_help() + "\n")


app = typer.Typer(
    cls=Grouped,
    name="playledger",
    help="Run plays, and replay, explain and prove what happened.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)
projections = typer.Typer(
    name="projections", rich_markup_mode=None, no_args_is_help=True,
    help="Rebuild or verify what is derived from the log.",
)  # fmt: skip
db = typer.Typer(
    name="db", rich_markup_mode=None, no_args_is_help=True,
    help="Create, migrate, check and back up the database.",
)  # fmt: skip

PlayRef = Annotated[str, typer.Argument(metavar="FILE:NAME", help="FILE.py:NAME or MODULE:NAME.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
Input = Annotated[
    list[str] | None,
    typer.Option(
        "--input", metavar="JSON|@FILE",
        help="JSON, @file.json, or any other @file, which is staged; once each.",
    ),
]  # fmt: skip
NewRunId = Annotated[
    str | None, typer.Option("--run-id", metavar="ID", help="Names the run; again is the same run.")
]
Isolation = Annotated[
    str | None,
    typer.Option("--isolation", metavar="task|process", help="Run each instance as one of these."),
]
MaxInstances = Annotated[
    int | None, typer.Option("--max-instances", metavar="N", help="Run at most N at a time.")
]
DbPath = Annotated[str | None, typer.Argument(metavar="[PATH]", help="The log; else --db.")]


def _console(ctx: typer.Context) -> Console:
    console: Console = ctx.obj
    return console


@app.callback()
def _top(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        _console(ctx).answer(f"playledger {VERSION}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        _console(ctx).answer(top_help())
        raise typer.Exit


# --- Run ------------------------------------------------------------------------------------------


@app.command()
def run(
    ctx: typer.Context,
    play: PlayRef,
    input: Input = None,
    run_id: NewRunId = None,
    isolation: Isolation = None,
    max_instances: MaxInstances = None,
) -> int:
    """Run a play to its end, here, with the embedded defaults."""
    from playledger.cli.run import run_play

    return run_play(_console(ctx), play, input or [], run_id, isolation, max_instances)


@app.command()
def serve(
    ctx: typer.Context,
    plays: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE|MODULE]...", help="What is offered.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="HOST")] = None,
    port: Annotated[int | None, typer.Option("--port", metavar="PORT", help="0: any.")] = None,
    insecure_local: Annotated[
        bool, typer.Option("--insecure-local", help="Ask for no token; on loopback only.")
    ] = False,
    grace: Annotated[
        str | None, typer.Option("--grace", metavar="10s", help="Wait so long for runs at the end.")
    ] = None,
    isolation: Isolation = None,
    max_instances: MaxInstances = None,
) -> int:
    """Serve the HTTP API and the page, and run what is submitted."""
    from playledger.cli.serving import serve_plays

    options = {
        "serve.host": ("--host", host),
        "serve.port": ("--port", port),
        "serve.grace": ("--grace", grace),
        "engine.isolation": ("--isolation", isolation),
        "engine.max_instances": ("--max-instances", max_instances),
    }
    return serve_plays(_console(ctx), plays or [], options, insecure_local=insecure_local)


@app.command()
def submit(
    ctx: typer.Context,
    play: PlayRef,
    input: Input = None,
    run_id: NewRunId = None,
    isolation: Isolation = None,
) -> int:
    """Hand a run to the log and return at once."""
    from playledger.cli.act import submit_play

    return submit_play(_console(ctx), play, input or [], run_id, isolation)


# --- Look -----------------------------------------------------------------------------------------


@app.command()
def runs(
    ctx: typer.Context,
    status: Annotated[str | None, typer.Option("--status", metavar="STATUS")] = None,
    play: Annotated[str | None, typer.Option("--play", metavar="NAME")] = None,
    waiting_on: Annotated[
        str | None,
        typer.Option("--waiting-on", metavar="KIND|KEY", help="signal, sleep, or a key."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=1000)] = 100,
    before: Annotated[
        str | None, typer.Option("--before", metavar="@N", help="Only those submitted before.")
    ] = None,
) -> int:
    """List runs, newest first."""
    from playledger.cli.look import list_runs

    return list_runs(
        _console(ctx), status=status, play=play, waiting_on=waiting_on, limit=limit, before=before
    )


@app.command()
def status(
    ctx: typer.Context,
    run: RunId,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="Show input and result, which are sealed.")
    ] = False,
    exit_status: Annotated[
        bool, typer.Option("--exit-status", help="Exit with the code of the run's end.")
    ] = False,
) -> int:
    """Show one run as it is now."""
    from playledger.cli.look import show_status

    return show_status(_console(ctx), run, reveal=reveal, exit_status=exit_status)


@app.command()
def tail(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Else the whole log.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")
    ] = False,
    logs: Annotated[bool, typer.Option("--logs", help="Show the lines that plays log.")] = False,
    family: Annotated[
        bool, typer.Option("--family", help="Show its children's events too.")
    ] = False,
    after: Annotated[
        str, typer.Option("--after", metavar="@N", help="Only what comes behind.")
    ] = "0",
    exit_status: Annotated[
        bool, typer.Option("--exit-status", help="Exit with the code of the run's end.")
    ] = False,
) -> int:
    """Print a run's events; --follow until it ends."""
    from playledger.cli.tail import tail_run

    return tail_run(
        _console(ctx), run, follow=follow, logs=logs, family=family, after=after,
        exit_status=exit_status,
    )  # fmt: skip


@app.command()
def why(
    ctx: typer.Context,
    run: RunId,
    at: Annotated[
        str | None, typer.Option("--at", metavar="@N", help="As of this position.")
    ] = None,
) -> int:
    """Explain why a run is where it is, and what would move it."""
    from playledger.cli.look import explain_run

    return explain_run(_console(ctx), run, at)


# --- Act ------------------------------------------------------------------------------------------


@app.command()
def signal(
    ctx: typer.Context,
    run: RunId,
    key: Annotated[str, typer.Argument(metavar="KEY", help="What the play waits for.")],
    data: Annotated[
        str | None, typer.Option("--data", metavar="JSON|@FILE.json", help="What it is told.")
    ] = None,
    id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Names the signal; again is the same.")
    ] = None,
) -> int:
    """Send a signal to a run."""
    from playledger.cli.act import signal_run

    return signal_run(_console(ctx), run, key, data, id)


@app.command()
def cancel(
    ctx: typer.Context,
    run: RunId,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept, sealed.")] = "",
) -> int:
    """Ask a run, and its children, to end."""
    from playledger.cli.act import cancel_run

    return cancel_run(_console(ctx), run, reason)


@app.command()
def retry(ctx: typer.Context, run: RunId) -> int:
    """Do now what waits: skip a backoff, try a parked item again."""
    from playledger.cli.act import retry_run

    return retry_run(_console(ctx), run)


@app.command()
def rerun(
    ctx: typer.Context,
    run: RunId,
    input: Input = None,
    run_id: NewRunId = None,
    isolation: Isolation = None,
) -> int:
    """Start a new run from an old one's input."""
    from playledger.cli.act import rerun_run

    return rerun_run(_console(ctx), run, input or [], run_id, isolation)


# --- Replay and prove -----------------------------------------------------------------------------


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def replay(ctx: typer.Context) -> int:
    """Read the tape: show, state, diff, verify."""
    from playledger.cli.keep import replay_tape

    return replay_tape(_console(ctx), ctx.args)


@app.command()
def export(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Else the whole log.")] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Else stdout.")
    ] = None,
    family: Annotated[
        bool, typer.Option("--family", help="With everything the run started.")
    ] = False,
) -> int:
    """Write events as JSON lines, exactly the bytes stored."""
    from playledger.cli.keep import export_log

    return export_log(_console(ctx), run, output, family=family)


# --- Keep -----------------------------------------------------------------------------------------

app.add_typer(projections)
app.add_typer(db)


@projections.command("rebuild")
def projections_rebuild(ctx: typer.Context) -> int:
    """Derive every read model from the log again, and swap it in."""
    from playledger.cli.keep import rebuild_projections

    return rebuild_projections(_console(ctx))


@projections.command("verify")
def projections_verify(ctx: typer.Context) -> int:
    """Compare every read model with what the log gives; change nothing."""
    from playledger.cli.keep import verify_projections

    return verify_projections(_console(ctx))


@db.command("create")
def db_create(ctx: typer.Context, path: DbPath = None) -> int:
    """Make a new, empty log."""
    from playledger.cli.keep import create_db

    return create_db(_console(ctx), path)


@db.command("migrate")
def db_migrate(ctx: typer.Context, path: DbPath = None) -> int:
    """Bring an older log to this release's schema."""
    from playledger.cli.keep import migrate_db

    return migrate_db(_console(ctx), path)


@db.command("fsck")
def db_fsck(ctx: typer.Context, path: DbPath = None) -> int:
    """Check the stored bytes, from the bytes up; change nothing."""
    from playledger.cli.keep import fsck_db

    return fsck_db(_console(ctx), path)


@db.command("backup")
def db_backup(
    ctx: typer.Context,
    paths: Annotated[list[str], typer.Argument(metavar="[SOURCE] DEST")],
) -> int:
    """Copy a log that is in use, open the copy and prove it."""
    from playledger.cli.keep import backup_db

    return backup_db(_console(ctx), paths)


@app.command()
def config(
    ctx: typer.Context,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what is not at its default.")
    ] = False,
    all: Annotated[
        bool, typer.Option("--all", help="Every setting, which is the default.")
    ] = False,
) -> int:
    """Show every setting, its value and where it came from."""
    from playledger.cli.topics import show_config

    return show_config(_console(ctx), changed=changed and not all)


@app.command("help", hidden=True)
def show_help(
    ctx: typer.Context,
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC|COMMAND]")] = None,
) -> int:
    """Explain exit-codes, environment or json, or show a command's help."""
    from playledger.cli.topics import show_topic

    names = [name for verbs in PANELS.values() for name in verbs]
    if topic is not None and topic not in names:
        return show_topic(_console(ctx), topic)
    parent: Any = ctx.parent
    arguments = ["--help"] if topic is None else [topic, "--help"]
    parent.command.main(arguments, prog_name="playledger", standalone_mode=False, obj=ctx.obj)
    return 0
