"""`outboxq relay`, with its options, and the command lines of the processes that it starts; and `outboxq health`."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import DEFAULT_SCHEMA, AsJson, DatabaseUrls, Schema, takes
from outboxq.cli.output import print_json

if TYPE_CHECKING:
    from outboxq.config import RelayConfig

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["text", "json"]

# Options that have the same names as the settings.
_NUMBERS = (
    "call_connections", "batch_size", "poll_seconds", "drain_seconds", "lease_seconds", "max_crashes", "prune_seconds",
    "stats_seconds",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayOptions:
    """The options of `outboxq relay`."""

    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:ATTRIBUTE", help="The registry, such as myapp.jobs:jobs.", show_default=False),
    ]
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            metavar="NAMES=SLOTS",
            help="Which queues to serve, and with how many slots: so many of their jobs run at once. accounts=4; "
            "urgent,normal=2 (two slots for both, urgent first); *=2 (two slots for all other queues, in turns); "
            "accounts (one slot). May be repeated. Without it: two slots for each queue. At most 200 slots, and "
            '2,000 for async handlers in lease mode (claim="lease"), which wait without a connection.',
            show_default=False,
        ),
    ] = None
    processes: Annotated[
        int,
        typer.Option(
            "--processes",
            metavar="NUMBER",
            min=1,
            max=256,
            help="How many such relays to keep running, a process each; of several databases, so many for each.",
        ),
    ] = 1
    drain: Annotated[
        bool, typer.Option("--drain", help="Stop when no job is ready or due any more, and say what is left.")
    ] = False
    call_connections: Annotated[
        int | None,
        typer.Option(
            "--call-connections",
            metavar="NUMBER",
            min=1,
            max=200,
            help='How many connections the jobs of one --queue share in lease mode (claim="lease"): a handler has one '
            "only from the first use of its ctx.session to its COMMIT, and waits if all are taken. Without it: 20, or "
            "the number of slots if that is less.",
            show_default=False,
        ),
    ] = None
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size",
            metavar="JOBS",
            min=1,
            max=1_000,
            help="The most jobs that one transaction claims. Not for lease mode, in which each job has a slot of its "
            "own: give its queues more slots.",
        ),
    ] = 1
    poll_seconds: Annotated[
        float,
        typer.Option("--poll-seconds", metavar="SECONDS", help="The longest time between two polls of an empty queue."),
    ] = 1.0
    drain_seconds: Annotated[
        float,
        typer.Option("--drain-seconds", metavar="SECONDS", help="How long a stopping relay waits for its handlers."),
    ] = 30.0
    lease_seconds: Annotated[
        float,
        typer.Option(
            "--lease-seconds",
            metavar="SECONDS",
            help="How long other relays wait, after the last sign of life of this one, before they take over its jobs "
            "in lease mode.",
        ),
    ] = 30.0
    max_crashes: Annotated[
        int,
        typer.Option(
            "--max-crashes",
            metavar="NUMBER",
            help="How often a job that runs alone may crash its relay before it is a dead letter.",
        ),
    ] = 3
    prune_seconds: Annotated[
        float,
        typer.Option(
            "--prune-seconds",
            metavar="SECONDS",
            help="The longest time between two deletions of messages and effects whose retention is over. 0: never.",
        ),
    ] = 60.0
    stats_seconds: Annotated[
        float,
        typer.Option(
            "--stats-seconds",
            metavar="SECONDS",
            help="The longest time between two additions to the history, which a killed relay loses. 0: never.",
        ),
    ] = 15.0
    no_reindex: Annotated[
        bool,
        typer.Option(
            "--no-reindex",
            help="Do not rebuild bloated indexes of the job table (REINDEX CONCURRENTLY). Only a relay whose role owns "
            "the tables rebuilds them.",
        ),
    ] = False
    no_schedules: Annotated[
        bool,
        typer.Option(
            "--no-schedules",
            help="Do not store the schedules that the registry declares, and disable none; what is stored is fired all "
            "the same. Or set OUTBOXQ_NO_SCHEDULES=1.",
        ),
    ] = False
    allow_asynchronous_commit: Annotated[
        bool,
        typer.Option(
            "--allow-asynchronous-commit",
            help="Work although synchronous_commit is off: a crash of the server may undo what was reported as done.",
        ),
    ] = False
    allow_one_phase: Annotated[
        bool,
        typer.Option(
            "--allow-one-phase",
            help="Work although tables that Citus distributes are committed before outboxq's: a crash in between loses "
            "jobs whose rows stand, and runs others twice.",
        ),
    ] = False
    stall_seconds: Annotated[
        float,
        typer.Option(
            "--stall-seconds",
            metavar="SECONDS",
            help="With several processes: kill and replace one that has shown no sign of life for so long. 0: never.",
        ),
    ] = 60.0
    health_file: Annotated[
        Path | None,
        typer.Option(
            "--health-file",
            metavar="PATH",
            help="Write the state of the relay into this file once a second, for `outboxq health`.",
            show_default=False,
        ),
    ] = None
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="ADDRESS",
            help="Serve metrics for Prometheus on [HOST:]PORT, /metrics; the host is 127.0.0.1 if it is left out. With "
            "several processes, theirs added up. Needs outboxq[metrics].",
            show_default=False,
        ),
    ] = None
    metrics_detail: Annotated[
        Literal["kind", "queue"],
        typer.Option(
            "--metrics-detail", metavar="DETAIL", help="kind: a series for each kind of job; queue: for each queue."
        ),
    ] = "kind"
    listen_url: Annotated[
        list[str] | None,
        typer.Option(
            "--listen-url",
            metavar="URL",
            help="A direct URL of the server, to LISTEN on, if the database URL leads to a transaction pooler; for "
            "several databases one for each, in their order. Other users of the machine can see it here: prefer the "
            "variable OUTBOXQ_LISTEN_URL.",
            show_default=False,
        ),
    ] = field(default=None, repr=False)
    no_listen: Annotated[bool, typer.Option("--no-listen", help="Do not LISTEN for new jobs: poll only.")] = False
    schema: Schema = DEFAULT_SCHEMA
    log_level: Annotated[
        LogLevel,
        typer.Option(
            "--log-level",
            metavar="LEVEL",
            help="What to log to standard error: debug, info, warning or error, and what is graver.",
        ),
    ] = "info"
    log_format: Annotated[
        LogFormat | None,
        typer.Option(
            "--log-format",
            metavar="FORMAT",
            help="text, or json: an object a line, the application's own records too. Without it: text, unless the "
            "application sets logging up when it is imported.",
            show_default=False,
        ),
    ] = None
    no_log_tracebacks: Annotated[
        bool,
        typer.Option(
            "--no-log-tracebacks",
            help="Log failed attempts in a line each. Their tracebacks are stored all the same: `outboxq jobs show`.",
        ),
    ] = False
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="For development: start the relay again when a .py file of the application changes. Needs "
            "outboxq[reload].",
        ),
    ] = False
    reload_dirs: Annotated[
        list[Path] | None,
        typer.Option(
            "--reload-dir",
            metavar="PATH",
            help="With --reload: the directory to watch. May be repeated. Without it: the current directory, and the "
            "package of the registry.",
            show_default=False,
        ),
    ] = None
    database_url: DatabaseUrls = field(default=None, repr=False)

    def config(self, listen_url: str | None) -> "RelayConfig":
        """Return the configuration for the relays of one database.

        Args:
            listen_url: The URL at which the relays listen for new jobs; ignored with --no-listen.

        Raises:
            ConfigError: a value that cannot be used.
        """
        from outboxq import config

        return config.RelayConfig(
            groups=tuple(config.SlotGroup.parse(text) for text in self.queue or ()),
            **self._numbers(),
            reindex=not self.no_reindex,
            declare_schedules=not (self.no_schedules or config.no_schedules()),
            allow_asynchronous_commit=self.allow_asynchronous_commit,
            allow_one_phase=self.allow_one_phase,
            listen=not self.no_listen,
            listen_url=listen_url,
            schema=self.schema,
        )

    def _numbers(self) -> dict[str, Any]:
        """Return the numeric options that are given, by the names of their settings in `RelayConfig`."""
        given = {name: getattr(self, name) for name in _NUMBERS}
        return {name: value for name, value in given.items() if value is not None}

    def check_reload(self, databases: int) -> None:
        """Refuse --reload together with options that it does not support.

        Raises:
            WrongUsage: the options do not fit; the message says what to do.
        """
        if self.reload_dirs and not self.reload:
            raise WrongUsage("--reload-dir says what --reload watches: add --reload")
        if self.reload and (self.processes > 1 or self.drain or databases > 1):
            other = "--drain" if self.drain else "--processes" if self.processes > 1 else "all databases but one"
            raise WrongUsage(f"--reload keeps one relay running, for development: leave {other} out")
        if self.reload and self.metrics is not None:
            raise WrongUsage("--reload is for development: leave --metrics out")

    def of_one_process(self) -> list[str]:
        """Return the command line of a relay process, which a supervisor or `--reload` starts.

        The command line has no database URLs, because other users of the machine could read them there.
        """
        command = [sys.executable, "-m", "outboxq", "relay", self.target]
        command += ["--schema", self.schema, "--log-level", self.log_level]
        command += ["--log-format", self.log_format] if self.log_format else []
        command += [part for text in self.queue or () for part in ("--queue", text)]
        command += [
            part for name, given in self._numbers().items() for part in (f"--{name.replace('_', '-')}", str(given))
        ]
        flags = {
            "--no-reindex": self.no_reindex,
            "--no-schedules": self.no_schedules,
            "--allow-asynchronous-commit": self.allow_asynchronous_commit,
            "--allow-one-phase": self.allow_one_phase,
            "--drain": self.drain,
            "--no-listen": self.no_listen,
            "--no-log-tracebacks": self.no_log_tracebacks,
        }
        return [*command, *(flag for flag, is_given in flags.items() if is_given)]


@takes(RelayOptions)
def relay(options: RelayOptions) -> None:
    """Claim jobs and run their handlers, until SIGTERM or Ctrl-C.

    A stopping relay lets the running handlers finish; a second signal ends it at once, and open transactions are rolled
    back. While the database is down it waits, and logs why; but if the server does not know the database, the role or
    the password at the first connection, or the tables are missing, it ends.

    Exit codes: 0 it was stopped, or the queues are drained, with any outcome of the jobs (see `outboxq dead list`); 1
    it failed; 2 it could not start like this; 3 a handler could not be stopped at its deadline, so that the process
    must be replaced; 4 the server has refused the role, the password or the database for five minutes.

    With several databases each has relays of its own, and one that is down, or refuses its relays later, stops no work
    of another. It ends with 2 if one refuses them at the start; with 2 or 4 if later all do.

    \b
    Examples:
      outboxq relay myapp.jobs:jobs
      outboxq relay myapp.jobs:jobs --queue accounts=4 --queue urgent,normal=2
      outboxq relay myapp.jobs:jobs --queue webhooks=1000 --call-connections 10
      outboxq relay myapp.jobs:jobs --processes 2 --log-format json
      outboxq relay myapp.jobs:jobs --processes 4 --health-file /tmp/relay.json
      outboxq relay myapp.jobs:jobs --metrics 0.0.0.0:9464
      outboxq relay myapp.jobs:jobs --database-url "$A" --database-url "$B"
      outboxq relay myapp.jobs:jobs --drain
      outboxq relay myapp.jobs:jobs --reload
    """
    from outboxq.cli.relay_process import run_relay

    run_relay(options)


def health(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The --health-file of the relay.", show_default=False)],
    max_age_seconds: Annotated[
        float,
        typer.Option(
            "--max-age-seconds",
            metavar="SECONDS",
            min=2.0,
            help="How old the file may be. A relay writes it once a second.",
        ),
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Check if the relay that writes this file lives, for a container's probe. Queries no database.

    Exit codes: 0 the relay starts, works, or waits for its database; 1 it is stopping, has ended, or has not written
    the file for too long.

    \b
    Examples:
      outboxq health /tmp/relay.json
      outboxq health /tmp/relay.json --max-age-seconds 10 --json
    """
    from outboxq.relay.health import judge

    verdict = judge(path, max_age_seconds)
    if as_json:
        print_json({"alive": verdict.alive, "why": verdict.why, "health": verdict.health})
    else:
        typer.echo(f"{'alive' if verdict.alive else 'not alive'}: {verdict.why}")
    raise typer.Exit(0 if verdict.alive else 1)
