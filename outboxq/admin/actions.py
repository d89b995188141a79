"""Operators' actions, each with its row in the audit; called by the command line, the dashboard and your own code.

Methods that take `begin` run their own transactions, a page of 200 rows each. The others do their work in the
caller's transaction, and the audit's row is committed or rolled back with it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from uuid import UUID

from sqlalchemy import Connection

from outboxq.admin import (
    audit,
    bulk,
    cancellation,
    effects,
    finished,
    installation,
    kinds,
    messages,
    queues,
    schedule_owners,
    schedules,
)
from outboxq.admin.audit import Actor as Actor
from outboxq.admin.bulk import Preview as Preview
from outboxq.admin.bulk import Total as Total
from outboxq.admin.bulk import preview as preview
from outboxq.admin.bulk_actions import BulkAction as BulkAction
from outboxq.admin.bulk_actions import CancelJobs as CancelJobs
from outboxq.admin.bulk_actions import CancelRunning as CancelRunning
from outboxq.admin.bulk_actions import ChangeJobs as ChangeJobs
from outboxq.admin.bulk_actions import DiscardDead as DiscardDead
from outboxq.admin.bulk_actions import RetryDead as RetryDead
from outboxq.admin.marks import Begin as Begin
from outboxq.admin.marks import unmarked as unmarked
from outboxq.config import DEFAULT_RETENTION
from outboxq.outbox.handle import JobHandle
from outboxq.queue_limits import QueueLimits


class Actions:
    """The actions of one actor, for one reason.

    Without the table `audit`, or the right to write it, they are done all the same, and `warn` is called once.

    Args:
        reason: Why, in the actor's words: up to 2,000 bytes, kept in the audit.
        warn: Called with a sentence that says what could not be written or taken back.

    Raises:
        ArgumentError: a reason that cannot be stored.
    """

    def __init__(
        self, actor: Actor, reason: str | None = None, *, warn: Callable[[str], None] = audit.logger.warning
    ) -> None:
        self._warn = warn
        self._journal = audit.Journal(actor, reason, warn)

    def run(
        self,
        begin: Begin,
        action: BulkAction | Preview,
        *,
        check: bulk.CheckArgs | None = None,
        entry: UUID | None = None,
        expected: int | None = None,
        most: int | None = None,
        on_page: Callable[[Total], None] = lambda _: None,
    ) -> Total:
        """Retry or discard dead letters, cancel or change jobs: those of a filter, or of ids.

        Rows that others hold are passed over. An error leaves what was committed; the audit's row says how far it
        came, and `resume` goes on.

        Args:
            begin: Begins a transaction at READ COMMITTED, committed at the end of its block.
            action: A filter goes by way of `preview`, which keeps the action from rows that come later.
            check: Called with each kind that is meant, and the arguments that it is given, such as `check_args` of a
                resolved registry.
            entry: The id that its row in the audit is to have; an action whose id is there already is refused by the
                table's primary key, before it has changed anything.
            expected: How many rows an earlier preview has counted; a `Preview` says so itself.
            most: It ends before a page by which it may change more rows than these.
            on_page: Called after each page.

        Raises:
            RunElsewhere: another process has taken it over.
            AuditNotFound: its row was deleted from the audit in the meantime.
            PayloadError, UnknownKind: `check` has refused the arguments; nothing was done.
        """
        wanted = action.action if isinstance(action, Preview) else action
        if isinstance(action, Preview) and not action.is_capped:
            expected = action.count
        if check is not None:
            with begin() as connection:
                bulk.check_args(connection, wanted, check)
        run = bulk.BulkRun(begin, wanted, self._journal, expected=expected, warn=self._warn, entry=entry, most=most)
        return run.run(on_page)

    def resume(
        self,
        begin: Begin,
        entry: UUID,
        *,
        args: str | None = None,
        check: bulk.CheckArgs | None = None,
        most: int | None = None,
        on_page: Callable[[Total], None] = lambda _: None,
    ) -> Total:
        """Go on with what was stopped or cut off, after the last page that the audit has.

        A process that still works on it ends at its next page.

        Args:
            args: The arguments that it gives jobs, if it gives some: the audit does not keep them.
            check: As `run` takes it.
            most: As `run` takes it; what was changed before counts too.

        Raises:
            AuditNotFound: no action has this id.
            RunNotResumable: it has ended, was not a change of many rows, or may change more than `most`.
            RunElsewhere: a page of it is under way, or another process has taken it over.
            ArgumentError: it gives arguments, and `args` does not, or the other way round.
        """
        run = bulk.resume(begin, self._journal, entry, args=args, check=check, warn=self._warn, most=most)
        return run.run(on_page)

    def stop(self, connection: Connection, entry: UUID) -> bulk.Stopped:
        """Stop what `run` does before its next page, when the transaction commits.

        Raises:
            AuditNotFound: no action has this id.
        """
        return bulk.stop(connection, self._journal, entry)

    def terminate(self, begin: Begin, job_id: UUID, outcome: cancellation.CancelOutcome = "discard") -> bool:
        """End the backend whose transaction runs a job, as `cancellation.terminate` does.

        No rollback takes that back, so the audit's row is committed before: without a `finished_at` it says that the
        backend may have been ended.
        """
        with begin() as connection:
            entry = self._journal.announce(connection, "job.terminate", str(job_id), {"outcome": outcome})
        with begin() as connection:
            ended = cancellation.terminate(connection, job_id, outcome)
            if entry is not None:
                self._journal.finish(connection, entry, changed=int(ended))
        return ended

    def keeps_audit(self, connection: Connection) -> bool:
        """Return True if actions are written into the audit; `warn` is called if they are not."""
        return self._journal.may_write(connection)

    def pause_queues(self, connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
        """Pause queues, as `queues.pause` does."""
        changed = queues.pause(connection, names)
        self._record(connection, "queue.pause", names, len(changed))
        return changed

    def resume_queues(self, connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
        """Resume queues, as `queues.resume` does."""
        changed = queues.resume(connection, names)
        self._record(connection, "queue.resume", names, len(changed))
        return changed

    def set_limits(
        self, connection: Connection, names: Sequence[str], limits: QueueLimits, drop: Collection[queues.Limit] = ()
    ) -> tuple[str, ...]:
        """Set limits of queues, as `queues.set_limits` does."""
        changed = queues.set_limits(connection, names, limits, drop)
        change = {name: getattr(limits, name) for name in limits.__slots__}
        self._record(connection, "queue.set", names, len(changed), {**change, "no": sorted(drop) or None})
        return changed

    def keep_dead(self, connection: Connection, names: Sequence[str], seconds: float | None) -> tuple[str, ...]:
        """Set how long queues keep dead letters, as `queues.keep_dead` does."""
        changed = queues.keep_dead(connection, names, seconds)
        self._record(connection, "queue.keep_dead", names, len(changed), {"seconds": seconds})
        return changed

    def pause_kinds(self, connection: Connection, queue: str, names: Sequence[str]) -> tuple[str, ...]:
        """Pause kinds of a queue, as `kinds.pause` does."""
        changed = kinds.pause(connection, queue, names)
        self._record(connection, "kind.pause", names, len(changed), {"queue": queue})
        return changed

    def resume_kinds(self, connection: Connection, queue: str, names: Sequence[str]) -> tuple[str, ...]:
        """Resume kinds of a queue, as `kinds.resume` does; call `kinds.bring_back` after that."""
        changed = kinds.resume(connection, queue, names)
        self._record(connection, "kind.resume", names, len(changed), {"queue": queue})
        return changed

    def put_schedule(self, connection: Connection, new: schedules.NewSchedule) -> schedules.Schedule:
        """Make or change a schedule, as `schedules.put` does."""
        made, changed = schedules.put_and_count(connection, new)
        change = {"kind": made.kind, "queue": made.queue, "cron": made.cron, "time_zone": made.time_zone}
        self._record(connection, "schedule.put", [made.name], changed, {**change, "args": "not kept"})
        return made

    def pause_schedules(self, connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
        """Pause schedules, as `schedules.pause` does."""
        changed = schedules.pause(connection, names)
        self._record(connection, "schedule.pause", names, len(changed))
        return changed

    def resume_schedules(self, connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
        """Resume schedules, as `schedules.resume` does."""
        changed = schedules.resume(connection, names)
        self._record(connection, "schedule.resume", names, len(changed))
        return changed

    def remove_schedules(self, connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
        """Delete schedules, as `schedules.remove` does."""
        changed = schedules.remove(connection, names)
        self._record(connection, "schedule.remove", names, len(changed))
        return changed

    def adopt_schedules(
        self, connection: Connection, names: Sequence[str], owner: str | None = None
    ) -> tuple[str, ...]:
        """Give schedules to an application's code, or to operators, as `schedule_owners.adopt` does."""
        changed = schedule_owners.adopt(connection, names, owner)
        self._record(connection, "schedule.adopt", names, len(changed), {"owner": owner})
        return changed

    def run_schedule(self, connection: Connection, name: str) -> JobHandle:
        """Add a schedule's job now, as `schedules.run_now` does."""
        added = schedules.run_now(connection, name)
        made = {"job": added.id} if added.added else {"existing": added.existing_id}
        self._record(connection, "schedule.run_now", [name], int(added.added), made)
        return added

    def run_again(self, connection: Connection, job_id: UUID) -> UUID:
        """Add a new job like a finished one, as `finished.run_again` does."""
        added = finished.run_again(connection, job_id)
        self._record(connection, "done.run_again", [str(job_id)], 1, {"job": added})
        return added

    def resolve_effect(
        self,
        connection: Connection,
        scope: str,
        key: str,
        verdict: effects.Verdict,
        *,
        keep: timedelta = DEFAULT_RETENTION,
    ) -> effects.EffectRecord:
        """Settle an effect, as `effects.resolve_effect` does. The audit keeps the verdict without the result."""
        found = effects.resolve_effect(connection, scope, key, verdict, keep=keep)
        self._record(connection, "effect.resolve", [f"{scope}/{key}"], 1, _verdict(verdict))
        return found

    def resolve_effects(
        self,
        connection: Connection,
        named: Sequence[effects.EffectRecord],
        verdict: effects.Verdict,
        *,
        keep: timedelta = DEFAULT_RETENTION,
    ) -> effects.Resolved:
        """Settle several effects by one verdict, as `effects.resolve_effects` does: one row in the audit."""
        done = effects.resolve_effects(connection, named, verdict, keep=keep)
        targets = [f"{each.scope}/{each.key}" for each in done.resolved]
        if targets:
            self._record(connection, "effect.resolve", targets, len(targets), _verdict(verdict), held=len(done.left))
        return done

    def forget_messages(self, connection: Connection, consumer: str, message_ids: Sequence[str]) -> messages.Forgotten:
        """Forget messages of a consumer, as `messages.forget_messages` does."""
        done = messages.forget_messages(connection, consumer, message_ids)
        changed, held = len(done.forgotten), len(done.held)
        self._record(connection, "message.forget", message_ids, changed, {"consumer": consumer}, held=held)
        return done

    def prune_audit(self, begin: Begin, age: timedelta) -> int:
        """Delete the rows of the audit that are older, as `audit.prune` does."""
        return audit.prune(begin, self._journal, age)

    def renew_installation(self, connection: Connection) -> installation.NewInstallation:
        """Give a copied database an id of its own, as `installation.renew_installation` does."""
        made = installation.renew_installation(connection)
        self._record(connection, "installation.renew", [str(made.id)], made.forgotten + made.doubted)
        return made

    def _record(
        self,
        connection: Connection,
        action: audit.Action,
        targets: Sequence[str],
        changed: int,
        change: Mapping[str, object] | None = None,
        *,
        held: int = 0,
    ) -> None:
        """Name one thing as the target, and several in the filter."""
        named = list(dict.fromkeys(targets))
        target, several = (named[0], None) if len(named) == 1 else (None, {"names": named})
        self._journal.record(connection, action, target, changed=changed, held=held, filter=several, change=change)


def _verdict(verdict: effects.Verdict) -> dict[str, object]:
    """The part of a verdict that the audit keeps."""
    return {"verdict": "applied" if isinstance(verdict, effects.WasApplied) else "not applied"}
