"""`outboxq health`."""

from pathlib import Path
from typing import Annotated

import typer

from outboxq.cli.options import AsJson


def health(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The --health-file of the relay.", show_default=False)],
    max_age_seconds: Annotated[
        float,
        typer.Option("--max-age-seconds", min=2.0, help="How old the file may be. A relay writes it once a second."),
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Tell whether the relay that writes this file lives, for a container's probe. Asks no database.

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
        from outboxq.cli.output import print_json

        print_json({"alive": verdict.alive, "why": verdict.why, "health": verdict.health})
    else:
        typer.echo(f"{'alive' if verdict.alive else 'not alive'}: {verdict.why}")
    raise typer.Exit(0 if verdict.alive else 1)
