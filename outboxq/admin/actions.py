"""Operators' actions, each recorded in the audit, a table of who did what, when and why.

The command line, the dashboard and your own code call them.

Methods that take `begin` run their own transactions. The other methods work in the caller's transaction, and write the
audit's row in it, so that the action and its row are committed or rolled back together.
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
    """Does an operator's actions, such as retrying jobs, and records each in the audit, the table of who did what.

    If the table `audit` is missing or the database role may not write it, actions are done without a record, and `warn`
    is called once.

    Args:
        actor: The operator, who is recorded with each action.
        reason: Why, in the actor's words: up to 2,000 bytes, kept in the audit.
        warn: Called with a sentence if the audit cannot be written, or if a change was rolled back and has left marks
            in jobs' rows: a marked job runs alone the next time.

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
        """Do an action on many rows: retry or discard dead letters, cancel or change jobs, chosen by a filter or ids.

        The rows are changed in pages of 200 or fewer, each in its own transaction. Rows that another transaction has
        locked stay unchanged, and are in `Total.held`. After an error the changes of the committed pages stay; the
        audit's row records the progress, and `resume` continues from there.

        Args:
            begin: Begins a transaction at READ COMMITTED, committed at the end of its block.
            action: The action. For an action with a filter pass the result of `preview` instead: it excludes rows that
                are added later.
            check: Checks new arguments: called with each kind of the chosen jobs and the arguments, such as
                `check_args` of a resolved registry.
            entry: The id for the action's row in the audit. If a row has this id already, the table's primary key
                refuses the action before it has changed anything.
            expected: The number of rows that an earlier preview counted, for the audit; not needed if `action` is a
                `Preview`.
            most: The most rows that the action may change; None for no bound.
            on_page: Called after each page with the totals so far.

        Raises:
            RunElsewhere: another process has taken the action over, by `resume`.
            RunNotResumable: the next page might change more rows than `most`.
            AuditNotFound: the action's row was deleted from the audit in the meantime.
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
        """Continue an action of `run` after its last committed page, if it was stopped or cut off.

        If another process still works on the action, its `run` ends at the next page, with `RunElsewhere`.

        Args:
            entry: The id of the action's row in the audit.
            args: The new arguments, if the action changes arguments: the audit does not keep them.
            check: Checks `args`: called with each kind of the chosen jobs and `args`.
            most: The most rows that the action may change, including rows that it has changed before; None for no
                bound.
            on_page: Called after each page with the totals so far.

        Raises:
            AuditNotFound: no action has this id.
            RunNotResumable: the action has ended, was not a change of many rows, or may change more than `most`.
            RunElsewhere: another process is changing a page of the action, or has taken it over.
            ArgumentError: the action changes arguments and `args` is missing, or it changes none and `args` is given.
        """
        run = bulk.resume(begin, self._journal, entry, args=args, check=check, warn=self._warn, most=most)
        return run.run(on_page)

    def stop(self, connection: Connection, entry: UUID) -> bulk.Stopped:
        """Stop an action of `run` before its next page; the stop takes effect when the caller's transaction commits.

        Returns:
            `stopped` if this call stops the action; `stopped already` if an earlier call has; `over` if the action has
            ended.

        Raises:
            AuditNotFound: no action has this id.
        """
        return bulk.stop(connection, self._journal, entry)

    def terminate(self, begin: Begin, job_id: UUID, outcome: cancellation.CancelOutcome = "discard") -> bool:
        """End a running job by force: end the backend of its transaction, or its lease; return True if either was done.

        No rollback can undo this, so the audit's row is committed first. If that row has no `finished_at`, the backend
        may or may not have been ended.

        `outcome`: "discard" to delete the job, "dead" to make it a dead letter.
        """
        with begin() as connection:
            entry = self._journal.announce(connection, "job.terminate", str(job_id), {"outcome": outcome})
        with begin() as connection:
            ended = cancellation.terminate(connection, job_id, outcome)
            if entry is not None:
                self._journal.finish(connection, entry, changed=int(ended))
        return ended

    def keeps_audit(self, connection: Connection) -> bool:
        """Return True if actions are written into the audit; if they are not, the first call calls `warn`."""
        return self._journal.may_write(connection)

    def pause_queues(self, connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
        """Keep relays from claiming jobs of these queues; return the queues that were not paused already."""
        changed = queues.pause(connection, names)
        self._record(connection, "queue.pause", names, len(changed))
        return changed

    def resume_queues(self, connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
        """Allow relays to claim jobs of these queues again; return the queues that this call has resumed."""
        changed = queues.resume(connection, names)
        self._record(connection, "queue.resume", names, len(changed))
        return changed

    def set_limits(
        self, connection: Connection, names: Sequence[str], limits: QueueLimits, drop: Collection[queues.Limit] = ()
    ) -> tuple[str, ...]:
        """Set limits of queues, and remove the limits named in `drop`; return the queues whose limits have changed.

        A limit that is None in `limits` stays as it is. In place of a removed limit, the one that the application
        declares applies, if any.
        """
        changed = queues.set_limits(connection, names, limits, drop)
        change = {name: getattr(limits, name) for name in limits.__slots__}
        self._record(connection, "queue.set", names, len(changed), {**change, "no": sorted(drop) or None})
        return changed

    def keep_dead(self, connection: Connection, names: Sequence[str], seconds: float | None) -> tuple[str, ...]:
        """Set for how long relays keep dead letters of these queues; return the queues whose setting has changed.

        `seconds`: from one minute to ten years; 0 to keep dead letters for ever, None to keep them as the application
        declares.
        """
        changed = queues.keep_dead(connection, names, seconds)
        self._record(connection, "queue.keep_dead", names, len(changed), {"seconds": seconds})
        return changed

    def pause_kinds(self, connection: Connection, queue: str, names: Sequence[str]) -> tuple[str, ...]:
        """Keep relays from running jobs of these kinds of a queue; return the kinds that were not paused already."""
        changed = kinds.pause(connection, queue, names)
        self._record(connection, "kind.pause", names, len(changed), {"queue": queue})
        return changed

    def resume_kinds(self, connection: Connection, queue: str, names: Sequence[str]) -> tuple[str, ...]:
        """Allow relays to run jobs of these kinds again.

        During the pause, relays have put off jobs of these kinds by up to five minutes. To have these jobs run at once,
        call `kinds.bring_back` after the commit.

        Returns:
            The kinds that this call has resumed.
        """
        changed = kinds.resume(connection, queue, names)
        self._record(connection, "kind.resume", names, len(changed), {"queue": queue})
        return changed

    def put_schedule(self, connection: Connection, new: schedules.NewSchedule) -> schedules.Schedule:
        """Make a schedule, or change the schedule of the same name; return the stored schedule."""
        made, changed = schedules.put_and_count(connection, new)
        change = {"kind": made.kind, "queue": made.queue, "cron": made.cron, "time_zone": made.time_zone}
        self._record(connection, "schedule.put", [made.name], changed, {**change, "args": "not kept"})
        return made

    def pause_schedules(self, connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
        """Keep relays from adding jobs of these schedules; return those that no operator had paused already."""
        changed = schedules.pause(connection, names)
        self._record(connection, "schedule.pause", names, len(changed))
        return changed

    def resume_schedules(self, connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
        """Make relays add jobs of these schedules again; return the schedules that this call has resumed."""
        changed = schedules.resume(connection, names)
        self._record(connection, "schedule.resume", names, len(changed))
        return changed

    def remove_schedules(self, connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
        """Delete schedules, but not the jobs that they added; return the names of the deleted schedules."""
        changed = schedules.remove(connection, names)
        self._record(connection, "schedule.remove", names, len(changed))
        return changed

    def adopt_schedules(
        self, connection: Connection, names: Sequence[str], owner: str | None = None
    ) -> tuple[str, ...]:
        """Make a registry the owner of these schedules, for example after the registry was renamed.

        `owner`: the registry's name; None to make operators the owners.

        Returns:
            The names of the schedules whose owner has changed.
        """
        changed = schedule_owners.adopt(connection, names, owner)
        self._record(connection, "schedule.adopt", names, len(changed), {"owner": owner})
        return changed

    def run_schedule(self, connection: Connection, name: str) -> JobHandle:
        """Add a job of this schedule now, even if the schedule is paused; its next due time stays as it is."""
        added = schedules.run_now(connection, name)
        made = {"job": added.id} if added.added else {"existing": added.existing_id}
        self._record(connection, "schedule.run_now", [name], int(added.added), made)
        return added

    def run_again(self, connection: Connection, job_id: UUID) -> UUID:
        """Add a new job with the kind, queue, arguments and headers of a finished one; return the new job's id."""
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
        """Record an operator's verdict on a call with an unknown outcome: the other side applied it, or did not.

        Returns the effect as it is now. The audit keeps the verdict without the result.

        `keep`: the time for which the effect is remembered. Errors are those of `effects.resolve_effect`.
        """
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
        """Record one verdict on several effects with an unknown outcome, with one row in the audit for all of them.

        `named`: the effects, as `effects.find_unresolved` returns them. Effects that are settled, or being called, by
        now stay as they are.
        """
        done = effects.resolve_effects(connection, named, verdict, keep=keep)
        targets = [f"{each.scope}/{each.key}" for each in done.resolved]
        if targets:
            self._record(connection, "effect.resolve", targets, len(targets), _verdict(verdict), held=len(done.left))
        return done

    def forget_messages(self, connection: Connection, consumer: str, message_ids: Sequence[str]) -> messages.Forgotten:
        """Delete records of messages that a consumer has accepted, so that redelivered messages are accepted again."""
        done = messages.forget_messages(connection, consumer, message_ids)
        changed, held = len(done.forgotten), len(done.held)
        self._record(connection, "message.forget", message_ids, changed, {"consumer": consumer}, held=held)
        return done

    def prune_audit(self, begin: Begin, age: timedelta) -> int:
        """Delete rows of the audit that are older than `age`; return the number of deleted rows.

        A transaction deletes up to 1,000 rows. Rows of changes of many rows that have not ended stay, because those
        changes can be resumed.
        """
        return audit.prune(begin, self._journal, age)

    def renew_installation(self, connection: Connection) -> installation.NewInstallation:
        """Give a copied database a new installation id, so that it does not send the original's idempotency keys."""
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
        """Write a finished action into the audit, in the caller's transaction, which also does the action.

        Args:
            targets: The ids or names of the changed things: one goes into the column `target`, several go into
                `filter`.
            changed: The number of changed things.
            change: The new values.
            held: The number of things that another transaction had locked.
        """
        named = list(dict.fromkeys(targets))
        target, several = (named[0], None) if len(named) == 1 else (None, {"names": named})
        self._journal.record(connection, action, target, changed=changed, held=held, filter=several, change=change)


def _verdict(verdict: effects.Verdict) -> dict[str, object]:
    """Return the part of a verdict that the audit keeps: applied or not, without the result, which is users' data."""
    return {"verdict": "applied" if isinstance(verdict, effects.WasApplied) else "not applied"}
