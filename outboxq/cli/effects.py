"""`outboxq effects`: list, show and resolve effects, and give a copied database an id of its own."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.help import Commands
from outboxq.cli.options import ActingOptions, Yes, only, takes
from outboxq.cli.output import notice, print_json, print_wrapped
from outboxq.cli.reading import lists, shows
from outboxq.cli.tables import Column, print_table
from outboxq.codec.text import several

if TYPE_CHECKING:
    from datetime import timedelta

    from sqlalchemy import Connection

    from outboxq.admin.effects import Verdict
    from outboxq.admin.installation import NewInstallation

_PER_TRANSACTION = 200

app = Commands(help="List, show and resolve effects: calls that are made once; give a copied database keys of its own.")

Scope = Annotated[
    str, typer.Argument(metavar="SCOPE", help="What is called: the first argument of `once`.", show_default=False)
]
Key = Annotated[
    str, typer.Argument(metavar="KEY", help="Which call it is: the `key` that `once` was given.", show_default=False)
]
ErrorFilter: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--error", metavar="TEXT", help="Only those whose stored error has this text in it.", show_default=False
    ),
]
StatusFilter: TypeAlias = Annotated[
    Literal["started", "done", "failed", "retryable", "unknown"] | None,
    typer.Option(
        "--status",
        metavar="STATUS",
        help="Only in this status: started, done, failed, retryable or unknown.",
        show_default=False,
    ),
]


@app.command("list")
@lists(
    "effects",
    (
        Column("scope", "id"),
        Column("key", "id"),
        Column("status"),
        Column("in_doubt", rank=1),
        Column("attempts", rank=2),
        Column("changed_at", rank=1),
        Column("first_called_at", rank=4),
        Column("locked_until", rank=6),
        Column("expires_at", rank=5),
        Column("provider_key", "id", rank=7),
        Column("error", "text"),
    ),
    "--scope, --status or --error",
)
def list_effects(
    connection: "Connection",
    scope: Annotated[str | None, only("scope")] = None,
    status: StatusFilter = None,
    error: ErrorFilter = None,
    *,
    limit: int,
) -> Sequence[object]:
    """List effects without their results: unknown ones first, then others that are not settled, then the rest.

    started: a call is under way, or its caller died. done and failed: later callers get its outcome. retryable: the
    next caller calls again; it is in doubt if an earlier call may have been applied. unknown: whether the call was
    applied cannot be found out, and it is not made again until you resolve the effect.

    \b
    Examples:
      outboxq effects list --status unknown
      outboxq effects list --scope payments --limit 10 --json
    """
    from outboxq.admin import effects

    return effects.list_effects(connection, effects.EffectFilter(scope=scope, status=status, error=error), limit=limit)


@app.command("show")
@shows
def show_effect(connection: "Connection", scope: Scope, key: Key) -> object:
    """Show one effect with its result.

    The provider key is the idempotency key that the other side was given: look the call up there by it.

    \b
    Example:
      outboxq effects show payments order-1001
    """
    from outboxq.admin import effects

    return effects.show_effect(connection, scope, key)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolveOptions(ActingOptions):
    """The options of `outboxq effects resolve`."""

    scope: Scope
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="Which call it is; without it, many of the scope.", show_default=False),
    ] = None
    status: StatusFilter = None
    error: ErrorFilter = None
    applied: Annotated[bool, typer.Option("--applied", help="The other side has applied the call.")] = False
    result: Annotated[
        str | None,
        typer.Option(
            "--result",
            metavar="JSON",
            help="With --applied: what the call would have returned, or null if the handler does not use it.",
            show_default=False,
        ),
    ] = None
    not_applied: Annotated[
        bool, typer.Option("--not-applied", help="Not applied, and never will be: the next caller calls again.")
    ] = False
    retention_days: Annotated[
        int, typer.Option("--retention-days", metavar="DAYS", min=1, max=3653, help="How long to remember it.")
    ] = 30
    everything: Annotated[
        bool, typer.Option("--all", help="Without KEY: all of the scope that have no known outcome.")
    ] = False
    yes: Yes = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing: only list those that would be resolved.")
    ] = False


@app.command("resolve")
@takes(ResolveOptions)
def resolve_effect(options: ResolveOptions) -> None:
    """Say what became of a call that has no known outcome, or of many.

    The effect is unknown, in doubt, or its caller never came back. Ask the other side first, by the provider key that
    `outboxq effects show` prints. For an HTTP request (a scope such as 'POST /orders') look at the rows that it writes.
    After --applied the call is not made again, and callers get the result that you give as JSON; give null if the
    handler does not use it, for without any --result a caller fails, and its job is a dead letter. After --not-applied
    the next caller calls again: if that was wrong, the call is made twice.

    An effect that is done without a result can be given one in the same way. Any other effect that is settled, or that
    is being called, is not changed: the exit code is 1.

    Without a key it is said of those of the scope that have no known outcome and match --status and --error, or of
    --all of them: after a bug in front of the call, for example, that made each of them unknown. Asks first.

    \b
    Examples:
      outboxq effects resolve payments order-1001 --not-applied
      outboxq effects resolve payments --error TypeError --not-applied --dry-run
      outboxq effects resolve payments order-1002 --applied --result '{"id": 42}'
      outboxq effects resolve mail welcome-7 --applied --result null
    """
    from datetime import timedelta

    verdict, keep = _verdict(options), timedelta(days=options.retention_days)
    if options.key is None:
        _resolve_many(options, verdict, keep)
        return
    if options.dry_run or options.everything or options.status is not None or options.error is not None:
        raise WrongUsage("--status, --error, --all and --dry-run are for many: leave KEY out")
    with options.transaction() as connection:
        found = options.actions().resolve_effect(connection, options.scope, options.key, verdict, keep=keep)
    if options.as_json:
        print_json({"resolved": found})
        return
    what = "applied: it will not be called again" if options.applied else "not applied: the next caller calls again"
    print_wrapped(f"effect {found.scope!r}, key {found.key!r}, is resolved as {what}")
    if options.applied and options.result is None:
        notice("it has no result: a caller that asks for it fails (see --result)")


def _resolve_many(options: ResolveOptions, verdict: "Verdict", keep: "timedelta") -> None:
    from outboxq.admin.effects import EffectFilter, find_unresolved

    if options.status is None and options.error is None and not options.everything:
        raise WrongUsage("which one? Give KEY; or, for many of the scope, --status, --error or --all")
    if options.result not in (None, "null"):
        raise WrongUsage("one result is not that of many calls: give KEY, or --result null if no handler uses it")
    what = "applied" if options.applied else "not applied"
    with options.open() as begin:
        with begin() as connection:
            found = find_unresolved(connection, EffectFilter(options.scope, options.status, options.error))
        number = several(len(found), "effect", "effects")
        if options.dry_run:
            if options.as_json:
                print_json({"dry_run": True, "would_be_resolved": found})
            else:
                columns = Column("key", "id"), Column("status"), Column("changed_at"), Column("error", "text")
                print_table(columns, found)
                typer.echo(f"dry run: {number} would be resolved as {what}")
            return
        if found and not options.yes:
            if not sys.stdin.isatty():
                raise WrongUsage(f"{number} match, and there is no terminal to ask at: add --yes, or try --dry-run")
            typer.confirm(f"Resolve {number} of {options.scope!r} as {what}?", abort=True, err=True)
        actions, resolved, left = options.actions(), 0, 0
        for first in range(0, len(found), _PER_TRANSACTION):
            with begin() as connection:
                done = actions.resolve_effects(connection, found[first : first + _PER_TRANSACTION], verdict, keep=keep)
            # The transaction has been committed.
            resolved, left = resolved + len(done.resolved), left + len(done.left)
    if options.as_json:
        print_json({"resolved": resolved, "left": left})
    else:
        typer.echo(f"resolved {several(resolved, 'effect', 'effects')} as {what}")
    if left:
        notice(f"{left:,} were settled or locked by others since then, and left as they are")
    raise typer.Exit(1 if left else 0)


def _verdict(options: ResolveOptions) -> "Verdict":
    from outboxq.admin.effects import WasApplied, WasNotApplied

    if options.applied == options.not_applied:
        raise WrongUsage("what became of the call? Give --applied or --not-applied, and not both")
    if options.not_applied and options.result is not None:
        raise WrongUsage("a call that was not applied has no result: leave --result out, or give --applied")
    return WasApplied(options.result) if options.applied else WasNotApplied()


@dataclass(frozen=True, kw_only=True, slots=True)
class NewInstallationOptions(ActingOptions):
    """The options of `outboxq effects new-installation`."""

    yes: Yes = False


@app.command("new-installation")
@takes(NewInstallationOptions)
def new_installation(options: NewInstallationOptions) -> None:
    """Give a copied database an id, and so keys, of its own.

    Outboxq makes the keys that it gives to other services from the installation's id, and a dump, a snapshot or a clone
    copies that id. Two installations with one id give the same key to different calls: a service that honours keys
    answers one of them with the result of the other, and does nothing. Run this in the copy (staging, a test) and not
    in the original, as the owner of the tables, before anything runs there.

    Settled effects stay, and their outcomes are replayed. Effects that may have been called (started, retryable and in
    doubt) become unknown, so that no call is made with a key of the original; those that surely were not (retryable)
    are forgotten, and called with a new key. An unknown effect keeps its key: in a copy, resolve it as applied, with a
    --result.

    While a relay in lease mode is alive or a call is under way nothing is done, and the exit code is 1. Relays in
    transaction mode, and other processes between two calls, are not seen. Every process reads the id once and calls
    with keys of the id that it read: stop all of them before, and start them again after the command. Jobs are not
    touched: relays of the copy run those that were copied, with the new keys. docs/operating.md describes how to copy a
    database.

    \b
    Examples:
      outboxq effects new-installation
      outboxq effects new-installation --yes --json
    """
    if not options.yes:
        if not sys.stdin.isatty():
            raise WrongUsage("new-installation asks first, and the input is no terminal: add --yes")
        question = "Give this installation a new id? Calls of the former one are not repeated."
        typer.confirm(question, abort=True, err=True)
    with options.transaction() as connection:
        renewed = options.actions().renew_installation(connection)
    if options.as_json:
        print_json({"installation": renewed})
        return
    _print_installation(renewed)


def _print_installation(renewed: "NewInstallation") -> None:
    print_wrapped(f"the installation's id is now {renewed.id}; it was {renewed.former_id}")
    print_wrapped(
        f"effects that were not applied, and so are forgotten and get a key of the new id: {renewed.forgotten:,}"
    )
    print_wrapped(f"effects that may have been applied, and so are unknown now and not called: {renewed.doubted:,}")
    if renewed.unknown:
        notice(
            f"{several(renewed.unknown, 'effect is', 'effects are')} unknown, with keys of the former id: `outboxq "
            "effects list --status unknown`; in a copy resolve them as applied, with a --result"
        )
