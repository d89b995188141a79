"""Checks for effects (recorded calls to other services) that need an operator: unknown, or left by their caller."""

from collections.abc import Iterator

from outboxq.codec.text import several
from outboxq.doctor.findings import CheckContext, Finding, detail_of
from outboxq.doctor.formatting import age
from outboxq.statements.doctor import effects as statements

# A handler's retries come sooner than this, as a rule.
_ABANDONED_SECONDS = 3_600.0


def find_unknown_effects(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for effects of unknown outcome: their calls are not made again until an operator resolves them."""
    found = context.connection.execute(statements.unknown_effects(context.schema)).one()
    if found.effects:
        effects, are = _effects(found.effects), "is" if found.effects == 1 else "are"
        yield Finding(
            "effects-unknown",
            "warning",
            f"{effects} {are} unknown, the oldest for {age(found.oldest_seconds)}: it is not known if the "
            "call was applied",
            detail_of(found),
            "Ask the other side by the provider key (outboxq effects show), then: outboxq effects resolve SCOPE KEY "
            "--applied, or --not-applied. They are listed by outboxq effects list --status unknown; one with a scope "
            "such as 'POST /orders' is an HTTP request: look at the rows that it writes, for no other side has its "
            "provider key.",
        )


def find_abandoned_effects(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for calls that have had no outcome for an hour, and that no later caller has made again.

    Their caller died, or failed without knowing whether the call was applied.
    """
    found = context.connection.execute(statements.abandoned_effects(context.schema, _ABANDONED_SECONDS)).one()
    if found.effects:
        was = "was" if found.effects == 1 else "were"
        yield Finding(
            "effects-abandoned",
            "warning",
            f"{_effects(found.effects)} {was} started, and nobody came back to finish: the oldest lock ran out "
            f"{age(found.oldest_seconds)} ago",
            detail_of(found),
            "The next caller finds out what became of the call: see that there is one, for its job may be a dead "
            "letter. Else ask the other side (outboxq effects list --status started, and --status retryable), then: "
            "outboxq effects resolve SCOPE KEY --applied, or --not-applied.",
        )


def _effects(number: int) -> str:
    if number == statements.MAX_EFFECTS:
        return f"{number:,} or more effects"
    return several(number, "effect", "effects")
