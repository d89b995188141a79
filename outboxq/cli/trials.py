"""`outboxq demo` and `outboxq torture`: run relays on a new PostgreSQL server, kill some, and check the outcome."""

import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import AsJson, takes
from outboxq.cli.output import notice, print_fields, print_json
from outboxq.cli.tables import Column, print_table

if TYPE_CHECKING:
    from outboxq.torture import TortureReport


def demo(
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="NUMBER", help="How many jobs to commit; at least 100.")
    ] = 1_000,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="NUMBER", help="Repeat an earlier run's customers.", show_default=False),
    ] = None,
    with_dashboard: Annotated[
        bool,
        typer.Option(
            "--dashboard",
            help="Instead of counting, go on until Ctrl-C and show all of it in a browser. Needs outboxq[dashboard].",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Kill a relay at work, and count that nothing was lost or done twice.

    Starts a PostgreSQL server of its own, and leaves nothing behind. Needs outboxq[demo].

    \b
    Examples:
      outboxq demo --jobs 5000
      outboxq demo --dashboard
    """
    if with_dashboard:
        if as_json:
            raise WrongUsage("--dashboard goes on until Ctrl-C, and has nothing to print as JSON")
        _show_market()
        return
    from outboxq.demo.story import run_demo

    raise typer.Exit(run_demo(jobs=jobs, seed=seed, json=as_json))


def _show_market() -> None:
    """Run the demo as a market, a shop with jobs that fail, and serve its dashboard on a free port until a signal."""
    try:
        from outboxq.dashboard import Role, TokenLogin, create_app
        from outboxq.dashboard.serving import announced, listen, serve
    except ModuleNotFoundError as error:
        raise WrongUsage(str(error)) from error
    from outboxq.demo.market_day import open_market, trading
    from outboxq.relay.signals import stop_signals

    login = TokenLogin(role=Role.ADMIN)
    host = "127.0.0.1"
    with open_market(notice) as market, listen(host, 0) as (listening, address):
        app = create_app({"market": market.engine}, auth=login, environment="demo", hosts=[host], live_seconds=2)
        # Not wrapped: a narrow terminal must not break the link.
        typer.echo(announced(address, login), err=True)
        with trading(market):
            serve(app, listening, stop_signals)
    notice("The relays and the server were ended, nothing is left.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of `outboxq torture`."""

    jobs: Annotated[int, typer.Option("--jobs", metavar="NUMBER", help="How many jobs to commit; at least 200.")] = (
        5_000
    )
    faults: Annotated[
        int,
        typer.Option(
            "--faults",
            metavar="NUMBER",
            help="How many faults to cause, spread over the run; at most one for ten jobs.",
        ),
    ] = 50
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="NUMBER", help="Repeat an earlier run's transactions and faults.", show_default=False
        ),
    ] = None
    mode: Annotated[
        Literal["transaction", "lease", "mixed", "flow", "calls", "windows"],
        typer.Option(
            "--mode",
            metavar="MODE",
            help="How the handlers run: transaction, lease or mixed; flow adds groups, limits and coalesced jobs; "
            "calls wait half a second each, under a lease; windows send messages in batches, under a lease.",
        ),
    ] = "transaction"
    relays: Annotated[
        int, typer.Option("--relays", metavar="NUMBER", min=1, max=16, help="How many relay processes.")
    ] = 3
    slots: Annotated[
        int, typer.Option("--slots", metavar="NUMBER", min=1, help="How many slots each relay has for a queue.")
    ] = 2
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="FAULT", help="Cause no other faults; may be repeated.", show_default=False),
    ] = None
    minutes: Annotated[float, typer.Option("--minutes", metavar="MINUTES", help="Give up after so long.")] = 30.0
    as_json: AsJson = False


@takes(Options)
def torture(options: Options) -> None:
    """Disturb relays at random, and check that no job was lost or done twice.

    Starts a PostgreSQL server of its own, relays and producers; kills them, stops them and cuts their connections at
    random; then reads from the database what became of each job. No other database is used, and nothing is left behind.
    Needs outboxq[demo].

    Exit codes: 0 every promise was kept; 1 one was not; 2 wrong usage.

    \b
    Examples:
      outboxq torture
      outboxq torture --jobs 20000 --faults 400 --mode mixed
      outboxq torture --mode calls --slots 100 --only relay-killed
      outboxq torture --seed 7 --json
    """
    from outboxq.torture import TortureOptions
    from outboxq.torture.run import run_torture

    given = asdict(options)
    as_json = given.pop("as_json")
    given["only"] = tuple(options.only or ())
    if options.seed is None:
        given["seed"] = random.randrange(1_000_000)
    report = run_torture(TortureOptions(**given), notice)
    if as_json:
        print_json(report)
    else:
        print_report(report)
    raise typer.Exit(1 if report.problems else 0)


def print_report(report: "TortureReport") -> None:
    """Print a report of `outboxq torture`: the faults as a table, the figures by their JSON names, broken promises."""
    print_table((Column("fault"), Column("times")), [_Times(*each) for each in sorted(report.faults.items())])
    figures = {name: value for name, value in asdict(report).items() if name not in ("faults", "problems")}
    print_fields(figures.items())
    for problem in report.problems:
        notice(f"broken: {problem}")


@dataclass(frozen=True, slots=True)
class _Times:
    """A row of the table of faults: the name of a fault, and the number of times that it was caused."""

    fault: str
    times: int
