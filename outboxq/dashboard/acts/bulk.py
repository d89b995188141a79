"""Actions that begin, stop or resume a change of many rows, such as a retry of all dead letters of a queue."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta

from outboxq.admin.actions import Total
from outboxq.admin.audit import AuditDetail, show_audit
from outboxq.admin.browse import BULK_ACTIONS
from outboxq.admin.bulk import MAX_COUNT
from outboxq.admin.marks import Begin
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.forms import About, Form
from outboxq.dashboard.intents import ASKED_ABOVE, Intent, needed_for
from outboxq.dashboard.parameters import OfEntry, Reason, ReasonedEntry
from outboxq.dashboard.roles import Role
from outboxq.dashboard.route import Done, Work
from outboxq.dashboard.runs import OnPage, ToRun
from outboxq.dashboard.view import Look
from outboxq.errors import AuditNotFound


@dataclass(frozen=True, kw_only=True, slots=True)
class Apply:
    """The fields of the form on a preview's page, by which the user begins the previewed change.

    Attributes:
        intent: The signed preview (see `Intent`): the rows that were shown, and their change.
        typed: The text that the user typed to confirm the change; None if the form had no field for it.
    """

    intent: Annotated[str, Meta(max_length=20_000)]
    typed: Annotated[str, Meta(max_length=100)] | None = None
    reason: Reason = ""


def about_entry(look: Look, asked: OfEntry) -> About:
    """Return the name of a change of many rows and the path of its page, for the forms that stop or resume it."""
    entry = show_audit(look.connection, asked.entry).entry
    return About(name=f"{entry.action} by {entry.actor}", back=f"audit/{entry.id}")


STOP = Form(
    title="Stop this change",
    means="It ends after its current page. What was changed stays as it is, and the change can be resumed.",
    button="Stop",
    about=about_entry,
)
RESUME = Form(
    title="Go on with this change",
    means="It goes on after its last page, with the rows that were meant when it began. A process that still works on "
    "it ends at its next page.",
    button="Go on",
    about=about_entry,
)


def apply_preview(work: Work, asked: Apply) -> Done:
    """Check the preview that a form has sent back, and return a result with the change to run in the background.

    If the audit shows that the change has begun before, the result has no change to run.

    Raises:
        Refused: the preview cannot be applied, or the database has no audit that the dashboard may write.
    """
    intent = work.desk.intents.open(asked.intent, work.caller)
    _check(work, intent, asked.typed)
    back = f"audit/{intent.entry}"
    with work.begin() as connection:
        if not work.actions.keeps_audit(connection):
            raise Refused(
                409,
                "A change of many rows is followed and gone on with by its row in the audit, and this database has no "
                "audit that the dashboard may write: run `outboxq migrate`, and what `outboxq roles --sql` prints.",
            )
        try:
            show_audit(connection, intent.entry)
        except AuditNotFound:
            pass
        else:
            return Done("It was begun already.", back, {"audit": intent.entry})
    return Done("It has begun.", back, {"audit": intent.entry}, ToRun(intent.entry, partial(_run, work, intent)))


def stop_run(work: Work, asked: ReasonedEntry) -> Done:
    """Request that a change of many rows stops: the process that runs it ends it after the present page of rows."""
    with work.begin() as connection:
        _bulk(show_audit(connection, asked.entry))
        stopped: Literal["stopped", "stopped already", "over"] = work.actions.stop(connection, asked.entry)
    said = {"stopped": "It is stopped.", "stopped already": "It was stopped already.", "over": "It had ended already."}
    return Done(said[stopped], f"audit/{asked.entry}", {"state": stopped})


def resume_run(work: Work, asked: ReasonedEntry) -> Done:
    """Check that a stopped or interrupted change of many rows may be resumed, and return it to run in the background.

    The change goes on after the last page of rows that it committed.

    Raises:
        Refused: the entry of the audit is no change of many rows, or the user lacks the role for it.
    """
    with work.begin() as connection:
        detail = show_audit(connection, asked.entry)
    _bulk(detail)
    needs = needed_for(detail.entry.action, detail.entry.expected)
    if work.caller.user.role < needs:
        raise Refused(
            403, f"To go on with this takes the role {needs.label}, and yours is {work.caller.user.role.label}."
        )
    run = ToRun(asked.entry, partial(_resume, work, asked.entry))
    return Done("It goes on.", f"audit/{asked.entry}", {"audit": asked.entry}, run)


def _run(work: Work, intent: Intent, begin: Begin, on_page: OnPage) -> Total:
    was_typed = bool(intent.words(is_production=work.desk.settings.is_production))
    most = _most_of(work) if was_typed else ASKED_ABOVE
    return work.actions.run(
        begin, intent.action, entry=intent.entry, expected=intent.expected, most=most, on_page=on_page
    )


def _resume(work: Work, entry: UUID, begin: Begin, on_page: OnPage) -> Total:
    return work.actions.resume(begin, entry, most=_most_of(work), on_page=on_page)


def _most_of(work: Work) -> int | None:
    """Return the most rows that this user may change at once: 10,000, or None (no limit) for an admin."""
    return None if work.caller.user.role >= Role.ADMIN else MAX_COUNT


def _check(work: Work, intent: Intent, typed: str | None) -> None:
    """Raise `Refused` if a previewed change needs a higher role, is older than five minutes, or was not confirmed.

    To confirm, the user types one of the words that `Intent.words` returns.
    """
    role, is_production = work.caller.user.role, work.desk.settings.is_production
    if role < intent.needs:
        raise Refused(403, f"This takes the role {intent.needs.label}, and yours is {role.label}.")
    if intent.is_old:
        raise Refused(409, "The preview was older than five minutes. This is the present state: look at it once more.")
    if not intent.is_confirmed(typed, is_production=is_production):
        words = " or ".join(intent.words(is_production=is_production))
        raise Refused(400, f"Nothing was done yet: type {words} to confirm it.")


def _bulk(detail: AuditDetail) -> None:
    if detail.entry.action not in BULK_ACTIONS:
        raise Refused(409, f"It is {detail.entry.action}, which is none of many rows.")
