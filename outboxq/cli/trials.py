"""`outboxq demo` and `outboxq torture`: relays that are killed, on a server of their own."""

import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outboxq.cli.options import AsJson, takes
from outboxq.cli.output import notice, print_fields, print_json, print_table

if TYPE_CHECKING:
    from outboxq.torture import TortureReport


def demo(
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="How many jobs to commit.")] = 1_000,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Repeat an earlier run's customers.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Kill a relay in the middle of its work, and count that nothing was lost or done twice.

    Starts a PostgreSQL server of its own, and leaves nothing behind. Needs outboxq[demo].

    \b
    Example:
      outboxq demo --jobs 5000
    """
    from outboxq.demo.story import run_demo

    raise typer.Exit(run_demo(jobs=jobs, seed=seed, json=as_json))


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """A field per option."""

    jobs: Annotated[int, typer.Option("--jobs", min=1, help="How many jobs to commit.")] = 5_000
    faults: Annotated[int, typer.Option("--faults", min=0, help="How many faults to cause, spread over the run.")] = 50
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Repeat an earlier run's transactions and faults.", show_default=False),
    ] = None
    mode: Annotated[
        Literal["transaction", "lease", "mixed"], typer.Option("--mode", help="The mode in which the handlers run.")
    ] = "transaction"
    relays: Annotated[int, typer.Option("--relays", min=1, max=16, help="How many relay processes.")] = 3
    minutes: Annotated[float, typer.Option("--minutes", help="Give up after so long.")] = 30.0
    as_json: AsJson = False


@takes(Options)
def torture(options: Options) -> None:
    """Disturb relays in every way, and check that no job was lost or done twice.

    Starts a PostgreSQL server of its own, relays and producers; kills them, stops them and cuts their connections at
    random; then reads from the database what became of each job. No other database is used, and nothing is left behind.
    Needs outboxq[demo].

    Exit codes: 0 every promise was kept; 1 one was not; 2 wrong usage.

    \b
    Examples:
      outboxq torture
      outboxq torture --jobs 20000 --faults 400 --mode mixed
      outboxq torture --seed 7 --json
    """
    from outboxq.torture import TortureOptions
    from outboxq.torture.run import run_torture

    given = asdict(options)
    as_json = given.pop("as_json")
    if options.seed is None:
        given["seed"] = random.randrange(1_000_000)
    report = run_torture(TortureOptions(**given), notice)
    if as_json:
        print_json(report)
    else:
        _show(report)
    raise typer.Exit(1 if report.problems else 0)


def _show(report: "TortureReport") -> None:
    print_table(("fault", "times"), sorted(report.faults.items()))
    print_fields(
        (
            ("jobs enqueued", report.enqueued),
            ("rolled back", report.rolled_back),
            ("effects", report.effects),
            ("dead letters", report.dead),
            ("lost", report.lost),
            ("doubled", report.doubled),
            ("ran though rolled back", report.ghosts),
            ("left", report.left),
            ("unknown to producers", report.unknown),
            ("of them as their row says", report.unknown_resolved),
            ("faults that met nothing", report.faults_not_met),
            ("relays started", report.relays_started),
            ("longest stall", report.longest_stall_seconds),
            ("seconds", report.seconds),
            ("server", report.server),
            ("seed", str(report.seed)),
        )
    )
    for problem in report.problems:
        notice(f"broken: {problem}")
