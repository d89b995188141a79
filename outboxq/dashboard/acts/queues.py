"""Actions on queues and kinds: pauses, limits, and how long dead letters are kept."""

from dataclasses import dataclass, replace
from typing import Annotated
from uuid import UUID

from msgspec import Meta

from outboxq.admin import kinds
from outboxq.admin.actions import unmarked
from outboxq.admin.flow import list_paused_kinds
from outboxq.admin.history import read_history
from outboxq.admin.queues import Limit, Queue, list_queues
from outboxq.dashboard.forms import About, Field, Form
from outboxq.dashboard.parameters import Name, OfKind, OfQueue, Reason
from outboxq.dashboard.route import Done, Work
from outboxq.dashboard.segments import as_segment
from outboxq.dashboard.view import Look
from outboxq.dashboard.views.history import span_of
from outboxq.queue_limits import (
    FOREVER,
    MAX_PER_GROUP,
    MAX_RATE_JOBS,
    MAX_RUNNING,
    keep_text,
    kept_in_words,
    make_limits,
    parse_keep,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeQueue(OfQueue):
    """The fields of a form about one queue: the queue, and the reason for the change."""

    reason: Reason = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeKind(OfKind):
    """The fields of a form about a kind in one queue: the kind, the queue, and the reason for the change."""

    queue: Name
    reason: Reason = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetLimits(ChangeQueue):
    """The fields of the form that sets a queue's limits. A limit that is left out is removed.

    Attributes:
        limit: Jobs that may run at a time.
        per_group: Jobs of one group that may run at a time.
        rate: Jobs that may begin in a time, such as `10/s`.
        burst: Jobs that may begin at once after a pause.
    """

    limit: Annotated[int, Meta(ge=1, le=MAX_RUNNING)] | None = None
    per_group: Annotated[int, Meta(ge=1, le=MAX_PER_GROUP)] | None = None
    rate: Annotated[str, Meta(max_length=40)] | None = None
    burst: Annotated[int, Meta(ge=1, le=MAX_RATE_JOBS)] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepDead(ChangeQueue):
    """The fields of the form that sets how long a queue keeps its dead letters.

    Attributes:
        keep_dead: A duration such as `30d`, or `forever`; None for the duration that the application declares.
    """

    keep_dead: Annotated[str, Meta(max_length=20)] | None = None


def about_queue(look: Look, asked: OfQueue) -> About:  # noqa: ARG001  # as every form has it
    """Return the name of a queue and the path of its page, for forms that change the queue.

    The queue need not exist: it may be paused before its first job.
    """
    return About(name=asked.queue, back=f"queues/{as_segment(asked.queue)}")


def about_limits(look: Look, asked: OfQueue) -> About:
    """Return a queue's name, page and the limits that operators have set, for the form that sets the limits."""
    known = _setting_of(look, asked.queue)
    values: dict[str, object] = {}
    if known is not None:
        found = known.limits
        values = {"limit": found.running, "per_group": found.per_group, "rate": found.rate, "burst": found.rate_burst}
    return replace(
        about_queue(look, asked), values={name: str(value) for name, value in values.items() if value is not None}
    )


def about_keeping(look: Look, asked: OfQueue) -> About:
    """Return a queue's name and page, for the form that sets how long the queue keeps its dead letters.

    The form's field is filled with the time that operators have set, if any.
    """
    known = _setting_of(look, asked.queue)
    seconds = None if known is None else known.keep_dead_seconds
    return replace(about_queue(look, asked), values={} if seconds is None else {"keep_dead": keep_text(seconds)})


def _setting_of(look: Look, queue: str) -> Queue | None:
    return next((each for each in list_queues(look.connection) if each.queue == queue), None)


def about_kind(look: Look, asked: OfKind) -> About:
    """Return a kind's name and page, for the forms that pause or resume the kind in one queue.

    The field for the queue is filled with a queue in which the kind is paused or, if there is none, had jobs within 24
    hours.
    """
    paused = [each.queue for each in list_paused_kinds(look.connection) if each.kind == asked.kind]
    recent = look.at("its queues", lambda c: read_history(c, kind=asked.kind, since=span_of("24h").back, by="kind"))
    queues = paused or [row.queue for row in recent or [] if row.queue]
    values = {"queue": queues[0]} if queues else {}
    return About(name=asked.kind, back=f"kinds/{as_segment(asked.kind)}", values=values)


_QUEUE = Field(name="queue", label="Queue", is_required=True, max_length=63, help="The queue of its jobs.")
PAUSE = Form(
    title="Pause this queue",
    means="Relays claim no more jobs from it. Jobs that run go on, and jobs can still be added.",
    button="Pause",
    about=about_queue,
)
RESUME = Form(title="Resume this queue", means="Relays claim from it again.", button="Resume", about=about_queue)
LIMITS = Form(
    title="Limits of this queue",
    means="What operators set here holds instead of what the application declares. A limit that is left empty is taken "
    "away: then the application's holds, if it has one.",
    button="Set limits",
    about=about_limits,
    fields=(
        Field(name="limit", label="Jobs at a time", kind="number", help=f"1 to {MAX_RUNNING:,}."),
        Field(name="per_group", label="Jobs of a group at a time", kind="number", help=f"1 to {MAX_PER_GROUP:,}."),
        Field(name="rate", label="Jobs that begin in a time", help="Such as 10/s, 100/min or 5/30s.", max_length=40),
        Field(name="burst", label="Burst", kind="number", help="How many may begin at once after a pause."),
    ),
)
KEEP_DEAD = Form(
    title="How long dead letters are kept",
    means="Relays delete dead letters of this queue after this time, for good, within some minutes. Left empty, they "
    "are kept as the application declares: for ever, if it declares nothing.",
    button="Keep dead letters",
    about=about_keeping,
    fields=(
        Field(
            name="keep_dead",
            label="Keep them for",
            help=f"Such as 30d, 12h or 90m; or {FOREVER}, even if the application declares a time.",
            max_length=20,
        ),
    ),
)
PAUSE_KIND = Form(
    title="Pause this kind",
    means="Relays run none of its jobs; the other kinds of the queue go on. Jobs that run go on, and jobs can still be "
    "added.",
    button="Pause",
    about=about_kind,
    fields=(_QUEUE,),
)
RESUME_KIND = Form(
    title="Resume this kind",
    means="Relays run its jobs again; those that were put off run at once.",
    button="Resume",
    about=about_kind,
    fields=(_QUEUE,),
)


def pause_queue(work: Work, asked: ChangeQueue) -> Done:
    """Pause a queue: relays claim no more of its jobs."""
    with work.begin() as connection:
        changed = work.actions.pause_queues(connection, [asked.queue])
    text = f"The queue {asked.queue} is paused." if changed else f"The queue {asked.queue} was paused already."
    return Done(text, f"queues/{as_segment(asked.queue)}", {"paused": changed})


def resume_queue(work: Work, asked: ChangeQueue) -> Done:
    """Resume a queue: relays claim its jobs again."""
    with work.begin() as connection:
        changed = work.actions.resume_queues(connection, [asked.queue])
    text = f"The queue {asked.queue} runs again." if changed else f"The queue {asked.queue} was not paused."
    return Done(text, f"queues/{as_segment(asked.queue)}", {"resumed": changed})


def set_limits(work: Work, asked: SetLimits) -> Done:
    """Set the limits that the form gives for a queue, and remove the limits that the form leaves out."""
    limits = make_limits(running=asked.limit, per_group=asked.per_group, rate=asked.rate, burst=asked.burst)
    given: dict[Limit, object] = {"running": asked.limit, "per_group": asked.per_group, "rate": asked.rate}
    drop: list[Limit] = [name for name, value in given.items() if value is None]
    with work.begin() as connection:
        changed = work.actions.set_limits(connection, [asked.queue], limits, drop)
    text = f"Operators limit {asked.queue}: {limits}." if changed else "It had these limits already."
    return Done(text, f"queues/{as_segment(asked.queue)}", {"limited": changed})


def keep_dead(work: Work, asked: KeepDead) -> Done:
    """Set how long a queue keeps its dead letters.

    Without a time the setting is removed, and the time that the application declares applies.
    """
    seconds = None if asked.keep_dead is None else parse_keep(asked.keep_dead.strip())
    with work.begin() as connection:
        changed = work.actions.keep_dead(connection, [asked.queue], seconds)
    said = kept_in_words(seconds) if changed else "kept them so already"
    return Done(f"The queue {asked.queue} {said}.", f"queues/{as_segment(asked.queue)}", {"limited": changed})


def pause_kind(work: Work, asked: ChangeKind) -> Done:
    """Pause a kind in one queue: relays run no more of its jobs there."""
    with work.begin() as connection:
        changed = work.actions.pause_kinds(connection, asked.queue, [asked.kind])
    said = "is paused" if changed else "was paused already"
    return Done(f"The kind {asked.kind} {said} in {asked.queue}.", _page_of(asked), {"paused": changed})


def resume_kind(work: Work, asked: ChangeKind) -> Done:
    """Resume a kind in one queue. Its jobs that relays have postponed because of the pause become due again."""
    with work.begin() as connection:
        changed = work.actions.resume_kinds(connection, asked.queue, [asked.kind])
    # Committed: relays that received the resumption no longer put these jobs off.
    brought = _bring_back(work, asked)
    said = "runs again" if changed else "was not paused"
    return Done(
        f"The kind {asked.kind} {said} in {asked.queue}.",
        _page_of(asked),
        {"resumed": changed, "brought_back": brought},
    )


def _bring_back(work: Work, asked: ChangeKind) -> int:
    brought = 0
    after: UUID | None = None
    while True:
        with work.begin() as connection:
            ids = kinds.put_off_ids(connection, asked.queue, [asked.kind], after=after)
        if not ids:
            return brought
        with unmarked(work.begin, ids, work.warn), work.begin() as connection:
            brought += len(kinds.bring_back(connection, asked.queue, [asked.kind], ids).changed)
        after = ids[-1]


def _page_of(asked: ChangeKind) -> str:
    return f"kinds/{as_segment(asked.kind)}"
