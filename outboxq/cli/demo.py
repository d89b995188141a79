"""`outboxq demo`."""

from typing import Annotated

import typer

from outboxq.cli.options import AsJson


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
