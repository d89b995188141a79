"""The typer application of the command `outboxq`; this module adds all commands and groups of commands to it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import typer

from outboxq import __version__
from outboxq.cli import (
    audit,
    batches,
    dashboard,
    dead,
    doctor,
    done,
    effects,
    explain,
    history,
    inbox,
    jobs,
    kinds,
    metrics,
    migrate,
    queues,
    relay,
    relays,
    roles,
    schedules,
    top,
    trials,
)
from outboxq.cli.help import Commands, PlainGroup


class _Root(PlainGroup):
    """The group of all commands; its help lists every command, grouped by purpose."""

    sections: ClassVar[Mapping[str, Sequence[str]]] = {
        "Start": ("demo", "torture", "migrate", "roles"),
        "Run": ("relay", "health", "metrics", "dashboard"),
        "Look": (
            "top",
            "stats",
            "history",
            "doctor",
            "explain",
            "relays list",
            "queues list",
            "kinds list",
            "jobs list",
            "jobs show",
            "jobs watch",
            "dead list",
            "dead show",
            "done list",
            "done show",
            "inbox list",
            "inbox show",
            "effects list",
            "effects show",
            "schedules list",
            "schedules show",
            "batches list",
            "batches show",
            "audit list",
            "audit show",
        ),
        "Mend": (
            "queues pause",
            "queues resume",
            "queues set",
            "kinds pause",
            "kinds resume",
            "jobs cancel",
            "jobs change",
            "dead retry",
            "dead discard",
            "bulk resume",
            "bulk stop",
            "audit prune",
            "done run-again",
            "inbox forget",
            "schedules put",
            "schedules pause",
            "schedules resume",
            "schedules adopt",
            "schedules run-now",
            "schedules remove",
            "effects resolve",
            "effects new-installation",
        ),
    }


app = Commands(
    _Root,
    name="outboxq",
    help="Jobs and messages that commit together with your data, on PostgreSQL.\n\n"
    "The variable OUTBOXQ_DATABASE_URL names the database. Exit codes: 0 done, 1 something failed or was not found, "
    "2 wrong usage. With --json, errors and notices on standard error are JSON too, an object a line.",
    epilog="Start with `outboxq demo`, which needs no database. Each command has a --help with an example.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:  # called by typer
    if asked:
        typer.echo(f"outboxq {__version__}")
        raise typer.Exit


@app.callback()
def outboxq(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Jobs and messages that commit together with your data, on PostgreSQL."""
    del version


app.command("demo")(trials.demo)
app.command("torture")(trials.torture)
app.command("migrate")(migrate.migrate)
app.command("roles")(roles.roles)
app.command("relay")(relay.relay)
app.command("health")(relay.health)
app.command("metrics")(metrics.metrics)
app.command("dashboard")(dashboard.dashboard)
app.command("top")(top.top)
app.command("stats")(queues.stats)
app.command("history")(history.history)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain)
app.add_typer(relays.app, name="relays")
app.add_typer(queues.app, name="queues")
app.add_typer(kinds.app, name="kinds")
app.add_typer(schedules.app, name="schedules")
app.add_typer(jobs.app, name="jobs")
app.add_typer(batches.app, name="batches")
app.add_typer(dead.app, name="dead")
app.add_typer(audit.runs, name="bulk")
app.add_typer(audit.app, name="audit")
app.add_typer(done.app, name="done")
app.add_typer(inbox.app, name="inbox")
app.add_typer(effects.app, name="effects")
