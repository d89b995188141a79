"""Actions on effects (calls to other services) and on accepted messages: resolve an effect, or forget a message."""

from dataclasses import dataclass
from typing import Literal

from outboxq.admin.effects import WasApplied, WasNotApplied, show_effect
from outboxq.admin.messages import show_message
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.forms import About, Field, Form
from outboxq.dashboard.parameters import Document, OfEffect, OfMessage, Reason, RequiredReason
from outboxq.dashboard.route import Done, Work
from outboxq.dashboard.segments import as_segment
from outboxq.dashboard.view import Look
from outboxq.errors import MessageNotFound


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolve(OfEffect):
    """The fields of the form by which an operator resolves an effect: a call to another service of unknown outcome.

    Attributes:
        verdict: The operator's finding: `applied` if the other service has carried out the call, else `not-applied`.
        result: The result of an applied call as JSON.
    """

    verdict: Literal["applied", "not-applied"]
    result: Document | None = None
    reason: RequiredReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget(OfMessage):
    """The fields of the form that forgets an accepted message: the message and the reason."""

    reason: Reason = ""


def about_effect(look: Look, asked: OfEffect) -> About:
    """Return the name and page of an effect (a call to another service), for the form that resolves it.

    A note in the form gives the idempotency key by which the other service knows the call.
    """
    found = show_effect(look.connection, asked.scope, asked.key).effect
    notes = (f"Ask the other side by the key that it was given: {found.provider_key}.",)
    back = f"effects/{as_segment(asked.scope)}/{as_segment(asked.key)}"
    return About(name=f"{asked.scope}, {asked.key}", back=back, notes=notes)


def about_message(look: Look, asked: OfMessage) -> About:
    """Return the name of an accepted message and the path of its page, for the form that forgets the message."""
    show_message(look.connection, asked.consumer, asked.message_id)
    back = f"inbox/{as_segment(asked.consumer)}/{as_segment(asked.message_id)}"
    return About(name=f"{asked.consumer}, {asked.message_id}", back=back)


RESOLVE = Form(
    title="Resolve this call",
    means="Say what the other side says of a call whose outcome is not known. If it was applied, it is not made again, "
    "and callers get the result that you give. If it was not applied, the next caller calls again: if that was wrong, "
    "the call is made twice.",
    button="Resolve",
    about=about_effect,
    fields=(
        Field(
            name="verdict",
            label="What became of it",
            kind="choice",
            options=(
                ("", "choose"),
                ("applied", "it was applied"),
                ("not-applied", "it was not applied, and never will be"),
            ),
            is_required=True,
        ),
        Field(
            name="result",
            label="Its result, if it was applied",
            kind="lines",
            help='What the call would have returned, as JSON, such as {"id": 42}; null if the handler does not use it. '
            "Without one a caller that asks for it fails.",
        ),
    ),
    needs_reason=True,
    is_grave=True,
)
FORGET = Form(
    title="Forget this message",
    means="It is accepted again if it is delivered again: its consumer does its work for it a second time. What it led "
    "to stays.",
    button="Forget",
    about=about_message,
    is_grave=True,
)


def resolve_effect(work: Work, asked: Resolve) -> Done:
    """Record an operator's decision that a call to another service (an effect) was applied, or was not.

    A call that was applied is not made again. A call that was not applied is made again by its next caller.
    """
    if asked.verdict == "not-applied" and asked.result is not None:
        raise Refused(400, "A call that was not applied has no result: leave it empty.")
    verdict = WasApplied(asked.result) if asked.verdict == "applied" else WasNotApplied()
    with work.begin() as connection:
        found = work.actions.resolve_effect(connection, asked.scope, asked.key, verdict)
    said = (
        "applied: it is not called again" if asked.verdict == "applied" else "not applied: the next caller calls again"
    )
    back = f"effects/{as_segment(asked.scope)}/{as_segment(asked.key)}"
    return Done(f"It is resolved as {said}.", back, {"resolved": found.status})


def forget_message(work: Work, asked: Forget) -> Done:
    """Delete the record of an accepted message, so that the message is accepted again if it is delivered again."""
    with work.begin() as connection:
        result = work.actions.forget_messages(connection, asked.consumer, [asked.message_id])
    if result.not_found:
        raise MessageNotFound(asked.consumer, asked.message_id)
    if result.held:
        raise Refused(409, "Another session has it at this moment: it was not forgotten. Try again in a moment.")
    return Done(
        "It is forgotten: it is accepted again when it is delivered again.", "inbox", {"forgotten": result.forgotten}
    )
