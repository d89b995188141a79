"""`outboxq explain`: say why a job or a queue does not run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import DatabaseOptions, takes
from outboxq.cli.output import print_json, print_wrapped
from outboxq.codec.text import printable

if TYPE_CHECKING:
    from outboxq.admin.explain import Explanation, Reason

# The job was not found, or could not be read.
_NO_ANSWER = ("not-found", "not-known")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainOptions(DatabaseOptions):
    """The options of `outboxq explain`."""

    job_id: Annotated[UUID | None, typer.Argument(metavar="ID", help="The id of a job.", show_default=False)] = None
    queue: Annotated[
        str | None, typer.Option("--queue", metavar="NAME", help="A queue instead of a job.", show_default=False)
    ] = None


@takes(ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """Say why a job, or a queue, does not run.

    Prints the reason to look at first, then others that hold too, each with what to do. Reads only: every look is
    bounded, locks no row, and is given up after two seconds. docs/explain.md has a table of all reasons.

    Exit codes: 0 a reason was found; 1 there is no such job, or it could not be looked at; 2 wrong usage.

    \b
    Examples:
      outboxq explain 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
      outboxq explain --queue mail
      outboxq explain --queue mail --json | jq -r '.reasons[0].code'
    """
    from outboxq.admin.explain import explain_job, explain_queue

    if (options.job_id is None) == (options.queue is None):
        raise WrongUsage("explain takes the id of a job, or --queue NAME")
    with options.transaction() as connection:
        if options.job_id is not None:
            found = explain_job(connection, options.job_id)
        else:
            assert options.queue is not None
            found = explain_queue(connection, options.queue)
    if options.as_json:
        print_json(found)
    else:
        _print(found, options.queue)
    if found.verdict.code in _NO_ANSWER:
        raise typer.Exit(1)


def _print(found: "Explanation", queue: str | None) -> None:
    about = f"job {found.job_id}" if found.kind is None else f"job {found.job_id} of kind {found.kind!r}"
    if queue is None:
        print_wrapped(printable(about if found.queue is None else f"{about} in queue {found.queue!r}") + ":")
    else:
        following = "" if found.job_id is None else f", where the next one is {about}"
        print_wrapped(printable(f"queue {queue!r}{following}") + ":")
    _print_reason(found.verdict)
    if found.reasons[1:]:
        typer.echo("Also:")
    for reason in found.reasons[1:]:
        _print_reason(reason)


def _print_reason(reason: "Reason") -> None:
    print_wrapped(f"{reason.code}: {printable(reason.text)}", "  ", "    ")
    print_wrapped(printable(reason.advice), "      ")
