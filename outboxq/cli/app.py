"""The commands, put together."""

from typing import Annotated

import typer

from outboxq import __version__
from outboxq.cli import dead, doctor, effects, inbox, jobs, migrate, queues, relay, roles, trials

# Plain help: rich's takes twice as long to import. No pretty tracebacks: they print local variables.
app = typer.Typer(
    name="outboxq",
    help="Jobs and messages that commit together with your data, on PostgreSQL.\n\n"
    "The variable OUTBOXQ_DATABASE_URL names the database. Exit codes: 0 done, 1 something failed or was not found, "
    "2 wrong usage.",
    epilog="Start with `outboxq demo`, which needs no database. Each command has a --help with an example.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
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
app.command("migrate")(migrate.migrate)
app.command("relay")(relay.relay)
app.command("health")(relay.health)
app.command("roles")(roles.roles)
app.command("stats")(queues.stats)
app.command("torture")(trials.torture)
app.command("doctor")(doctor.doctor)
app.add_typer(queues.app, name="queues")
app.add_typer(jobs.app, name="jobs")
app.add_typer(dead.app, name="dead")
app.add_typer(inbox.app, name="inbox")
app.add_typer(effects.app, name="effects")
