"""Take the mechanisms out, one at a time, and see the suite go red.

    python -m tests.faults.mutation_check [NAME ...]

Each mutant is a copy of this checkout with one text replaced. The tests named beside it must be green without the
change and red with it; the script ends with 1 if a mutant survives. Two runs at a time, which mostly wait.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("outboxq", "tests", "alembic", "examples", "conftest.py", "pyproject.toml", "README.md", "docs")
_AT_ONCE = 2


@dataclass(frozen=True)
class Mutant:
    """One mechanism taken out."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_COALESCE = "tests/flow/test_coalesce.py"
_THROTTLE = "tests/flow/test_throttle.py"

_TAKEN_OVER = "tests/admin/test_bulk_taken_over.py"
_BULK, _KEPT = "tests/admin/test_bulk.py", "tests/relay/test_dead_letters_kept.py"

_BUDGET = "tests/execution/test_claim_budget.py"
_SUSPECTS = "tests/relay/test_suspect_claims.py"

_PROGRESS = "tests/relay/test_progress.py::"
_WAITS = "tests/outbox/test_results_races.py::test_a_job_that_ends_"

_SAME = "tests/codec/test_sameness.py::test_"

_ENTITIES = "tests/execution/test_job_entities.py::test_"

_CALLS = "tests/relay/test_calls.py::test_"

MUTANTS = (
    Mutant(
        "the comparison of an argument with what is read",
        "outboxq/codec/parameters.py",
        "        if change is not None:",
        "        if change == '':",
        (f"{_SAME}a_value_that_would_change_is_refused",),
    ),
    Mutant(
        "the comparison of the arguments of a call in one pass",
        "outboxq/codec/parameters.py",
        " or change_of_argument(stored, read) is None",
        " or True",
        (f"{_SAME}any_value_of_any_type_comes_back_or_is_refused",),
    ),
    Mutant(
        "the types by which a call is known to come back",
        "outboxq/codec/parameters.py",
        "(*values, *map(type, values.values()))",
        "(*values,)",
        (f"{_SAME}a_call_that_went_well_lets_no_other_one_pass",),
    ),
    Mutant(
        "the digits that jsonb makes of an exponent",
        "outboxq/codec/sameness.py",
        " if _EXPONENT.search(data) else data",
        " if not data else data",
        (f"{_SAME}what_json_has_no_type_of_is_refused_without_an_annotation",),
    ),
    Mutant(
        "the comparison of a result with what is read",
        "outboxq/handlers/returned.py",
        "        if change is not None:",
        "        if change == '':",
        ("tests/execution/test_kept.py::test_a_result_that_would_come_back_changed_fails_its_job_for_good",),
    ),
    Mutant(
        "the comparison of a call's result with what is read",
        "outboxq/effects/protocol.py",
        "    if change is not None:",
        "    if change == '':",
        ("tests/effects/test_once.py::test_a_result_that_would_come_back_changed_is_not_stored",),
    ),
    Mutant(
        "the count of a page in the page's own transaction",
        "outboxq/admin/bulk.py",
        "                connection.execute(statements.count_page(",
        "                with self._begin() as beside: beside.execute(statements.count_page(",
        (f"{_BULK}::test_the_answer_to_commit_is_lost_and_the_audit_is_right",),
    ),
    Mutant(
        "the number of a change of many rows that was resumed elsewhere",
        "outboxq/admin/bulk.py",
        "        if row.resumed != self._resumed:",
        "        if row.position != self._position:",
        (f"{_TAKEN_OVER}::test_one_that_was_resumed_elsewhere_ends_wherever_it_is",),
    ),
    Mutant(
        "the number of a resumed change in front of the note of an error",
        "outboxq/statements/audit.py",
        "audit.c.resumed == resumed, ",
        "",
        (f"{_TAKEN_OVER}::test_one_that_was_resumed_elsewhere_notes_no_error_of_its_own",),
    ),
    Mutant(
        "the wait of a resumed change for marks that are cleared",
        "outboxq/admin/marks.py",
        "(run is None or _lock(connection, run)) and ",
        "",
        (f"{_TAKEN_OVER}::test_no_job_is_passed_over_because_its_mark_is_cleared",),
    ),
    Mutant(
        "the stop of a change of many rows",
        "outboxq/admin/bulk.py",
        "        return row.stopped_at is None\n",
        "        return True\n",
        (f"{_BULK}::test_a_run_is_stopped_before_its_next_page",),
    ),
    Mutant(
        "the time of a preview, behind which nothing is touched",
        "outboxq/admin/bulk.py",
        "        action = action.until(database_clock(connection))\n",
        "        database_clock(connection)\n",
        (f"{_BULK}::test_a_preview_counts_shows_and_bounds_and_locks_nothing",),
    ),
    Mutant(
        "the commit of an action that cannot be rolled back in front of it",
        "outboxq/admin/actions.py",
        "        with begin() as connection:\n            ended =",
        "            ended =",
        ("tests/admin/test_actions.py::test_a_backend_is_ended_only_if_the_audit_says_so",),
    ),
    Mutant(
        "the refusal to rewrite what is over in the audit",
        "outboxq/migrations/step_11_history.py",
        "WHEN (OLD.finished_at IS NOT NULL) EXECUTE",
        "WHEN (OLD.id IS NULL) EXECUTE",
        ("tests/admin/test_roles.py::test_what_is_over_in_the_audit_is_rewritten_by_no_one",),
    ),
    Mutant(
        "the row of an action in the transaction of the change",
        "outboxq/admin/actions.py",
        "        self._journal.record(connection, action, target,",
        "        with connection.engine.begin() as connection: self._journal.record(connection, action, target,",
        ("tests/admin/test_actions.py::test_an_action_that_is_rolled_back_has_none",),
    ),
    Mutant(
        "the look at an operator's setting in the deletion of dead letters",
        "outboxq/statements/prune.py",
        "FROM {queue_table} AS settings WHERE settings.name = {queue})",
        "FROM {queue_table} AS settings WHERE settings.name = {queue} AND false)",
        (f"{_KEPT}::test_a_setting_that_is_taken_back_holds_for_the_next_deletion",),
    ),
    Mutant(
        "the passing over of dead letters that others hold",
        "outboxq/statements/prune.py",
        "  FOR UPDATE OF letter SKIP LOCKED\n",
        "  FOR UPDATE OF letter\n",
        (f"{_KEPT}::test_what_another_transaction_holds_is_passed_over",),
    ),
    Mutant(
        "the lock that looks again at how long a job is dead",
        "outboxq/statements/prune.py",
        "  FOR UPDATE OF letter SKIP LOCKED\n",
        "",
        (f"{_KEPT}::test_a_job_that_dies_again_meanwhile_stays",),
    ),
    Mutant(
        "the lease in the rows of finished jobs",
        "outboxq/statements/done.py",
        '+ (_OF_GONE if gone else "")',
        '+ ("" if gone else "")',
        ("tests/execution/test_kept.py::test_a_job_whose_lease_was_lost_is_not_kept",),
    ),
    Mutant(
        "the expiry of finished jobs",
        "outboxq/statements/prune.py",
        "  WHERE expires_at < pg_catalog.statement_timestamp(){unless}\n",
        "  WHERE true{unless}\n",
        ("tests/execution/test_kept.py::test_only_rows_whose_time_is_over_are_pruned",),
    ),
    Mutant(
        "the rows of finished jobs in their own transaction",
        "outboxq/execution/commit.py",
        "    riding = steps_of(batch, batch.events, runtime)\n",
        "    riding = steps_of(batch, batch.events, runtime)\n"
        "    with connection.engine.connect() as other, other.begin():\n"
        "        apart = [each for each in riding if each.is_optional and [run_script(other, *each.statements())]]\n"
        "        riding = [step for step in riding if step not in apart]\n",
        ("tests/execution/test_kept.py::test_the_row_goes_back_with_a_refused_commit",),
    ),
    Mutant(
        "the way back to before rows of finished jobs that are refused",
        "outboxq/execution/commit.py",
        "refused = next((step for step in steps if step.is_optional and step.name == answer.failed_at), None)",
        "refused = None",
        ("tests/execution/test_kept.py::test_jobs_whose_rows_are_refused_are_done_without",),
    ),
    Mutant(
        "the jobs of a lease without rows that are refused",
        "outboxq/relay/dispatcher.py",
        "        if settling.keeps and keeper.kinds and keeper.may_be_refusal(error):\n",
        "        if 0 == 1:\n",
        ("tests/execution/test_kept.py::test_jobs_whose_rows_are_refused_are_done_without",),
    ),
    Mutant(
        "the flag of a wait in front of its look",
        "outboxq/outbox/result_listener.py",
        "        flagged = self._flagged(connection, looked) if self._hears else set[str]()\n",
        "        flagged = looked\n",
        (_WAITS + "between_two_steps_of_a_wait_is_not_missed",),
    ),
    Mutant(
        "the notification of a job that is waited for",
        "outboxq/execution/keep.py",
        "        if ended:\n",
        "        if ended is None:\n",
        ("tests/outbox/test_results_races.py::test_a_job_that_ends_between_two_steps_of_a_wait_is_not_missed",),
    ),
    Mutant(
        "the look behind a refused flag",
        "outboxq/outbox/result_listener.py",
        ' for name, is_held in rows if is_held == "t"}',
        " for name, is_held in rows}",
        ("tests/outbox/test_results_races.py::test_a_wait_that_meets_a_commit_on_its_way_looks_behind_it",),
    ),
    Mutant(
        "the look of a connection that is made anew",
        "outboxq/outbox/result_listener.py",
        "        self._due = set(self._waits)\n",
        "",
        ("tests/outbox/test_results_races.py::test_a_connection_that_is_lost_is_made_anew_and_looks",),
    ),
    Mutant(
        "the end of a note with its handler",
        "outboxq/execution/batch_state.py",
        "            call.notes.clear([job.id for job in call.jobs])\n",
        "            pass\n",
        (_PROGRESS + "test_a_note_is_seen_while_the_handlers_transaction_is_open",),
    ),
    Mutant(
        "the pause between two writes of progress",
        "outboxq/relay/progress.py",
        "                self._changed.wait_for(lambda: self._stopping, _WRITE_SECONDS)\n",
        "                pass\n",
        (_PROGRESS + "test_of_many_notes_the_newest_is_written_and_few_are",),
    ),
    Mutant(
        "the attempt of a note",
        "outboxq/statements/progress.py",
        "  WHERE known.attempt <= excluded.attempt\n",
        "  WHERE true\n",
        (_PROGRESS + "test_an_older_attempt_does_not_write_over_a_newer_one",),
    ),
    Mutant(
        "the number of a flush in the relay's own row",
        "outboxq/statements/history.py",
        "WHERE id = {owner} AND flush < {flush} RETURNING 1",
        "WHERE id = {owner} RETURNING 1",
        ("tests/observability/test_flush.py",),
    ),
    Mutant(
        "what was counted behind a flush in doubt, at the end",
        "outboxq/observability/flush.py",
        "            if self._is_registered and (self._aggregate.is_empty or not counts):\n",
        "            if self._is_registered:\n",
        ("tests/observability/test_flush.py::test_what_was_counted_behind_a_doubt_is_flushed_at_the_end",),
    ),
    Mutant(
        "the number of a flush, in a ledger",
        "outboxq/statements/history.py",
        "WHERE id = {owner} AND flush < {flush} RETURNING 1",
        "WHERE id = {owner} RETURNING 1",
        ("tests/observability/test_history_ledger.py::test_without_kills_the_history_is_the_ledger",),
    ),
    Mutant(
        "the flush of a relay that ends",
        "outboxq/relay/maintenance/historian.py",
        "        self._finish()\n",
        "",
        ("tests/observability/test_history.py::test_a_relay_that_is_told_to_stop_loses_nothing",),
    ),
    Mutant(
        "the numbers that wait after a flush without an answer",
        "outboxq/observability/flush.py",
        "        if self._pending is None:\n",
        "        if True:\n",
        ("tests/observability/test_flush.py",),
    ),
    Mutant(
        "the end of the minutes that became an hour",
        "outboxq/statements/history.py",
        "  DELETE FROM {stat} WHERE grain = 60 AND at >= {hour}::timestamptz AND at < {hour}::timestamptz "
        "+ interval '1 hour'\n  RETURNING *\n",
        "  SELECT * FROM {stat} WHERE grain = 60 AND at >= {hour}::timestamptz AND at < {hour}::timestamptz "
        "+ interval '1 hour'\n",
        ("tests/observability/test_history.py::test_minutes_become_hours_and_every_number_stands_once",),
    ),
    Mutant(
        "the lock of the relay that writes the gauges of a minute",
        "outboxq/statements/history.py",
        "  AND NOT EXISTS (SELECT FROM {gauge}\n",
        "  OR NOT EXISTS (SELECT FROM {gauge}\n",
        ("tests/observability/test_history.py::test_one_relay_writes_the_gauges_of_a_minute",),
    ),
    Mutant(
        "what was taken, in the totals of a relay",
        "outboxq/observability/aggregate.py",
        "            _add_all(self._taken, taken)\n",
        "",
        ("tests/observability/test_metrics_counting.py",),
    ),
    Mutant(
        "what killed relay processes had counted",
        "outboxq/relay/metrics.py",
        "                    self._ended[child.database].merge(child.last, without_gauges=True)\n",
        "                    pass\n",
        ("tests/observability/test_metrics_relay.py::test_counters_never_fall_when_processes_are_killed",),
    ),
    Mutant(
        "the zeros of a queue that is only served",
        "outboxq/observability/metrics/tables.py",
        "    for name in sorted({*found, *look.serving}):\n",
        "    for name in sorted(found):\n",
        ("tests/observability/test_metrics_tables.py::test_a_queue_that_is_only_served_has_its_zeros",),
    ),
    Mutant(
        "the end of a client of the metrics that never ends its request",
        "outboxq/observability/metrics/server.py",
        "        ends.start()\n",
        "",
        ("tests/observability/test_metrics_relay.py::test_a_client_that_never_ends_its_request_is_cut_off",),
    ),
    Mutant(
        "the comparison of the relay's clock with the database's",
        "outboxq/clock.py",
        "        self.ahead_seconds = database_seconds - (asked_at + answered_at) / 2\n",
        "",
        ("tests/relay/test_event_times.py",),
    ),
    Mutant(
        "the share of each job in the time of a batch handler",
        "outboxq/execution/run.py",
        "    seconds = batch.running.seconds / len(segment.places)\n",
        "    seconds = batch.running.seconds\n",
        ("tests/relay/test_event_times.py",),
    ),
    Mutant(
        "the time of an attempt that failed at COMMIT",
        "outboxq/execution/commit.py",
        "settle_result(connection, batch.job, failed, runtime, batch.running.seconds)",
        "settle_result(connection, batch.job, failed, runtime, 0.0)",
        ("tests/relay/test_event_times.py",),
    ),
    Mutant(
        "the wait for the keys that a flush leaves to entities",
        "outboxq/outbox/pending.py",
        "    if has_entities:\n        vars(session)",
        "    if False:\n        vars(session)",
        ("tests/outbox/test_enqueue_flush_keys.py",),
    ),
    Mutant(
        "the end of a flush that only writes jobs of entities",
        "outboxq/outbox/pending.py",
        "            context.register_object(instance_state(batch), listonly=True)\n",
        "            pass\n",
        ("tests/outbox/test_enqueue_flush_keys.py",),
    ),
    Mutant(
        "the refusal of jobs whose entity is deleted",
        "outboxq/new_job.py",
        "        if argument.is_deleted() and not argument.optional:\n",
        "        if False:\n",
        ("tests/outbox/test_enqueue_flush_keys.py",),
    ),
    Mutant(
        "what a savepoint has undone, in what a session tells",
        "outboxq/outbox/sending_events.py",
        '        event.listen(session, "after_soft_rollback", _after_rollback)\n',
        "",
        ("tests/outbox/test_told.py",),
    ),
    Mutant(
        "the wait for COMMIT in what an inbox tells",
        "outboxq/inbox.py",
        'if outcome == "accepted" and isinstance(target, Session):',
        "if False:",
        ("tests/outbox/test_told.py",),
    ),
    Mutant(
        "the silence of handlers' sessions towards the hooks of their engine",
        "outboxq/relay/connections.py",
        '{"isolation_level": "READ COMMITTED", HOOKS_OPTION: ()}',
        '{"isolation_level": "READ COMMITTED"}',
        ("tests/outbox/test_told.py",),
    ),
    Mutant(
        "the walk over the jobs of groups in counting",
        "outboxq/statements/stats.py",
        """    ("grouped", "listed.group_key IS NOT NULL AND listed.state <> 'group_waiting'", ("queue",)),\n""",
        "",
        ("tests/admin/test_stats.py",),
    ),
    Mutant(
        "the row lock of a schedule that is fired",
        "outboxq/statements/schedules.py",
        "        .with_for_update(skip_locked=True)\n",
        "",
        ("tests/flow/test_cron.py::test_two_relays_at_the_same_moment_fire_once",),
    ),
    Mutant(
        "the next time of a schedule from its last one, and not from now",
        "outboxq/relay/maintenance/scheduler.py",
        '    behind = last if last is not None and stored.schedule.missed == "all" else now\n',
        "    behind = now\n",
        ("tests/relay/test_scheduler.py::test_a_long_backlog_comes_in_pieces",),
    ),
    Mutant(
        "the order of times in the hour that comes twice",
        "outboxq/cron.py",
        "            if due > last:\n                yield due\n                last = due\n",
        "            yield due\n            last = due\n",
        ("tests/schedules/test_cron.py::test_in_the_hour_that_comes_twice_nothing_is_due_in_the_past",),
    ),
    Mutant(
        "what a time that has come, or that was fired, keeps from being computed again",
        "outboxq/statements/schedules.py",
        "    return and_(schedule.c.next_at > next_at, next_at > _CLOCK, not_fired)\n",
        "    return schedule.c.next_at > next_at\n",
        ("tests/schedules/test_public.py",),
    ),
    Mutant(
        "the owner of a schedule that code declares",
        "outboxq/statements/schedules.py",
        "        allowed.append(or_(schedule.c.owner.is_(None), schedule.c.owner == new.excluded.owner))\n",
        "",
        ("tests/relay/test_schedule_owners.py::test_a_name_that_another_registry_declares_is_refused",),
    ),
    Mutant(
        "the mark that tells a disabled schedule from one that an operator paused",
        "outboxq/statements/schedules.py",
        'IS_DISABLED = func.coalesce(schedule.c.paused_at == _DISABLED_AT, literal_column("false"))\n',
        "IS_DISABLED = _DISABLED_AT.is_not(None)\n",
        ("tests/relay/test_schedule_owners.py::test_an_operators_pause_stays_whatever_the_code_does",),
    ),
    Mutant(
        "the changes of the clocks in walking through the times that they show",
        "outboxq/cron.py",
        "                changed = self._change(last, due)\n",
        "                changed = None\n",
        ("tests/schedules/test_clocks.py",),
    ),
    Mutant(
        "the savepoint around each schedule that is fired",
        "outboxq/relay/maintenance/scheduler.py",
        "                with connection.begin_nested():\n                    tick.fired += _fire(connection, row)\n",
        "                tick.fired += _fire(connection, row)\n",
        ("tests/relay/test_scheduler.py::test_a_schedule_that_cannot_be_fired_holds_no_other_up",),
    ),
    Mutant(
        "the claim as a limited subquery instead of a MATERIALIZED list",
        "outboxq/statements/claim.py",
        "        claim = _filled(self.texts.claim, self._arguments(limit, cursor))\n",
        "        claim = _filled(self.texts.claim, self._arguments(limit, cursor))\n"
        '        columns = claim.split("RETURNING claimed.", 1)[1].split("\\n)", 1)[0]\n'
        '        walk = claim.split("WHERE queue", 1)[1].split("\\n)", 1)[0]\n'
        "        claim = (\n"
        '            f"WITH claimed AS (DELETE FROM outboxq.job AS claimed WHERE claimed.queue = {self.queue} "\n'
        "            f\"AND claimed.state = 'ready' AND claimed.id IN (\"\n"
        '            f"SELECT id FROM outboxq.job WHERE queue{walk}) RETURNING claimed.{columns}) "\n'
        '            "SELECT 0, claimed.* FROM claimed"\n'
        "        )\n",
        ("tests/execution/test_claim.py::test_a_claim_with_stale_statistics_takes_at_most_its_limit",),
    ),
    Mutant(
        "the slots of a limit",
        "outboxq/statements/limit.py",
        "  WHERE pg_catalog.pg_try_advisory_xact_lock(",
        "  WHERE 0 = 0 OR pg_catalog.pg_try_advisory_xact_lock(",
        ("tests/flow/test_limits.py::test_no_more_jobs_run_than_the_limit_allows",),
    ),
    Mutant(
        "the lock of claims that count leased jobs",
        "outboxq/statements/claim.py",
        '        lock = tuple(("lock", statement) for statement in lock_claims(schema, queue)) if counts else ()\n',
        "        lock = ()\n",
        ("tests/flow/test_limits.py::test_a_claim_under_a_lease_waits_for_the_count_of_the_one_before",),
    ),
    Mutant(
        "the number of jobs that a claim which counts leased jobs has room for",
        "outboxq/statements/claim.py",
        "LIMIT coalesce((SELECT free FROM room), 0)",
        "LIMIT (SELECT 1000 FROM room)",
        ("tests/flow/test_limits.py::test_a_claim_under_a_lease_takes_as_many_jobs_as_there_is_room_for",),
    ),
    Mutant(
        "the budget of the arguments of a claim of many jobs",
        "outboxq/statements/claim.py",
        " AS sized LIMIT {budget}",
        " AS sized",
        (_BUDGET,),
    ),
    Mutant(
        "the place after a claim that ended at its budget",
        "outboxq/statements/claim.py",
        ">= {budget} THEN 0 END",
        "< 0 THEN 0 END",
        (_BUDGET,),
    ),
    Mutant(
        "the crash that is not counted for a suspect in company",
        "outboxq/statements/claim.py",
        "    is_crash = sort in (_SUSPECT, _ALONE)\n",
        "    is_crash = sort in (_SUSPECT, _ALONE, _IN_COMPANY)\n",
        (_SUSPECTS,),
    ),
    Mutant(
        "the second death of a relay, after which a suspect runs alone",
        "outboxq/statements/claim.py",
        "')) < 2\"",
        "')) < 99\"",
        (f"{_SUSPECTS}::test_a_job_that_kills_each_relay_runs_in_company_once",),
    ),
    Mutant(
        "beside groups: the sort of a suspect that comes first while a claim looks",
        "outboxq/statements/group_claim.py",
        "'group_suspect'{of_sort}\"",
        "'group_suspect'\"",
        (f"{_SUSPECTS}::test_a_suspect_that_comes_first_in_a_locked_group_is_taken_by_the_claim_of_its_sort",),
    ),
    Mutant(
        "beside groups: the number of jobs that there is room for",
        "outboxq/statements/group_claim.py",
        '"least({limit}, (SELECT free FROM room))"',
        '"{limit}"',
        ("tests/flow/test_limits.py::test_a_claim_under_a_lease_takes_as_many_jobs_as_there_is_room_for",),
    ),
    Mutant(
        "the way that a claim gives to another one which holds it up",
        "outboxq/relay/rolled_back.py",
        "    if request.script.lock and sqlstate_of(error) == LOCK_NOT_AVAILABLE:\n",
        "    if 0 == 1:\n",
        ("tests/flow/test_limits.py::test_a_claim_under_a_lease_that_another_one_holds_up_gives_way",),
    ),
    Mutant(
        "the slot of a suspect that runs",
        "outboxq/relay/admission.py",
        "    if run_script(connection, *timeouts, take_slot(schema, request.queue, most))[0][0]:\n",
        "    if 0 == 0:\n",
        ("tests/flow/test_limits.py::test_a_suspect_waits_for_a_slot_and_nothing_is_counted",),
    ),
    Mutant(
        "the room that jobs make when they end",
        "outboxq/relay/planner.py",
        "            self._admission.ended(request.queue, ended.claimed)\n",
        "            pass\n",
        ("tests/relay/test_following.py::test_jobs_that_end_make_room_for_another_slot_unless_their_own_takes_it",),
    ),
    Mutant(
        "the deadline of jobs that run together after others that ran alone",
        "outboxq/execution/run.py",
        "        _set_timeout(connection, batch, longest, shared=True)\n",
        "        pass\n",
        (
            "tests/execution/test_batch_handlers.py::test_the_deadline_of_jobs_that_ran_alone_is_none_of_those_that_run_together",
        ),
    ),
    Mutant(
        "the check that a batch is still its slot's, before the next of its jobs begins",
        "outboxq/execution/run.py",
        "    batch.begin(connection)\n    batch.late_result = None\n",
        "    if batch.transaction is None:\n        batch.begin(connection)\n    batch.late_result = None\n",
        ("tests/relay/test_seized.py",),
    ),
    Mutant(
        "the turns of the sorts of jobs",
        "outboxq/relay/planner.py",
        "        self._taken = sort\n",
        "        self._taken = None\n",
        ("tests/relay/test_planner.py::test_due_jobs_have_their_turn_at_a_queue_that_is_held_for_its_rate",),
    ),
    Mutant(
        "tokens before the claim",
        "outboxq/relay/admission.py",
        "        if self._shared.flow.limits_of(queue).rate_jobs is None:\n",
        "        if 0 == 0:\n",
        ("tests/flow/test_rates.py::test_jobs_begin_at_the_rate_of_their_queue",),
    ),
    Mutant(
        "the look at jobs that other transactions run",
        "outboxq/statements/rate.py",
        '"job.xmax = ANY (ARRAY(SELECT transactionid FROM open))"',
        '"false"',
        ("tests/flow/test_rates.py::test_a_job_that_another_transaction_runs_costs_no_token",),
    ),
    Mutant(
        "the look whether the limit has room for tokens",
        "outboxq/relay/admission.py",
        "asked, limited)\n",
        "asked, None)\n",
        ("tests/flow/test_rates.py::test_a_full_limit_costs_no_tokens",),
    ),
    Mutant(
        "the tokens of the claim behind a reservation, however late it comes",
        "outboxq/relay/admission.py",
        "            hand.tokens, hand.used, hand.is_fresh = hand.tokens + tokens, 0, True\n",
        "            hand.tokens, hand.used, hand.is_fresh = hand.tokens + tokens, 0, False\n",
        ("tests/flow/test_rates.py::test_the_claim_behind_a_reservation_has_its_tokens_however_late_it_comes",),
    ),
    Mutant(
        "the tokens that a claim leaves to the next one when it finds nothing",
        "outboxq/relay/admission.py",
        "            self._are_left = True\n",
        "",
        ("tests/flow/test_rates.py::test_a_claim_that_finds_nothing_leaves_its_token_to_the_next",),
    ),
    Mutant(
        "the token that came back while a slot found none",
        "outboxq/relay/admission.py",
        "as `give_back` does.\n            self.release_tokens(queue)\n",
        "as `give_back` does.\n",
        ("tests/flow/test_rates.py::test_a_token_that_comes_back_ends_the_hold_of_a_slot_that_found_none",),
    ),
    Mutant(
        "the order of the look at jobs that wait for tokens, by the indexes",
        "outboxq/statements/rate.py",
        "(*BY_INDEX, ",
        "(*BY_INDEX[:1], ",
        ("tests/flow/test_rates.py::test_a_look_at_many_jobs_reads_no_more_than_it_asks_for",),
    ),
    Mutant(
        "the lease token in the completion",
        "outboxq/statements/settle.py",
        "    return delete(job).where(job.c.id == claimed.id, job.c.lease_token == claimed.lease_token)\n",
        "    return delete(job).where(job.c.id == claimed.id)\n",
        ("tests/relay/test_lease.py",),
    ),
    Mutant(
        "the checked commit: a plain COMMIT",
        "outboxq/execution/commit.py",
        'script = Script([("check", check), ("check", "SET CONSTRAINTS ALL IMMEDIATE")])',
        'script = Script([("check", "COMMIT"), ("check", f"SELECT {len(check)}")])',
        ("tests/execution/test_containment.py",),
    ),
    Mutant(
        "the columns that a producer may write",
        "outboxq/admin/roles.py",
        "AND attname = ANY ({columns}) AND NOT attisdropped\n",
        "AND attnum > 0 AND {columns} IS NOT NULL AND NOT attisdropped\n",
        ("tests/admin/test_role_matrix.py",),
    ),
    Mutant(
        "the end of the wider right that producers had",
        "outboxq/admin/roles.py",
        "      REVOKE {right} ON {table} FROM {role};\n",
        "",
        ("tests/admin/test_roles.py",),
    ),
    Mutant(
        "the right of a relay that is a producer too",
        "outboxq/admin/roles.py",
        "    IF NOT has_table_privilege({role_literal}, {table_literal}, 'DELETE') AND EXISTS (\n",
        "    IF EXISTS (\n",
        ("tests/admin/test_roles.py",),
    ),
    Mutant(
        "the withholding of messages when a job is settled",
        "outboxq/execution/settle.py",
        "    result = runtime.redacted(job, result)\n    match result:\n",
        "    match result:\n",
        ("tests/execution/test_withheld.py",),
    ),
    Mutant(
        "the look at errors that a chain does not show, for what they quote",
        "outboxq/execution/failure.py",
        "(original_of(each), _CAUSE.__get__(each), _CONTEXT.__get__(each), *_members(each)[:_LONGEST_CHAIN])",
        "(original_of(each), _CAUSE.__get__(each), *_members(each)[:_LONGEST_CHAIN])",
        ("tests/execution/test_redaction.py",),
    ),
    Mutant(
        "the drop of tracebacks when the hooks were called",
        "outboxq/emitter.py",
        '        _OF_EXCEPTIONS["__traceback__"].__set__(each, None)\n',
        "",
        ("tests/execution/test_exceptions_told.py",),
    ),
    Mutant(
        "the check of changes of unlocked rows before they are flushed",
        "outboxq/execution/invoke.py",
        "            self.look()\n        super().flush(objects)\n",
        "            pass\n        super().flush(objects)\n",
        ("tests/handlers/test_unlocked.py",),
    ),
    Mutant(
        "the living relay in what counts as leased",
        "outboxq/statements/jobs.py",
        "is_alive = func.coalesce(jobs.c.lease_owner.in_(alive), false())",
        "is_alive = jobs.c.lease_owner.is_not(None)",
        ("tests/cli/test_names.py",),
    ),
    Mutant(
        "the one notification for more queues than a transaction has locks for",
        "outboxq/outbox/insert.py",
        '    if wakes == "all" and was != "off":\n',
        "    if False:\n",
        ("tests/relay/test_wake.py",),
    ),
    Mutant(
        "the distrust of polls from before all queues were notified",
        "outboxq/relay/poller.py",
        "max(after.number, self._all_called_after)\n",
        "after.number\n",
        ("tests/relay/test_wake.py",),
    ),
    Mutant(
        "the sweep from the start of a queue",
        "outboxq/relay/queue_claims.py",
        "        if time.monotonic() >= self._sweep.due_at and self._sweep.take_turn():\n",
        "        if self._cursor is None:\n",
        ("tests/relay/test_following.py",),
    ),
    Mutant(
        "the pauses of a busy slot, in which the server takes its row statistics",
        "outboxq/relay/planner.py",
        " or now > self._counts_due_at:\n",
        ":\n",
        ("tests/relay/test_following.py",),
    ),
    Mutant(
        "the tag of a COMMIT that an error follows",
        "outboxq/database/driver.py",
        "        return Answer(rows, is_committed, failure, failed_at)\n",
        "        return Answer(rows, is_committed and failure is None, failure, failed_at)\n",
        ("tests/database/test_script.py::test_answers_before_a_failure_are_kept", "tests/relay/test_following.py"),
    ),
    Mutant(
        "what the jobs before it left, sent before anything of a handler's",
        "outboxq/execution/shared_batch.py",
        "(None,) if writes is None else writes)\n        self._catch_up()\n",
        "(None,) if writes is None else writes)\n",
        ("tests/execution/test_shared_batches.py::test_stale_rows_are_loaded_again_after_a_handlers_own_statement",),
    ),
    Mutant(
        "the commit that says whether a handler of a shared batch closed its session",
        "outboxq/execution/shared_batch.py",
        "if changes is not None and session.in_transaction():",
        "if changes is not None:",
        ("tests/execution/test_shared_batches.py::test_a_handler_that_closes_its_session_fails_as_it_does_alone",),
    ),
    Mutant(
        "the worst that is assumed of a statement which could not be read",
        "outboxq/execution/shared_batch.py",
        "            contain(error)\n",
        "            raise\n",
        (
            "tests/execution/test_shared_batches_watched.py::test_a_defect_of_what_watches_is_logged_once_and_no_handler_meets_it",
        ),
    ),
    Mutant(
        "the parts of a statement that have no truth value",
        "outboxq/handlers/row_writes.py",
        "any(isinstance(part, ClauseElement) or part for part in others)",
        "any(others)",
        ("tests/execution/test_shared_batches_watched.py::test_every_statement_is_sent_and_leaves_the_batch_shared",),
    ),
    Mutant(
        "the join of a session whose rows were loaded ahead",
        "outboxq/execution/read_rows.py",
        "    session.connection()\n",
        "",
        ("tests/execution/test_rolled_back.py::test_a_session_that_was_given_rows_has_begun_on_the_connection",),
    ),
    Mutant(
        "the check for listeners to statements",
        "outboxq/database/direct.py",
        "        and len([*heard.before_cursor_execute]) == 1\n",
        "",
        ("tests/execution/test_lone_rows.py::test_where_somebody_listens_sqlalchemy_reads_and_writes",),
    ),
    Mutant(
        "the state of the transaction before a row is read",
        "outboxq/database/guard.py",
        "        return is_open and (inner is None or inner.is_active) and (own is None or own.is_active)\n",
        "        return True\n",
        ("tests/execution/test_lone_rows.py::test_a_row_is_not_read_in_a_transaction_that_an_around_has_ended",),
    ),
    Mutant(
        "the columns that other rows refer to, which SQLAlchemy changes there too",
        "outboxq/execution/write_buffer.py",
        " and column not in referred",
        "",
        ("tests/execution/test_lone_rows.py::test_a_change_that_others_refer_to_is_left_to_sqlalchemy",),
    ),
    Mutant(
        "the rollback of a session whose changes failed",
        "outboxq/execution/write_buffer.py",
        "            session.rollback()\n",
        "            pass\n",
        ("tests/execution/test_lone_rows.py::test_a_failed_update_ends_as_a_failed_flush",),
    ),
    Mutant(
        "the new jobs that come before a lone job's changes",
        "outboxq/execution/write_buffer.py",
        "    if changes and write_plain_jobs(session, connection):",
        "    if False:",
        ("tests/execution/test_lone_rows.py::test_new_jobs_are_written_before_changes",),
    ),
    Mutant(
        "the second look at changes, behind new jobs",
        "outboxq/execution/write_buffer.py",
        "        # That may have run users' code.\n        changes = _few_changes(session, connection)\n",
        "        pass\n",
        ("tests/execution/test_lone_rows.py::test_a_change_that_is_made_while_new_jobs_are_written_is_written_too",),
    ),
    Mutant(
        "the other names of parameters that the driver cannot read",
        "outboxq/database/direct.py",
        "for name, value in values.items()} if named else values",
        "for name, value in values.items()} if False else values",
        ("tests/handlers/test_set_based.py::test_parameters_may_have_names_that_the_driver_cannot_read",),
    ),
    Mutant(
        "the count of the rows that a lone job changed",
        "outboxq/execution/write_buffer.py",
        "    if found != len(ordered):\n",
        "    if False:\n",
        ("tests/execution/test_lone_rows.py::test_errors_are_sqlalchemys",),
    ),
    Mutant(
        "the order in which a lone job locks its rows",
        "outboxq/execution/write_buffer.py",
        'found, ordered = 0, sorted(changes, key=attrgetter("row"))\n',
        'found, ordered = 0, sorted(changes, key=attrgetter("row"), reverse=True)\n',
        ("tests/execution/test_lone_rows.py::test_rows_are_locked_in_the_order_of_their_keys",),
    ),
    Mutant(
        "the changes of several forms, which SQLAlchemy sends",
        "outboxq/execution/write_buffer.py",
        "    return len({id(change.statement) for change in changes}) <= 1 and len(changes)",
        "    return len(changes)",
        ("tests/execution/test_lone_rows.py::test_changes_of_several_forms_are_sent_in_sqlalchemys_order",),
    ),
    Mutant(
        "the opening of a session by a look at it",
        "outboxq/execution/job_entities.py",
        '        _vars(self)["outboxq_reach"]()\n        return object.__getattribute__(self, name)\n',
        "        return object.__getattribute__(self, name)\n",
        (f"{_ENTITIES}a_session_that_is_reached_is_open",),
    ),
    Mutant(
        "the opening of a session by the search for its async one",
        "outboxq/execution/job_entities.py",
        '        _vars(self)["outboxq_reach"]()\n        return object.__hash__(self)\n',
        "        return object.__hash__(self)\n",
        (f"{_ENTITIES}a_session_that_is_reached_is_open",),
    ),
    Mutant(
        "the entities of a session that opens",
        "outboxq/execution/invoke.py",
        "                    entities.move_to(made)\n",
        "                    pass\n",
        (f"{_ENTITIES}a_session_that_is_reached_is_open",),
    ),
    Mutant(
        "the detaching of entities whose session was never opened",
        "outboxq/execution/job_entities.py",
        "                state.session_id = state._strong_obj = None",
        "                state._strong_obj = None",
        (f"{_ENTITIES}entities_are_detached_behind_their_job",),
    ),
    Mutant(
        "the circle of references that a session has which was opened late",
        "outboxq/execution/job_entities.py",
        '            _vars(self._unopened).pop("outboxq_reach", None)\n',
        "            pass\n",
        (f"{_ENTITIES}a_session_that_was_opened_late_goes_with_its_job",),
    ),
    Mutant(
        "the refusal to open a session whose job is over",
        "outboxq/execution/invoke.py",
        "            if self.is_over:\n                raise",
        "            if False:\n                raise",
        (f"{_ENTITIES}a_session_that_was_not_looked_at_in_time_cannot_be_opened",),
    ),
    Mutant(
        "the wait for an opening that has begun",
        "outboxq/execution/invoke.py",
        "        self.lock = threading.RLock()\n",
        '        self.lock = __import__("contextlib").nullcontext()\n',
        (f"{_ENTITIES}a_thread_that_is_left_and_looks_takes_no_change_along",),
    ),
    Mutant(
        "the error of a session that could not be opened",
        "outboxq/execution/invoke.py",
        "                self.failed = None if entities is None else error\n",
        "                self.failed = None\n",
        (f"{_ENTITIES}a_job_whose_session_could_not_be_opened_is_not_done",),
    ),
    Mutant(
        "the end of a handler, behind which no task of it opens its session",
        "outboxq/execution/invoke.py",
        "if self.made is None and self._runtime.invoker.has_ended:",
        "if False:",
        (f"{_ENTITIES}a_task_that_is_left_does_not_open_the_session",),
    ),
    Mutant(
        "the listeners that a handler has put on all sessions while its own is not open",
        "outboxq/execution/job_entities.py",
        "        if is_class_listened_to(HandlerSession, _WHILE_OPEN):\n",
        "        if False:\n",
        (f"{_ENTITIES}listeners_on_all_sessions_are_told",),
    ),
    Mutant(
        "the listeners on all sessions that are there before a job's own is open",
        "outboxq/execution/job_entities.py",
        "    if opened.made is not None or is_class_listened_to(HandlerSession, _WHILE_OPEN):\n",
        "    if opened.made is not None:\n",
        (f"{_ENTITIES}listeners_on_all_sessions_are_told",),
    ),
    Mutant(
        "the listeners of one session, in the place of those of all",
        "outboxq/database/session_listeners.py",
        "    if found != _of_class(kind, events)[0]:\n",
        "    if False:\n",
        ("tests/execution/test_lone_rows.py::test_a_listener_on_the_session_is_told_of_its_flush",),
    ),
    Mutant(
        "the note of a rollback by a session that has sent nothing",
        "outboxq/execution/invoke.py",
        "        session.is_rolled_back = True\n",
        "        pass\n",
        (
            "tests/execution/test_rolled_back.py::test_a_session_that_was_rolled_back_fails_its_job_although_nothing_was_sent",
        ),
    ),
    Mutant(
        "the options of a job's connection, which its changes do not wait for",
        "outboxq/execution/shared_batch.py",
        " or not guard.has_own_options\n",
        "\n",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_rows_are_written_to_the_schema_that_the_job_chose",
        ),
    ),
    Mutant(
        "the relay's own options while it sends what waits",
        "outboxq/database/guard.py",
        "connection._execution_options, self._options  # noqa",
        "connection._execution_options, connection._execution_options  # noqa",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_rows_are_written_to_the_schema_that_the_job_chose",
        ),
    ),
    Mutant(
        "the other engines of a job's session",
        "outboxq/execution/shared_batch.py",
        "is_own = uses_only(session, self._connection)\n",
        "is_own = True\n",
        ("tests/execution/test_shared_batches_surroundings.py::test_rows_of_another_engine_are_committed_there",),
    ),
    Mutant(
        "the schema that a statement names itself",
        "outboxq/handlers/row_writes.py",
        'return "schema_translate_map" in statement.get_execution_options()',
        "return False",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_a_statement_that_names_its_schema_is_judged_by_that_table",
        ),
    ),
    Mutant(
        "the settings of a transaction, by which names mean other tables",
        "outboxq/database/guard.py",
        "        self.is_altered = True\n        try:\n",
        "        try:\n",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_what_is_known_of_tables_is_not_of_another_search_path",
        ),
    ),
    Mutant(
        "the values that the process computes for a deferred write",
        "outboxq/handlers/deferred.py",
        '    return only_writes(statement) or _not_fixed("it does more than write plain values into one table")\n',
        "    return True\n",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_what_the_process_computes_for_a_deferred_write_is_computed_in_its_own_job",
        ),
    ),
    Mutant(
        "the check behind a function that may have written anything",
        "outboxq/execution/write_buffer.py",
        "    if _calls_others(compiled.string):\n",
        "    if not compiled:\n",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_a_function_that_breaks_a_deferred_constraint_costs_its_own_job",
        ),
    ),
    Mutant(
        "the key that a flush would look for",
        "outboxq/execution/write_buffer.py",
        "if values is None or not _has_its_key(state, writable):",
        "if values is None:",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_a_key_that_was_set_behind_sqlalchemys_back_is_where_a_flush_writes",
        ),
    ),
    Mutant(
        "the listeners of a job's own connection",
        "outboxq/database/guard.py",
        "if self._connection._has_events is not _HEARD_BY_US and self.left is None:",
        "if False:",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_a_listener_on_the_connection_hears_nothing_of_the_next_job",
        ),
    ),
    Mutant(
        "the excuse of a job whose row could not be had",
        "outboxq/relay/rolled_back.py",
        "            state.lease.excuse(batch.job)\n",
        "            pass\n",
        ("tests/execution/test_row_held.py::test_a_job_whose_row_is_held_time_after_time_is_never_buried",),
    ),
    Mutant(
        "the rows that others hold, when outcomes are settled",
        "outboxq/relay/dispatcher.py",
        "many.add_to(script, server, keep=settling.keeps)\n",
        "many.add_to(script, server, keep=settling.keeps, free=False)\n",
        ("tests/execution/test_row_held.py::test_the_row_of_a_job_that_wrote_nothing_holds_no_slot_up",),
    ),
    Mutant(
        "the time from which a cancellation of a call is too late",
        "outboxq/execution/leased_call.py",
        "        self._may_be_cancelled = is_needed\n",
        "",
        ("tests/relay/test_dispatcher.py::test_a_cancellation_that_comes_when_no_connection_is_needed_is_too_late",),
    ),
    Mutant(
        "the connection for what follows a call that left its session alone",
        "outboxq/execution/leased_call.py",
        "or is_followed or self._call.is_cancelled or bool(self._run.deferred)\n",
        "or self._call.is_cancelled\n",
        ("tests/relay/test_dispatcher.py::test_what_follows_a_call_that_left_its_session_alone_has_a_connection",),
    ),
    Mutant(
        "the greenlet in which a call that failed may be called again",
        "outboxq/execution/leased_call.py",
        "        is_needed = has_failed or has_written",
        "        is_needed = has_written",
        (f"{_CALLS}a_conflict_is_tried_again_at_once_with_the_variables_from_before",),
    ),
    Mutant(
        "the variables from before the first try of a call",
        "outboxq/relay/calls.py",
        "        self._async_invoker.base = context.copy()\n",
        "",
        (f"{_CALLS}a_conflict_is_tried_again_at_once_with_the_variables_from_before",),
    ),
    Mutant(
        "the end of a handler, as its context sees it while what follows waits",
        "outboxq/execution/leased_call.py",
        "        self._ended[:] = [(None, None)]\n",
        "        self._ended.clear()\n",
        (f"{_CALLS}a_task_that_was_left_behind_gets_no_session_of_a_call_that_is_settled",),
    ),
    Mutant(
        "the cancellation of a call that was abandoned between its tasks",
        "outboxq/relay/calls.py",
        "which frees the slot.\n            task.cancel()\n",
        "which frees the slot.\n            pass\n",
        (f"{_CALLS}a_call_that_is_abandoned_between_its_handler_and_what_follows_waits_for_nothing",),
    ),
    Mutant(
        "the cancellation of a call that was abandoned as it started",
        "outboxq/relay/calls.py",
        "knew no task yet.\n            task.cancel()\n",
        "knew no task yet.\n            pass\n",
        (f"{_CALLS}a_call_that_is_abandoned_as_it_starts_has_no_run",),
    ),
    Mutant(
        "users' code that runs in no task, as the watch sees it",
        "outboxq/relay/watch.py",
        "        return self.is_outside or any(",
        "        return any(",
        (f"{_CALLS}users_code_that_runs_before_the_handler_s_task_is_seen_to_run",),
    ),
    Mutant(
        "the results that a refused claim has undone with itself",
        "outboxq/relay/dispatcher.py",
        "                self._settle_and_claim(connection, settling, None)\n"
        "                return self._settle_and_claim(connection, settling.without(), request)\n"
        "            if not answer.is_committed or",
        "                return self._settle_and_claim(connection, settling.without(), request)\n"
        "            if not answer.is_committed or",
        ("tests/relay/test_dispatcher.py::test_a_claim_that_fails_behind_a_settlement_undoes_nothing",),
    ),
    Mutant(
        "the transaction that results share with the next claim",
        "outboxq/relay/dispatcher.py",
        "        is_one = request is not None and not",
        "        is_one = False and not",
        ("tests/relay/test_dispatcher.py::test_results_and_the_next_claim_are_one_transaction",),
    ),
    Mutant(
        "the prepared statement that a connection has lost, when outcomes are settled",
        "outboxq/relay/dispatcher.py",
        "if prepared is not None and server.claims.failed(answer.error, prepared):",
        "if False:",
        ("tests/relay/test_dispatcher.py::test_results_and_the_next_claim_are_one_transaction",),
    ),
    Mutant(
        "the look for jobs behind those that a dispatcher settles",
        "outboxq/relay/dispatcher.py",
        "            self._is_called |= job.group_key",
        "            False and job.group_key",
        ("tests/relay/test_dispatcher_ends.py::test_the_next_job_of_a_group_and_a_job_that_comes_back_need_no_poll",),
    ),
    Mutant(
        "the look for jobs behind one whose call was cut off",
        "outboxq/relay/calls.py",
        "            self._owner.may_wait()\n",
        "            pass\n",
        ("tests/relay/test_dispatcher_ends.py::test_a_job_whose_call_was_cut_off_comes_back_without_a_poll",),
    ),
    Mutant(
        "the place of a call that swallows its cancellation",
        "outboxq/relay/calls.py",
        "        call_soon(self._loop, super().abandon)\n",
        "",
        ("tests/faults/test_deadlines.py::test_a_lease_is_no_way_around_the_deadline",),
    ),
    Mutant(
        "the round of a drain after a token that came back",
        "outboxq/relay/last_jobs.py",
        "        return any(given_back_at.get(name, 0.0) >= began_at for name in self.queues)\n",
        "        return False\n",
        ("tests/flow/test_rates.py::test_a_drain_goes_on_after_a_hold_that_came_and_went_in_its_last_round",),
    ),
    Mutant(
        "the one report of rows that several COMMITs were refused",
        "outboxq/execution/keep.py",
        "        if is_known:\n",
        "        if 0 == 1:\n",
        ("tests/execution/test_kept.py::test_rows_that_several_commits_were_refused_are_reported_once",),
    ),
    Mutant(
        "the end of a batch whose job meets a deadlock again",
        "outboxq/execution/run.py",
        "            if isinstance(result, Failed) and result.transient and result.sqlstate == DEADLOCK:\n",
        "            if 0 == 1:\n",
        ("tests/handlers/test_deferred_writes.py::test_a_deadlock_over_rows_of_earlier_jobs_costs_no_attempt",),
    ),
    Mutant(
        "the thread that a relay's own connection belongs to",
        "outboxq/database/guard.py",
        "if connection is self._connection and get_ident() != self.thread:",
        "if False:",
        (
            "tests/database/test_session_state_left.py::test_a_thread_left_behind_cannot_use_its_connection_in_a_later_job",
        ),
    ),
    Mutant(
        "the suspect rule: a claim that died leaves no mark",
        "outboxq/statements/claim.py",
        "CASE WHEN job.xmax = '0'::xid THEN false ELSE (",
        "CASE WHEN job.xmax IS NOT NULL THEN false ELSE (",
        ("tests/relay/test_suspects.py",),
    ),
    Mutant(
        'the suspect rule\'s "aborted only"',
        "outboxq/statements/claim.py",
        "= 'aborted', false)",
        "IS NOT NULL, false)",
        ("tests/relay/test_suspects.py",),
    ),
    Mutant(
        "the check which run of the server knows a transaction",
        "outboxq/execution/find_outcome.py",
        "_server_epoch(connection) != batch.claimed.request.server.epoch:",
        "batch.claimed.request.server.epoch is None:",
        (
            "tests/faults/test_torture.py",
            "tests/faults/test_unknown_commit.py",
            "tests/faults/test_database_trouble.py",
        ),
    ),
    Mutant(
        "the end of the backend at a timeout",
        "outboxq/relay/deadlines.py",
        "                end_other_transaction(connection, batch, terminate=True)\n                if cancelled",
        "                if cancelled",
        ("tests/faults/test_deadlines.py",),
    ),
    Mutant(
        "the token of the caller that records what a call came to",
        "outboxq/statements/effects.py",
        "effect.c.key == self.key, effect.c.lock_token == self.token\n",
        "effect.c.key == self.key\n",
        ("tests/effects/test_once.py", "tests/faults/test_once_lost.py"),
    ),
    Mutant(
        "the doubt about a call whose caller died",
        "outboxq/statements/effects.py",
        'or_(effect.c.in_doubt, and_(effect.c.status == "started", effect.c.lock_token != token)),\n',
        "effect.c.in_doubt,\n",
        ("tests/effects/test_once.py", "examples/payments/tests/test_torture.py"),
    ),
    Mutant(
        "the check of the lock right before the call",
        "outboxq/effects/protocol.py",
        "        if expiry.is_ahead:\n",
        "        if expiry is not None:\n",
        ("tests/faults/test_once_lost.py",),
    ),
    Mutant(
        "the record without a result that the database refuses",
        "outboxq/effects/steps.py",
        "            if instead is not None and not is_transient(error):\n",
        "            if False:\n",
        ("tests/effects/test_once_refused_data.py",),
    ),
    Mutant(
        "the patience of a cancelled caller whose result waits for the database",
        "outboxq/effects/runners.py",
        "            case Pause(seconds, settles=True):\n",
        "            case Pause(seconds, settles=None):\n",
        ("tests/faults/test_once_cancelled.py",),
    ),
    Mutant(
        "the record of a caller that is interrupted",
        "outboxq/effects/steps.py",
        "            interruption = error\n",
        "            raise\n",
        ("tests/faults/test_once_cancelled.py",),
    ),
    Mutant(
        "the cancellation of a claim that waits for a row",
        "outboxq/statements/effects.py",
        '_TRY = "1s"\n',
        '_TRY = "1h"\n',
        ("tests/faults/test_once_cancelled.py",),
    ),
    Mutant(
        "the connections that are kept for records",
        "outboxq/effects/transactions.py",
        "        with (self._records if settles else self._claims).transaction() as connection:\n",
        "        with self._claims.transaction() as connection:\n",
        ("tests/faults/test_once_crowded.py",),
    ),
    Mutant(
        "the look-up before the first call",
        "outboxq/effects/protocol.py",
        "        if in_doubt or request.looks_up_first:\n",
        "        if in_doubt:\n",
        ("tests/effects/test_once_ask_first.py",),
    ),
    Mutant(
        "the doubt about what was open when an installation got a new id",
        "outboxq/admin/installation.py",
        "    doubted = connection.execute(statements.doubt_open(_OPEN)).rowcount\n",
        "    doubted = 2\n",
        ("tests/cli/test_installation.py",),
    ),
    Mutant(
        "the dead letter of a leased job whose transaction stays prepared",
        "outboxq/execution/find_outcome.py",
        "    if not batch.is_leased:\n        return BatchReport(len(batch.jobs), ())\n    return write_dead_letters(",
        "    if batch is not None:\n        return BatchReport(len(batch.jobs), ())\n    return write_dead_letters(",
        ("tests/execution/test_prepared_by_handler.py::test_a_transaction_that_the_relay_may_not_end_frees_its_slot",),
    ),
    Mutant(
        "the check of a leased job's transaction before it is settled",
        "outboxq/execution/run.py",
        "        if batch.is_leased:\n            # What settles the job",
        "        if batch is None:\n            # What settles the job",
        ("tests/execution/test_prepared_by_handler.py::test_a_leased_job_whose_row_is_prepared_too_holds_no_slot",),
    ),
    Mutant(
        "the order in which a batch of messages is accepted",
        "outboxq/statements/inbox.py",
        '.order_by(collate(given.c.message_id, "C"))\n',
        "\n",
        ("tests/faults/test_inbox_races.py",),
    ),
    Mutant(
        "the token of jobs that are removed together",
        "outboxq/statements/lease_mode.py",
        "\n    AND ((job.id, job.lease_token) IN (SELECT held.id, held.token FROM oq_held AS held)) IS TRUE",
        "",
        ("tests/statements/test_leased_together.py",),
    ),
    Mutant(
        "the comparison of leased jobs with their list by a hash, and by no join",
        "outboxq/statements/lease_mode.py",
        'FROM oq_held AS held)) IS TRUE"""',
        'FROM oq_held AS held))"""',
        (
            "tests/statements/test_leased_together.py::test_a_thousand_jobs_are_found_in_one_walk_whatever_statistics_say",
        ),
    ),
    Mutant(
        "the rows of leased jobs that are locked, and left",
        "outboxq/statements/lease_mode.py",
        "  FOR UPDATE OF job SKIP LOCKED",
        "  FOR UPDATE OF job",
        ("tests/statements/test_leased_together.py::test_a_row_that_another_transaction_has_locked_is_left_and_named",),
    ),
    Mutant(
        "leased jobs that are only locked, apart from those that are lost",
        "outboxq/statements/lease_mode.py",
        '_IS_HELD if free else "false"',
        '"false" if free else "false"',
        ("tests/statements/test_leased_together.py::test_a_row_that_another_transaction_has_locked_is_left_and_named",),
    ),
    Mutant(
        "the expiry of a job that is put back together with others",
        "outboxq/statements/lease_mode.py",
        "least(pg_catalog.clock_timestamp() + change.delay, job.expires_at)",
        "pg_catalog.clock_timestamp() + change.delay",
        ("tests/execution/test_settle_many.py::test_each_outcome_of_each_sort_of_job_leaves_what_it_leaves_by_itself",),
    ),
    Mutant(
        "the place of a coalesced job that is put back together with others",
        "outboxq/statements/lease_mode.py",
        '    + ", seq = DEFAULT, headers = "\n    + headers_with_order("job")\n',
        '    + ", seq = DEFAULT"\n',
        ("tests/execution/test_settle_many.py::test_each_outcome_of_each_sort_of_job_leaves_what_it_leaves_by_itself",),
    ),
    Mutant(
        "the crashes of a suspect that is put back together with others",
        "outboxq/statements/lease_mode.py",
        "SELECT change.attempt, change.crashes, coalesce",
        "SELECT change.attempt, job.crashes, coalesce",
        ("tests/execution/test_settle_many.py::test_each_outcome_of_each_sort_of_job_leaves_what_it_leaves_by_itself",),
    ),
    Mutant(
        "the dead letter of another kind, when jobs die together",
        "outboxq/statements/lease_mode.py",
        "AND (earlier.queue, earlier.kind) <> (job.queue, job.kind)",
        "AND false",
        ("tests/execution/test_settle_many.py::test_each_outcome_of_each_sort_of_job_leaves_what_it_leaves_by_itself",),
    ),
    Mutant(
        "what a lost answer to COMMIT has settled together",
        "outboxq/execution/settle_many.py",
        "isinstance(settlement.change, PutBack) or settlement.job.id not in standing",
        "False",
        ("tests/execution/test_settle_many.py::test_settlements_whose_commit_had_no_answer_are_sent_again",),
    ),
    Mutant(
        "the calls of waiters, when jobs are settled together",
        "outboxq/execution/families.py",
        "    if ended := keeper.ended(events, stands_for):\n",
        "    if not (ended := keeper.ended(events, stands_for)):\n",
        ("tests/execution/test_settle_many.py::test_waiters_for_results_are_told_of_each_end",),
    ),
    Mutant(
        "deferred constraints, before the COMMIT of jobs that are settled together",
        "outboxq/execution/settle_many.py",
        " if kept or back or dead else ()",
        " if kept else ()",
        ("tests/execution/test_settle_many.py::test_rows_that_their_table_refuses_fail_at_their_own_statement",),
    ),
    Mutant(
        "the claim of each finished row, when jobs of several are settled together",
        "outboxq/execution/keep.py",
        "of_claims = jobs if [job for job in jobs if job.claimed_at != claimed_at or job.queue != queue] else []",
        "of_claims: list[Job] = []",
        ("tests/execution/test_settle_many.py::test_a_finished_row_has_the_queue_and_the_claim_of_its_job",),
    ),
    Mutant(
        "the row that is changed again, behind a set-based update",
        "outboxq/handlers/set_based.py",
        "    if again:\n        yield from single_executions(statement, again)\n",
        "",
        ("tests/handlers/test_set_based.py",),
    ),
    Mutant(
        "the array that keeps a set-based update to its index",
        "outboxq/handlers/set_based.py",
        ".where(self.primary_key == any_(keys))",
        "",
        ("tests/handlers/test_set_based.py",),
    ),
    Mutant(
        "the order in which a set-based update locks rows",
        "outboxq/handlers/set_based.py",
        "set_based.over_arrays_in_order if in_order else set_based.over_arrays",
        "set_based.over_arrays",
        (
            "tests/handlers/test_set_based.py::test_rows_that_are_locked_in_order_let_batches_that_cross_wait_for_each_other",
        ),
    ),
    Mutant(
        "the backslashes of texts in an array",
        "outboxq/handlers/set_based.py",
        r"""value.replace("\\", r"\\").replace""",
        "value.replace",
        ("tests/handlers/test_set_based.py::test_each_type_is_written_as_an_executemany_writes_it",),
    ),
    Mutant(
        "what leaves a prepared claim no plan but its index",
        "outboxq/statements/claim.py",
        '(*by_index.BY_INDEX, "SET LOCAL jit = off")',
        '("SET LOCAL enable_mergejoin = off",)',
        (
            "tests/execution/test_prepared_claims.py::test_a_claim_that_was_prepared_for_an_empty_table_walks_its_index_in_a_large_one",
        ),
    ),
    Mutant(
        "the reindexer's look whether a pooler is in between",
        "outboxq/relay/maintenance/reindexer.py",
        "_value(connection, statements.backend_pid()) != str(connection.backend_pid)",
        "_value(connection, statements.backend_pid()) is None",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "the reindexer's question who owns the table",
        "outboxq/relay/maintenance/reindexer.py",
        'if _value(connection, statements.owns_jobs(self.schema)) != "true":',
        "if _value(connection, statements.owns_jobs(self.schema)) is None:",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "the reindexer's lock against a second one",
        "outboxq/relay/maintenance/reindexer.py",
        'elif _value(connection, statements.try_lock_reindexing(self.schema)) == "true":',
        "elif _value(connection, statements.try_lock_reindexing(self.schema)) is not None:",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "the reindexer's look who is in the way",
        "outboxq/relay/maintenance/reindexer.py",
        " or _value(connection, statements.obstacle(self.schema, self.old_seconds)):",
        ":",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "the reindexer's count of what an index holds",
        "outboxq/relay/maintenance/reindexer.py",
        "or 0) >= needed:",
        "or 0) > needed + 1_000_000_000:",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "the reindexer's rest after a failure",
        "outboxq/relay/maintenance/reindexer.py",
        "        self._paused_until = time.monotonic() + RETRY_SECONDS\n",
        "",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "the reindexer's removal of what a build left behind",
        "outboxq/relay/maintenance/reindexer.py",
        "            self._run_long(connection, statements.drop_index(self.schema, name))\n",
        "            pass\n",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "the reindexer's end when the relay stops",
        "outboxq/relay/maintenance/reindexer.py",
        "            if self.stopping.is_set() and not cancelled:\n",
        "            if self.stopping.is_set() and cancelled:\n",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "no new connection for what a handler left on its own",
        "outboxq/relay/slot.py",
        "        if left is None:\n            return True\n",
        "        if left is None or True:\n            return True\n",
        (
            "tests/database/test_session_state_left.py::test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch",
        ),
    ),
    Mutant(
        "a claim that follows on a connection with leavings",
        "outboxq/relay/slot.py",
        "None if is_listened_to(connection) or runtime.guard.left else",
        "None if is_listened_to(connection) else",
        (
            "tests/database/test_session_state_left.py::test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch",
        ),
    ),
    Mutant(
        "the connection on which a call left something",
        "outboxq/relay/connections.py",
        " and slot_connection.guard.left is None\n",
        "\n",
        (
            "tests/database/test_session_state_left.py::test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch",
        ),
    ),
    Mutant(
        "a connection that is lent and not closed",
        "outboxq/database/guard.py",
        "            self.lent.pop().__dict__ = {",
        "            self.lent.pop().__dict__ == {",
        (
            "tests/database/test_session_state_left.py::test_a_thread_left_behind_cannot_use_its_connection_in_a_later_job",
        ),
    ),
    Mutant(
        "execution options that stay",
        "outboxq/database/guard.py",
        "        self._connection._execution_options = self._options",
        "        self._connection.outboxq_options = self._options",
        (
            "tests/database/test_session_state_left.py::test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch",
        ),
    ),
    Mutant(
        "a cursor of the driver's that is not looked at",
        "outboxq/database/guard.py",
        "            guard.sends(query)\n            return super().execute(",
        "            return super().execute(",
        (
            "tests/database/test_session_state_left.py::test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch",
        ),
    ),
    Mutant(
        "a lease claim's check whether its own lease is alive",
        "outboxq/statements/claim.py",
        '_ALIVE if owner else ""',
        '""',
        ("tests/relay/test_lease_steps.py",),
    ),
    Mutant(
        "a function's schema in a statement",
        "outboxq/statements/park.py",
        "'5 seconds' * pg_catalog.power(",
        "'5 seconds' * power(",
        ("tests/statements/test_statement_names.py", "tests/statements/test_lookups.py"),
    ),
    Mutant(
        "the search path of a migration",
        "outboxq/migrations/__init__.py",
        "set_config('search_path', 'pg_catalog, pg_temp', true)",
        "set_config('search_path', search_path_before, true)",
        ("tests/statements/test_lookups.py",),
    ),
    Mutant(
        "texts that are sent as text",
        "outboxq/tables/columns.py",
        "type(self) if issubclass(cls, String) else cls",
        "cls",
        ("tests/statements/test_lookups.py",),
    ),
    Mutant(
        "a job that is put off for longer than it may wait comes at its expiry",
        "outboxq/statements/settle.py",
        "        later = func.least(later, literal(claimed.expires_at))\n",
        "        pass\n",
        (
            "tests/flow/test_option_pairs.py::test_a_job_that_would_be_tried_again_after_its_expiry_holds_nothing_up_till_then",
        ),
    ),
    Mutant(
        "a coalesced job that is put back keeps its place by the order of adding",
        "outboxq/statements/settle.py",
        '        kept["headers"] = with_added_order(claimed.headers, claimed.seq)',
        "        pass",
        (f"{_COALESCE}::test_arguments_of_a_run_that_did_not_end_well_never_follow_newer_ones",),
    ),
    Mutant(
        "a crashed suspect's place behind the others",
        "outboxq/statements/lease.py",
        "headers = {headers_with_order('job')}, seq = DEFAULT\")",
        "headers = {headers_with_order('job')}\")",
        ("tests/relay/test_lease_steps.py",),
    ),
    Mutant(
        "the second beat that sees an orphan",
        "outboxq/relay/lease.py",
        "in orphans & self._orphans:",
        "in orphans:",
        ("tests/relay/test_lease_steps.py",),
    ),
    Mutant(
        "the beats after an outage that reap nothing",
        "outboxq/relay/lease.py",
        "self._beats + _BEATS_BEFORE_REAPING",
        "self._beats",
        ("tests/relay/test_lease_steps.py",),
    ),
    Mutant(
        "the turns of the queues that `*` stands for",
        "outboxq/relay/poller.py",
        "first if name in in_turns else place",
        "place",
        ("tests/relay/test_turns.py::test_queues_of_the_star_take_turns",),
    ),
    Mutant(
        "the place behind the last queue, where a slot goes on",
        "outboxq/relay/poller.py",
        "name = order.first(last, self.waiting())",
        "name = order.first(order.queues[-1], self.waiting())",
        (
            "tests/relay/test_turns.py::test_queues_of_the_star_take_turns",
            "tests/relay/test_turns.py::test_every_full_queue_of_the_star_is_served_in_each_round",
        ),
    ),
    Mutant(
        "the names in a poll, from which alone slots claim",
        "outboxq/relay/poller.py",
        "                if ready:\n",
        "                if name:\n",
        (
            "tests/relay/test_turns.py::test_a_sleeping_slot_claims_from_the_queue_that_it_was_called_to_and_from_no_other",
        ),
    ),
    Mutant(
        "the poll of a slot that falls asleep behind a call",
        "outboxq/relay/idle.py",
        "self._poller.uncalled_since(self.idle_slot.queues)",
        "self._poller.polled_at(self._first)",
        ("tests/relay/test_lost_wakes.py::test_a_slot_that_falls_asleep_behind_a_call_polls_for_it",),
    ),
    Mutant(
        "the call by a slot that goes where a poll saw jobs, and never slept",
        "outboxq/relay/planner.py",
        "        is_called |= self._is_called and self._state.listener is not None\n",
        "",
        ("tests/relay/test_lost_wakes.py::test_a_slot_that_never_slept_calls_another_where_a_poll_saw_jobs",),
    ),
    Mutant(
        "the look, before a pause, at what another slot's poll has found",
        "outboxq/relay/idle.py",
        "if self._wants_poll() or self._has_jobs():",
        "if self._wants_poll() and self._poller.is_under_way():",
        ("tests/relay/test_lost_wakes.py::test_a_slot_that_waits_for_a_poll_does_not_sleep_over_what_it_finds",),
    ),
    Mutant(
        "the claim that is left out behind one that took a queue's only jobs",
        "outboxq/relay/planner.py",
        "0.0 if 0.0 < share_seconds < _LEAST_SHARE_SECONDS else time.monotonic() + share_seconds",
        "time.monotonic() + share_seconds",
        ("tests/relay/test_turns.py::test_a_job_costs_two_claims_at_most_whatever_the_number_of_queues",),
    ),
    Mutant(
        "the text of claims, on a connection that has just lost what it prepared twice",
        "outboxq/database/driver.py",
        "self._age = 0 if self._age >= _WORTHWHILE else -_WORTHWHILE",
        "self._age = 0",
        ("tests/execution/test_prepared_claims.py::test_a_driver_that_lets_go_of_all_statements_costs_no_job",),
    ),
    Mutant(
        "a claim that is prepared again after a loss",
        "outboxq/database/driver.py",
        "self._age = 0 if self._age >= _WORTHWHILE else -_WORTHWHILE",
        "self._age = -_WORTHWHILE",
        ("tests/execution/test_prepared_claims.py::test_a_driver_that_lets_go_of_all_statements_costs_no_job",),
    ),
    Mutant(
        "a prepared claim that is there already",
        "outboxq/database/driver.py",
        "if sqlstate == _THERE_ALREADY:",
        "if False:",
        ("tests/execution/test_prepared_claims.py::test_a_name_that_is_taken_is_used",),
    ),
    Mutant(
        "the end of connections that were not used for long",
        "outboxq/relay/connections.py",
        "if spare.used_at <= oldest]",
        "if spare.used_at is None]",
        (
            "tests/relay/test_connections.py::test_an_idle_relay_holds_four_connections_whatever_the_number_of_its_queues",
        ),
    ),
    Mutant(
        "what became of the jobs of a lost connection, before a slot ends",
        "outboxq/relay/slot_loop.py",
        "                self._wait_after(error)\n        self._find_out()\n",
        "                self._wait_after(error)\n",
        ("tests/faults/test_unknown_commit.py::test_a_relay_that_is_told_to_stop_finds_out_first",),
    ),
    Mutant(
        "the second try at rows of finished jobs, if their INSERT is not prepared any more",
        "outboxq/execution/keep.py",
        "(may_be_of_prepared(error) or ",
        "(",
        ("tests/execution/test_kept.py::test_the_insert_of_rows_is_prepared_once_and_sent_as_text_if_that_is_lost",),
    ),
    Mutant(
        "the patience of a transaction, set back behind rows of finished jobs",
        "outboxq/execution/keep.py",
        "*insert, _AS_LONG_AS_BEFORE",
        "*insert",
        ("tests/execution/test_kept.py::test_rows_wait_for_a_lock_for_a_second_and_what_follows_as_long_as_before",),
    ),
    Mutant(
        "the second try at rows of finished jobs, if one of the ids has a row",
        "outboxq/execution/keep.py",
        " or sqlstate_of(error) == _UNIQUE_VIOLATION)",
        ")",
        ("tests/execution/test_kept.py::test_a_row_whose_id_was_chosen_twice_gives_way",),
    ),
    Mutant(
        "the earlier row of a finished job's id, which gives way",
        "outboxq/statements/done.py",
        "WHERE earlier.queue = excluded.queue AND earlier.kind = excluded.kind",
        "WHERE false",
        ("tests/execution/test_kept.py::test_a_row_whose_id_was_chosen_twice_gives_way",),
    ),
    Mutant(
        "the connection of a slot, given back when it sleeps",
        "outboxq/relay/slot_loop.py",
        "                    slot.rest(self)\n",
        "                    self.on_connection(lambda _: slot.rest(self) is None)\n",
        (
            "tests/relay/test_connections.py::test_an_idle_relay_holds_four_connections_whatever_the_number_of_its_queues",
        ),
    ),
    Mutant(
        "the spare connection that is taken before one is opened",
        "outboxq/relay/connections.py",
        "slot_connection = self._spares.pop() if self._spares else None",
        "slot_connection = None",
        ("tests/relay/test_connections.py::test_slots_that_wake_take_a_connection_that_is_there",),
    ),
    Mutant(
        "the spare connections that are closed with a lost one",
        "outboxq/relay/connections.py",
        "            _close([slot_connection, *self._remove_all()])\n",
        "            _close([slot_connection])\n",
        ("tests/relay/test_connections.py::test_spare_connections_that_were_cut_cost_no_job_and_are_found_out_once",),
    ),
    Mutant(
        "connections that never return to a pool",
        "outboxq/relay/connections.py",
        "            give_up(slot_connection.connection)\n",
        "",
        ("tests/relay/test_connections.py::test_a_relay_on_a_users_engine_returns_no_connection_to_its_pool",),
    ),
    Mutant(
        "the pipeline mode that a handler left on",
        "outboxq/database/driver.py",
        "\n        or pgconn.pipeline_status != PipelineStatus.OFF",
        "",
        ("tests/execution/test_unfinished.py",),
    ),
    Mutant(
        "the driver's lock that an unfinished statement of a handler holds",
        "outboxq/database/driver.py",
        "        driver.lock.locked()\n        or pgconn.transaction_status == TransactionStatus.ACTIVE",
        "        pgconn is None",
        ("tests/execution/test_unfinished.py",),
    ),
    Mutant(
        "the greatest count of crashes",
        "outboxq/statements/numbers.py",
        "least(greatest({count}, 0), 32765) + 1",
        "least(greatest({count}, 0), 32766) + 1",
        ("tests/execution/test_stored_numbers.py",),
    ),
    Mutant(
        "the token behind the greatest one",
        "outboxq/statements/numbers.py",
        "% 9223372036854775806 + 1",
        "% 9223372036854775807 + 1",
        ("tests/execution/test_stored_numbers.py",),
    ),
    Mutant(
        "the time in a lease's token",
        "outboxq/statements/numbers.py",
        "% 9223372036854775806 + 1, {now})",
        "% 9223372036854775806 + 1)",
        ("tests/relay/test_lease.py",),
    ),
    Mutant(
        "what a socket does not take at once, of a thread's own script",
        "outboxq/database/driver.py",
        "    _flush(connection, seconds)\n",
        "",
        ("tests/database/test_driver.py",),
    ),
    Mutant(
        "the time of a request, when a job is to be cancelled for it",
        "outboxq/statements/cancel.py",
        "    counts = cancel_request.c.requested_at >= created_at\n",
        "    counts = cancel_request.c.requested_at.is_not(None)\n",
        ("tests/relay/test_cancel.py",),
    ),
    Mutant(
        "the time of a request, when a relay looks for them",
        "outboxq/statements/lease.py",
        " AND job.created_at > request.requested_at",
        " AND job.created_at > request.requested_at AND false",
        ("tests/relay/test_cancel.py",),
    ),
    Mutant(
        "a request that stands already is left alone",
        "outboxq/statements/cancel.py",
        "wanted.where(there.c.id.not_in(select(standing.c.job_id)))",
        "wanted",
        ("tests/admin/test_cancel_locks.py",),
    ),
    Mutant(
        "the end of a backend, told from a refusal of rows of finished jobs",
        "outboxq/execution/commit.py",
        " or is_lost(connection):\n            return answer, steps",
        ":\n            return answer, steps",
        (
            "tests/faults/test_refused_commit.py::test_a_backend_that_ends_at_the_rows_of_finished_jobs_stops_no_later_rows",
        ),
    ),
    Mutant(
        "the COMMIT of results, before they are published",
        "outboxq/relay/dispatcher.py",
        "            answer = script.send(connection)\n",
        "            self._publish(BatchReport(0, tuple(each.event for each in many.settlements if each.event)), ())\n"
        "            answer = script.send(connection)\n",
        ("tests/relay/test_dispatcher.py::test_a_lost_lease_of_one_job_costs_the_others_nothing",),
    ),
    Mutant(
        "a claim beyond the free slots",
        "outboxq/relay/planner.py",
        "self._free if script.leased else claims.batch_size",
        "claims.batch_size + 9",
        ("tests/relay/test_dispatcher.py::test_a_claim_takes_no_more_jobs_than_slots_are_free",),
    ),
    Mutant(
        "a COMMIT that gets no lock, for which no job is blamed",
        "outboxq/execution/recovery.py",
        " or sqlstate_of(error) == LOCK_NOT_AVAILABLE",
        "",
        ("tests/faults/test_refused_commit.py",),
    ),
    Mutant(
        "requests for jobs that are gone, when a later one of their id is there",
        "outboxq/statements/prune.py",
        "AS job WHERE {COUNTS})",
        "AS job WHERE job.id = request.job_id)",
        ("tests/relay/test_cancel.py",),
    ),
    Mutant(
        "another job that can be claimed, before one is blamed",
        "outboxq/execution/aside.py",
        "if not is_of_a_row(error) or all(_failure(connection, schema, *other) for other in others):",
        "if not is_of_a_row(error):",
        ("tests/faults/test_rows_that_refuse.py",),
    ),
    Mutant(
        "the marks of a parking that failed",
        "outboxq/relay/parking.py",
        "        park_unknown(connection, schema, queue, known_kinds, only_marks=True)",
        "        pass",
        ("tests/execution/test_parking.py",),
    ),
    Mutant(
        "marks that are cleared behind a claim on trial",
        "outboxq/execution/aside.py",
        'f"ROLLBACK TO SAVEPOINT oq_probe; {clear_marks(schema, [str(job_id)])}"',
        '"ROLLBACK TO SAVEPOINT oq_probe"',
        ("tests/faults/test_rows_that_refuse.py",),
    ),
    Mutant(
        "one by one, if a sweep fails for one row",
        "outboxq/relay/lease.py",
        "            return self._reap_one_by_one(connection, in_group=in_group)",
        "            raise",
        ("tests/faults/test_rows_that_refuse.py",),
    ),
    Mutant(
        "another lost job that comes back, before one becomes a dead letter",
        "outboxq/relay/lease.py",
        "for job_id, found in came.items() if found is None and rows]:",
        "for job_id, found in came.items() if found is None]:",
        ("tests/faults/test_rows_that_refuse.py",),
    ),
    Mutant(
        "expired rows one by one, if a batch fails for one",
        "outboxq/relay/maintenance/pruner.py",
        "if not is_of_a_row(error):\n                    break\n                rows, more",
        "if error:\n                    break\n                rows, more",
        ("tests/relay/test_pruner.py",),
    ),
    Mutant(
        "rows of before the checks on them",
        "outboxq/migrations/step_08_validated.py",
        "{REPAIR_ALL}\n    ALTER TABLE @schema@.job\n      VALIDATE",
        "    ALTER TABLE @schema@.job\n      VALIDATE",
        ("tests/migrations/test_row_checks.py",),
    ),
    Mutant(
        "a lock that is asked for a moment at a time",
        "outboxq/migrations/step_07_checks.py",
        "PERFORM set_config('lock_timeout', '200ms', true);",
        "",
        ("tests/migrations/test_row_checks.py",),
    ),
    Mutant(
        "what is too long goes before its numbers are set",
        "outboxq/migrations/repair.py",
        """{_BURY.format(held=_SAY_HELD)}
{_SET_FREE_NUMBERS}""",
        """{_SET_FREE_NUMBERS}
{_BURY.format(held=_SAY_HELD)}""",
        ("tests/migrations/test_row_checks.py",),
    ),
    Mutant(
        "a row of a leased job that another transaction holds",
        "outboxq/execution/settle.py",
        "sqlstate_of(error) in _GAVE_UP_WAITING:",
        "sqlstate_of(error) is None:",
        ("tests/execution/test_row_held.py",),
    ),
    Mutant(
        "the bound of leases that no slot runs",
        "outboxq/statements/lease.py",
        "SELECT job.id, job.crashes >= {max_crashes} AS over",
        "SELECT job.id, false AND {max_crashes} > 0 AS over",
        ("tests/execution/test_row_held.py::test_a_lease_that_no_slot_runs_again_and_again_is_buried",),
    ),
    Mutant(
        "the marks of an operator's page that was rolled back",
        "outboxq/admin/marks.py",
        "        if ids and not _clear(begin, ids, run):\n",
        "        if ids and not ids:\n",
        ("tests/cli/test_interrupted.py",),
    ),
    Mutant(
        "the rows of an operator's page",
        "outboxq/statements/paging.py",
        "MAX_PAGE_ROWS = 200",
        "MAX_PAGE_ROWS = 1_000",
        ("tests/cli/test_interrupted.py::test_no_transaction_changes_more_than_a_page",),
    ),
    Mutant(
        "a claim that no time-out of the role cuts short",
        "outboxq/execution/claim.py",
        '_BEGUN = [("settings", UNTIMED), ("settings", READABLE_DATES)]',
        '_BEGUN = [("settings", READABLE_DATES)]',
        (
            "tests/execution/test_failing_claims.py::test_claims_are_not_under_the_time_out_of_the_role",
            "tests/execution/test_failing_claims.py::test_claims_of_a_lease_are_not_under_the_time_out_of_the_role",
        ),
    ),
    Mutant(
        "the role and the deadlines as before, behind a handler that has set others",
        "outboxq/execution/run.py",
        "    if transaction is None or not (guard.is_altered or guard.left):\n",
        "    if True:\n",
        ("tests/execution/test_settings_left.py::test_a_job_is_done_whatever_its_handler_has_set",),
    ),
    Mutant(
        "the free call after a statement that was prepared before its table was altered",
        "outboxq/execution/failure.py",
        "    prepared = is_of_prepared(original)\n",
        "    prepared = False\n",
        ("tests/execution/test_altered_tables.py::test_a_statement_that_was_prepared_before_costs_no_attempt",),
    ),
    Mutant(
        "times that are read as numbers, whatever the DateStyle",
        "outboxq/tables/columns.py",
        'return type_coerce(extract("epoch", column), self)',
        "return type_coerce(column, DateTime(timezone=True))",
        ("tests/statements/test_settings.py::test_producers_and_consumers_work",),
    ),
    Mutant(
        "the smaller claim behind one that was cancelled",
        "outboxq/relay/planner.py",
        "self._most = max(1, request.limit // 2)",
        "self._most = request.limit",
        ("tests/execution/test_failing_claims.py::test_a_cancelled_claim_is_no_death_and_no_outage",),
    ),
    Mutant(
        "the marks of a claim that was cancelled",
        "outboxq/execution/recovery.py",
        "        picked = _forgive(connection, request)\n",
        "        picked = list[UUID]()\n",
        ("tests/execution/test_failing_claims.py::test_a_cancelled_claim_is_no_death_and_no_outage",),
    ),
    Mutant(
        "suspects that cannot be claimed, and the ready jobs behind them",
        "outboxq/relay/rolled_back.py",
        "    if not request.sort.is_suspect:\n",
        "    if request:\n",
        ("tests/execution/test_failing_claims.py::test_suspects_that_cannot_be_claimed_keep_no_other_job_waiting",),
    ),
    Mutant(
        "the connection of a call, before its session is used",
        "outboxq/execution/leased_call.py",
        "        result = attempt(batch,",
        "        self.borrow()\n        result = attempt(batch,",
        ("tests/relay/test_dispatcher.py::test_calls_that_wait_hold_no_connection",),
    ),
    Mutant(
        "the second way of a recovery that the database refuses",
        "outboxq/relay/rolled_back.py",
        "        except (psycopg.Error, SQLAlchemyError) as refused:\n",
        "        except ZeroDivisionError as refused:\n",
        ("tests/faults/test_rows_that_refuse.py::test_a_job_that_escaped_and_cannot_be_a_dead_letter_is_put_off",),
    ),
    Mutant(
        "the end of a transaction that a handler prepared",
        "outboxq/execution/find_outcome.py",
        ' if status == "in progress" else ()',
        ' if status == "prepared" else ()',
        ("tests/execution/test_prepared_by_handler.py",),
    ),
    Mutant(
        "the session of a coroutine that has ended, away from the tasks that it left behind",
        "outboxq/execution/invoke.py",
        "            self._session.sync_session = self._session._proxied = cast",
        "            cast",
        ("tests/execution/test_shared_batches_neighbours.py::test_a_task_that_is_left_behind_has_no_session",),
    ),
    Mutant(
        "the smaller claim of a lease behind one that was cancelled",
        "outboxq/relay/planner.py",
        "limit = min(self._most, self._free if script.leased",
        "limit = min(self._free, self._free if script.leased",
        ("tests/execution/test_failing_claims.py::test_a_cancelled_claim_of_a_lease_asks_for_less",),
    ),
    Mutant(
        "the end of a statement that was left behind, before its connection is closed",
        "outboxq/database/closing.py",
        "    _end_socket(driver)\n    idle = 0\n",
        "    return False\n    idle = 0\n",
        ("tests/execution/test_unfinished.py::test_a_thread_left_in_a_statement_reads_nothing_of_the_next_connection",),
    ),
    Mutant(
        "the crash of a job whose child task blocks the loop",
        "outboxq/relay/deadlines.py",
        "is_crash=is_blocked or (is_over and is_several))",
        "is_crash=is_over and is_several)",
        ("tests/relay/test_event_loops.py::test_a_child_task_that_blocks_the_loop_is_counted_against_its_job",),
    ),
    Mutant(
        "the check whether an idle loop is blocked",
        "outboxq/relay/run.py",
        "            self._end_if_loop_is_stuck()\n",
        "            pass\n",
        ("tests/relay/test_event_loops.py::test_a_callback_that_blocks_an_idle_loop_ends_its_relay",),
    ),
    Mutant(
        "a call of several jobs, one of which ended the transaction, that is charged to none",
        "outboxq/execution/recovery.py",
        "    if batch.running.together > 1:\n",
        "    if batch.running.together > 1 and not runtime:\n",
        ("tests/execution/test_batch_handlers.py::test_what_fails_with_many_is_tried_with_each_alone",),
    ),
    Mutant(
        "the connection of a batch handler's call, taken back when it is over",
        "outboxq/execution/batch_call.py",
        "        runtime.guard.take_back()\n        batch.running.together = 1\n",
        "        batch.running.together = 1\n",
        (
            "tests/database/test_session_state_left.py::test_what_runs_together_leaves_its_connection_to_no_job_behind_it",
        ),
    ),
    Mutant(
        "the time-out of a call of several jobs, which charges none of them",
        "outboxq/relay/deadlines.py",
        " if is_over and not is_several else None\n",
        " if is_over else None\n",
        ("tests/faults/test_deadlines.py::test_a_batch_handler_that_hangs_charges_only_the_job_that_hangs_alone",),
    ),
    Mutant(
        "a context of its own for each attempt",
        "outboxq/execution/invoke.py",
        "        return copy_context().run\n",
        "        return lambda attempt, *args: attempt(*args)\n",
        ("tests/execution/test_apart.py",),
    ),
    Mutant(
        "one context for a coroutine and for its flush",
        "outboxq/execution/invoke.py",
        "loop=asyncio.get_running_loop(), context=context)",
        "loop=asyncio.get_running_loop())",
        ("tests/execution/test_apart.py",),
    ),
    Mutant(
        "a context of its own for each attempt of a coroutine",
        "outboxq/execution/invoke.py",
        "own.gr_context = own.gr_context, copy_context()",
        "own.gr_context = own.gr_context, own.gr_context",
        ("tests/execution/test_apart.py",),
    ),
    Mutant(
        "a task of its own for each coroutine",
        "outboxq/execution/invoke.py",
        "        self.task = asyncio.Task(running, loop=asyncio.get_running_loop(), context=context)\n        try:\n",
        "        try:\n            return await running\n",
        ("tests/relay/test_event_loops.py::test_a_late_cancellation_is_not_the_next_job_s",),
    ),
    Mutant(
        "an event loop that goes on when a handler has stopped it",
        "outboxq/relay/event_loop.py",
        "        while not ends.is_set():\n            with suppress",
        "        if not ends.is_set():\n            with suppress",
        ("tests/relay/test_event_loops.py::test_a_handler_that_stops_its_loop_ends_no_relay",),
    ),
    Mutant(
        "an error that an around swallows, and that stays the attempt's",
        "outboxq/execution/surround.py",
        "        call_here(wrapping.__exit__, type(error), error, error.__traceback__)\n        raise\n",
        "        if not wrapping.__exit__(type(error), error, error.__traceback__):\n            raise\n"
        "        return None\n",
        ("tests/execution/test_arounds.py::test_an_error_fails_the_attempt_whatever_the_arounds_answer",),
    ),
    Mutant(
        "the arounds, entered before their job's rows are loaded",
        "outboxq/execution/attempt.py",
        "            arguments = Surrounded.of(self._arounds, self, self._arguments, jobs)\n",
        "            given = self._arguments()\n"
        "            arguments = Surrounded.of(self._arounds, self, lambda: given, jobs)\n",
        ("tests/execution/test_arounds_tenant.py::test_rows_are_loaded_and_locked_under_their_tenant",),
    ),
    Mutant(
        "the end of a child that a handler has forked",
        "outboxq/forks.py",
        '        _end("returned", 0)\n    return returned\n\n\nasync def',
        "        pass\n    return returned\n\n\nasync def",
        ("tests/faults/test_forks.py::test_a_child_that_comes_back_to_the_relay_ends_and_the_job_is_its_parents",),
    ),
    Mutant(
        "the wait for a statement whose event loop is held up",
        "outboxq/database/closing.py",
        "            idle = 0 if is_waited_on else idle + 1\n            if idle == _IDLE_TURNS:\n",
        "            if True:\n",
        ("tests/database/test_closing.py::test_a_statement_of_a_loop_that_is_held_up_ends_first",),
    ),
    Mutant(
        "the relay's own loggers, which no configuration disables",
        "outboxq/cli/relay_process.py",
        "    keep_loggers_enabled()\n",
        "",
        ("tests/cli/test_relay_log_kept.py::test_the_log_goes_on",),
    ),
    Mutant(
        "what signals mean to a forked child",
        "outboxq/relay/signals.py",
        "after_in_child=_give_back)",
        "after_in_child=_unblock)",
        ("tests/faults/test_forks.py::test_a_signal_to_a_child_ends_the_child_and_not_the_relay",),
    ),
    Mutant(
        "the note of an interrupted run",
        "outboxq/execution/seized.py",
        "            run_script(connection, note_interrupted(runtime.schema, running, _INTERRUPTED))\n",
        "            pass\n",
        ("tests/faults/test_interrupted.py::test_a_job_whose_relays_stop_again_and_again_runs_as_a_suspect_and_ends",),
    ),
    Mutant(
        "the bound of interrupted runs",
        "outboxq/execution/seized.py",
        "    if is_crash or any(count_unfinished(job.errors) >= FREE_INTERRUPTIONS for job in batch.running_jobs):\n",
        "    if is_crash:\n",
        ("tests/faults/test_interrupted.py::test_a_job_whose_relays_stop_again_and_again_runs_as_a_suspect_and_ends",),
    ),
    Mutant(
        "the end of a child before the tasks of others run in it",
        "outboxq/forks.py",
        '        loop.call_soon(_end, "awaited", 1)\n',
        "        pass\n",
        ("tests/faults/test_forks.py::test_a_child_that_comes_back_to_the_relay_ends_and_the_job_is_its_parents",),
    ),
    Mutant(
        "the cut between a forked child and the connections of its parent",
        "outboxq/forks.py",
        "            os.dup2(nowhere.fileno(), file.fileno(), inheritable=False)\n",
        "            pass\n",
        ("tests/faults/test_forks.py::test_a_child_reaches_nothing_of_its_parents",),
    ),
    Mutant(
        "the lock of a row that was not there when rows were locked together",
        "outboxq/execution/preload.py",
        " for key in wanted[entity] if key in locked)\n",
        " for key in wanted[entity])\n",
        ("tests/execution/test_arounds.py::test_a_row_that_could_not_be_locked_ahead_is_locked_when_it_is_loaded",),
    ),
    Mutant(
        "the loading of columns of the application's own types within their job's arounds",
        "outboxq/execution/read_rows.py",
        " and (not own_types or _has_own_types(entity))\n",
        "\n",
        ("tests/execution/test_arounds.py::test_types_of_the_application_s_own_work_within_the_arounds_of_their_job",),
    ),
    Mutant(
        "the events that are dropped at once while hooks are behind",
        "outboxq/relay/hook_thread.py",
        "            if not self._is_behind:\n                self._changed.wait_for",
        "            if not self._has_room():\n                self._is_behind = False\n"
        "                self._changed.wait_for",
        ("tests/relay/test_hooks.py::test_hooks_that_are_behind_get_no_events_until_half_of_them_are_told",),
    ),
    Mutant(
        "the traceback of an event, dropped when the hooks were told it",
        "outboxq/relay/hook_thread.py",
        "                forget(event)\n                # Or it would",
        "                # Or it would",
        ("tests/relay/test_hooks.py::test_what_a_failed_handler_held_goes_when_its_event_was_told_or_dropped",),
    ),
    Mutant(
        "a unique key that was free is taken without compare-and-set",
        "outboxq/statements/unique.py",
        "        where=judged.scalar_subquery() == _VERSION,\n",
        "",
        (
            "tests/flow/test_unique.py::test_a_key_that_was_taken_over_meanwhile_is_not_taken_again",
            "tests/flow/test_unique.py::test_under_kills_no_two_jobs_of_a_key_live_and_none_is_lost",
        ),
    ),
    Mutant(
        "a unique key that was free is taken by the id of its last job",
        "outboxq/statements/unique.py",
        '_VERSION: ColumnElement[Any] = literal_column("unique_key.ctid")\n',
        '_VERSION: ColumnElement[Any] = literal_column("unique_key.job_id")\n',
        ("tests/flow/test_unique.py::test_a_key_of_a_retried_dead_letter_is_not_stolen",),
    ),
    Mutant(
        "a unique key is free while its job runs under a lease",
        "outboxq/statements/unique.py",
        "_HAS_JOB = select(true()).where(job.c.id == unique_key.c.job_id, ",
        '_HAS_JOB = select(true()).where(job.c.id == unique_key.c.job_id, job.c.state != "leased", ',
        ("tests/flow/test_unique.py::test_a_key_is_taken_for_as_long_as_its_job_lives",),
    ),
    Mutant(
        "an expired job that waits keeps its unique key",
        "outboxq/statements/unique.py",
        "CASE WHEN job.expires_at <= pg_catalog.statement_timestamp() ",
        "CASE WHEN false ",
        ("tests/flow/test_unique_expires.py::test_an_expired_job_that_waits_has_no_key",),
    ),
    Mutant(
        "an expired job that runs has lost its unique key",
        "outboxq/statements/unique.py",
        " OR {HELD} ELSE true END",
        " ELSE true END",
        ("tests/flow/test_unique_expires.py::test_a_job_that_began_before_it_expired_has_its_key",),
    ),
    Mutant(
        "unique keys are taken in the order of the adds",
        "outboxq/statements/unique.py",
        '.order_by(collate(wanted.c.key, "C"))',
        "",
        ("tests/flow/test_unique.py::test_two_flushes_with_the_same_keys_in_other_orders_do_not_deadlock",),
    ),
    Mutant(
        "a handler takes unique keys by its flush",
        "outboxq/outbox/unique.py",
        "    if guard is not None and guard.collects:\n",
        "    if False:\n",
        ("tests/flow/test_unique.py::test_adds_of_a_key_do_not_wait_for_a_handler_that_adds_it",),
    ),
    Mutant(
        "the COMMIT of a handler takes unique keys without compare-and-set",
        "outboxq/statements/unique.py",
        "  WHERE held.ctid = (SELECT version FROM standing WHERE standing.key = held.key)\n",
        "",
        ("tests/flow/test_unique.py::test_a_handler_does_not_take_a_key_that_was_taken_over_meanwhile",),
    ),
    Mutant(
        "unique keys are pruned by the look that was taken before they were locked",
        "outboxq/statements/unique.py",
        "  WHERE key = ANY ({keys}::text[])\n"
        "    AND coalesce(kept_until <= pg_catalog.statement_timestamp(), true)\n"
        "    AND (SELECT true FROM {job} AS job WHERE job.id = held.job_id) IS NULL\n"
        "  RETURNING 1\n",
        "  WHERE key = ANY ({keys}::text[]) RETURNING 1\n",
        ("tests/flow/test_unique.py::test_a_key_that_was_taken_over_before_it_was_locked_is_not_pruned",),
    ),
    Mutant(
        "dead letters are retried whether their unique key is free or not",
        "outboxq/statements/dead_letters.py",
        "*_can_be_jobs(), or_(has_no_key, has_its_key)\n",
        "*_can_be_jobs(), or_(has_no_key, ~has_no_key)\n",
        ("tests/flow/test_unique.py::test_a_dead_letter_is_retried_only_if_its_key_is_free",),
    ),
    Mutant(
        "the lock of a group",
        "outboxq/statements/group_claim.py",
        "      THEN pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext({lock}),\n"
        "        pg_catalog.hashtext(pg_catalog.concat_ws(pg_catalog.chr(31), {queue}::text, heads.group_key, "
        "slot.number)))\n",
        "      THEN {lock} <> ''\n",
        ("tests/relay/test_groups.py::test_a_job_that_commits_late_does_not_run_beside_its_successor",),
    ),
    Mutant(
        "the look for leased jobs of a group",
        "outboxq/statements/group_claim.py",
        "  WHERE state = 'group_leased' AND queue = {queue} GROUP BY group_key\n",
        "  WHERE state = 'group_leased' AND queue = {queue} AND false GROUP BY group_key\n",
        ("tests/relay/test_groups.py::test_a_job_that_commits_late_does_not_run_beside_its_successor",),
    ),
    Mutant(
        "the second snapshot of a group's claim: both statements see the same",
        "outboxq/statements/group_claim.py",
        'return [*texts.limited, *claim.BY_INDEX, ("groups", lock)',
        'return [("settings", "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"), '
        '*texts.limited, *claim.BY_INDEX, ("groups", lock)',
        ("tests/relay/test_groups.py::test_a_lease_that_is_committed_while_a_claim_begins_is_seen",),
    ),
    Mutant(
        "the end of a group's run at a job that another transaction holds",
        "outboxq/statements/group_claim.py",
        "  WHERE (NOT run.free OR locked.id IS NULL OR locked.died)",
        "  WHERE (NOT run.free OR locked.died)",
        ("tests/relay/test_groups.py::test_a_lock_on_the_first_job_holds_up_its_group",),
    ),
    Mutant(
        "the place of a group's job that is put back",
        "outboxq/statements/settle.py",
        "_InsertInPlace(job).values(**_kept(claimed, in_place=True), **expiry, **changed, seq=claimed.seq)\n",
        "insert(job).values(**_kept(claimed, in_place=True), **expiry, **changed)\n",
        ("tests/relay/test_groups.py::test_a_failed_job_holds_up_its_group_until_its_retry_is_due",),
    ),
    Mutant(
        "giving back the jobs of a batch behind a failed one of their group",
        "outboxq/execution/families.py",
        "batch.decided.setdefault(later.id, GivenBack())",
        "pass",
        ("tests/relay/test_groups.py::test_a_failed_job_holds_up_its_group_until_its_retry_is_due",),
    ),
    Mutant(
        "when a group's job was due, as the witness of a lost COMMIT",
        "outboxq/statements/settle.py",
        "    return same if claimed.group_key is None else same.where(job.c.run_at == claimed.run_at)\n",
        "    return same\n",
        ("tests/relay/test_groups.py::test_a_job_that_came_back_is_told_from_one_that_was_never_taken",),
    ),
    Mutant(
        "beside groups: their leased jobs in the count of a queue's limit",
        "outboxq/statements/limit.py",
        "WHERE job.state = 'group_leased' AND job.queue = wanted.queue\n",
        "WHERE job.state = 'group_leased' AND job.queue = wanted.queue AND false\n",
        ("tests/relay/test_groups_beside.py::test_a_limit_of_a_queue_holds_for_jobs_of_groups",),
    ),
    Mutant(
        "beside groups: a queue's limit at the walk over its groups",
        "outboxq/statements/group_claim.py",
        "  WHERE {has_room} AND NOT EXISTS",
        "  WHERE NOT EXISTS",
        ("tests/relay/test_groups_beside.py::test_a_limit_of_a_queue_holds_for_jobs_of_groups",),
    ),
    Mutant(
        "beside groups: a call of a batch handler for each of a group's jobs",
        "outboxq/execution/plan.py",
        '        or ("group_key" in batch.claimed.extras and _reorders_groups(batch, handlers))\n',
        "",
        ("tests/relay/test_groups_beside.py::test_a_failed_job_of_a_batch_keeps_those_behind_it_waiting",),
    ),
    Mutant(
        "beside groups: a relay's own leases that no slot knows",
        "outboxq/relay/lease.py",
        "            in_group = leased[job_id, token]\n",
        "            in_group = False\n",
        ("tests/relay/test_groups_beside.py::test_a_lease_that_no_slot_knows_is_taken_back_in_its_place",),
    ),
    Mutant(
        "the look for cancellations at a claim",
        "outboxq/execution/families.py",
        "    return CancelledResult() if cancelled and job.id in cancelled else None\n",
        "    return None\n",
        (
            "tests/relay/test_cancel.py::test_a_request_stands_until_the_job_is_gone",
            "tests/relay/test_cancel.py::test_a_suspect_that_was_cancelled_does_not_run",
        ),
    ),
    Mutant(
        "the request as the truth about a cancellation",
        "outboxq/execution/settle.py",
        "    if outcome is None:\n",
        '    if outcome == "":\n',
        ("tests/relay/test_cancel.py::test_a_request_that_does_not_stand_any_more_ends_nothing",),
    ),
    Mutant(
        "the transaction by which a forced cancellation knows its session",
        "outboxq/statements/cancel.py",
        "AS activity ON activity.backend_xid = job.xmax WHERE",
        "AS activity ON activity.backend_xid IS NOT NULL WHERE",
        ("tests/cli/test_cancelling.py::test_force_ends_no_session_that_runs_another_job_by_now",),
    ),
    Mutant(
        "the look at the expiry before a handler is called",
        "outboxq/execution/families.py",
        "    if batch.expires and time.monotonic() >= batch.expires.get(job.id, math.inf):\n",
        "    if batch.expires and time.monotonic() >= math.inf:\n",
        ("tests/relay/test_expiry.py::test_an_expired_job_is_dropped_and_the_others_run",),
    ),
    Mutant(
        "jobs of a key taken along after the handlers too",
        "outboxq/relay/slot.py",
        "                    run(connection, batch, runtime, handlers, shared=len(batch.jobs) > 1)\n",
        "                    run(connection, batch, runtime, handlers, shared=len(batch.jobs) > 1)\n"
        "                    decide(connection, batch, runtime)\n",
        ("tests/flow/test_coalesce.py::test_a_job_that_is_added_while_another_of_its_key_runs_is_followed_by_a_run",),
    ),
    Mutant(
        "the place of a call among the connections, given back",
        "outboxq/relay/connections.py",
        "            self.held.pop().give_place()\n",
        "            self.held.pop()\n",
        (
            "tests/relay/test_dispatcher.py::test_as_many_connections_as_are_set_are_lent_in_the_order_of_the_first_uses",
        ),
    ),
    Mutant(
        "jobs of a key taken along as the claim's snapshot has them",
        "outboxq/statements/coalesce.py",
        "  WHERE unique_key = ANY ({{keys}}::text[])\n",
        "  WHERE unique_key = ANY ({{keys}}::text[]) AND created_at < pg_catalog.transaction_timestamp()\n",
        (f"{_COALESCE}::test_a_job_that_is_committed_behind_the_claim_is_taken_along",),
    ),
    Mutant(
        "the newest job of a key by its seq, for the claimed one",
        "outboxq/execution/coalesce.py",
        '            if added_order(newest["headers"], seq) > run.added_order:\n',
        "            if seq > run.seq:\n",
        (f"{_COALESCE}::test_arguments_of_a_run_that_did_not_end_well_never_follow_newer_ones",),
    ),
    Mutant(
        "the newest job of a key by its seq, among those that are taken along",
        "outboxq/statements/coalesce.py",
        'ARRAY[{added_order("gone")}, seq]) AS place\n',
        "ARRAY[seq, seq]) AS place\n",
        (f"{_COALESCE}::test_the_newest_of_the_jobs_that_are_taken_along_is_the_one_that_was_added_last",),
    ),
    Mutant(
        "retries that wait, among the jobs that a run takes along",
        "outboxq/statements/coalesce.py",
        " OR attempt > 0 OR lease_token > 0 OR parked > 0",
        "",
        (f"{_COALESCE}::test_arguments_of_a_run_that_did_not_end_well_never_follow_newer_ones",),
    ),
    Mutant(
        "the token of a job with a key that is put back",
        "outboxq/statements/settle.py",
        "    if claimed.lease_token is None and claimed.unique_key is not None:\n",
        "    if claimed.lease_token is None and claimed.unique_key is None:\n",
        (f"{_COALESCE}::test_arguments_of_a_run_that_did_not_end_well_never_follow_newer_ones",),
    ),
    Mutant(
        "savepoints above what a run takes along",
        "outboxq/execution/claim.py",
        '        return f"RELEASE SAVEPOINT {outer}; SAVEPOINT {outer}; SAVEPOINT {self.inner_savepoint}"\n',
        '        return "SELECT"\n',
        ("tests/flow/test_coalesce.py::test_a_run_that_fails_is_put_back_as_the_newest_job",),
    ),
    Mutant(
        "the window that a run has taken",
        "outboxq/statements/windows.py",
        "  WHERE held.kept_until < excluded.kept_until OR held.job_id",
        "  WHERE true OR held.job_id",
        (f"{_THROTTLE}::test_a_job_that_comes_after_the_run_of_its_window_waits_for_the_next_one",),
    ),
    Mutant(
        "the lock of a window, tried and not waited for",
        "outboxq/statements/windows.py",
        "  WHERE pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext({locks}), pg_catalog.hashtext(key))\n",
        "  WHERE {locks} IS NOT NULL\n",
        (f"{_THROTTLE}::test_a_second_claim_of_a_window_waits_for_the_next_one_while_the_first_runs",),
    ),
    Mutant(
        "the window of the job that has it already",
        "outboxq/statements/windows.py",
        " OR held.job_id = ANY ({claimed}::uuid[])\n",
        "\n",
        (f"{_THROTTLE}::test_a_job_that_is_snoozed_keeps_its_window",),
    ),
    Mutant(
        "the arguments of a newer job that runs, for one that waits for the next window",
        "outboxq/execution/coalesce.py",
        "            is_older = place is not None and job.added_order < tuple(place)\n",
        "            is_older = False\n",
        (f"{_THROTTLE}::test_an_older_job_that_is_put_back_has_the_arguments_of_a_newer_one_that_runs",),
    ),
    Mutant(
        "the newest arguments in the leased row",
        "outboxq/statements/coalesce.py",
        "  WHERE job.id = ANY (ARRAY(SELECT id FROM ours)) AND job.id = ours.id AND",
        "  WHERE false AND job.id = ANY (ARRAY(SELECT id FROM ours)) AND job.id = ours.id AND",
        (f"{_COALESCE}::test_a_leased_row_has_the_newest_arguments_before_its_run_begins",),
    ),
    Mutant(
        "the marks of jobs that were taken along, cleared with a batch that is rolled back",
        "outboxq/execution/batch_state.py",
        "        return (*(job.id for job in self.jobs), *chain.from_iterable(self.stands_for.values()))\n",
        "        return tuple(job.id for job in self.jobs)\n",
        ("tests/flow/test_coalesce.py::test_what_was_taken_along_comes_back_with_a_batch_that_is_rolled_back",),
    ),
    Mutant(
        "batches are looked at before COMMIT",
        "outboxq/execution/callback_batches.py",
        "    def after_commit(self) -> tuple[str, ...]:\n",
        "    def statements(self) -> tuple[str, ...]:\n"
        "        return finish_batches(self.schema, self.ids)[1:-1]\n\n"
        "    def looked(self) -> tuple[str, ...]:\n",
        ("tests/flow/test_batch_scenes.py::test_a_batch_is_looked_at_behind_commit",),
    ),
    Mutant(
        "the rows of the statements in front of one that fails",
        "outboxq/database/driver.py",
        "        return Answer(rows, is_committed, failure, failed_at)\n",
        "        return Answer({} if failure else rows, is_committed, failure, failed_at)\n",
        ("tests/flow/test_unique.py::test_a_claim_that_fails_behind_commit_hides_no_answer",),
    ),
    Mutant(
        "a look at a batch passes over one that another look holds",
        "outboxq/statements/callback_batches.py",
        "  WHERE {wanted}\n",
        "  WHERE id IN (SELECT batch.id FROM {batch} AS batch WHERE {wanted} FOR UPDATE SKIP LOCKED)\n",
        ("tests/flow/test_batch_scenes.py::test_a_look_waits_for_another_one_that_may_roll_back",),
    ),
    Mutant(
        "the sweep of batches",
        "outboxq/relay/maintenance/pruner.py",
        "keys, self._sweep(connection), finished)",
        "keys, 0, finished)",
        ("tests/flow/test_batch_scenes.py::test_the_sweep_comes_to_a_batch_whose_last_member_no_relay_has_ended",),
    ),
    Mutant(
        "a batch waits for the batches whose callbacks are its members",
        "outboxq/statements/callback_batches.py",
        "    AND NOT EXISTS (SELECT FROM {batch} AS nested WHERE nested.parent_id = batch.id)\n",
        "",
        ("tests/outbox/test_callback_batches.py::test_a_nested_batch_holds_its_parent_open",),
    ),
    Mutant(
        "a job that wrote nothing under a lease is followed by the next of its chain",
        "outboxq/execution/settle.py",
        "    if isinstance(result, CancelledResult) or (isinstance(result, Done) and THEN_HEADER in job.headers):\n",
        "    if isinstance(result, CancelledResult):\n",
        ("tests/execution/test_chains.py::test_each_job_of_a_chain_runs_once_behind_the_one_before_it",),
    ),
    Mutant(
        "the guard on each table that users' transactions write on Citus",
        "outboxq/migrations/citus.py",
        "  FOREACH guarded IN ARRAY missing LOOP",
        "  FOREACH guarded IN ARRAY missing[2:] LOOP",
        ("tests/migrations/test_citus.py::test_what_is_missing_of_the_guard_is_put_back",),
    ),
    Mutant(
        "the rights by which any writer fires that guard",
        "outboxq/migrations/citus.py",
        "LANGUAGE plpgsql SECURITY DEFINER\n",
        "LANGUAGE plpgsql\n",
        ("tests/migrations/test_citus.py::test_roles_without_a_right_on_it_fire_the_guard",),
    ),
    Mutant(
        "the refusal of a relay beside distributed tables without that guard",
        "outboxq/relay/startup.py",
        "    if facts.has_citus and not config.allow_one_phase:",
        "    if False:",
        ("tests/relay/test_citus.py::test_a_relay_without_the_guard_does_not_start",),
    ),
    Mutant(
        "the wait of a young job for its rows on Citus",
        "outboxq/execution/preload.py",
        "    if 0 < left_seconds < 2 * _YOUNG_SECONDS:",
        "    if False:",
        ("tests/execution/test_late_rows.py::test_a_young_job_waits_for_its_rows",),
    ),
    Mutant(
        "the choice of the host that takes writes",
        "outboxq/database/engines.py",
        '        defaults["target_session_attrs"] = "read-write"',
        "        pass",
        ("tests/cli/test_read_url.py::test_every_command_takes_the_primary_of_several_hosts",),
    ),
    Mutant(
        "the page after an action, read on the primary",
        "outboxq/dashboard/databases.py",
        "        return replace(self, replica=None)",
        "        return self",
        ("tests/cli/test_read_url.py::test_an_action_is_done_on_the_primary_and_seen_on_the_page_after_it",),
    ),
)


def main(wanted: list[str]) -> int:
    """Run the mutants whose names hold one of the words, or all."""
    mutants = [mutant for mutant in MUTANTS if not wanted or any(word in mutant.name for word in wanted)]
    survivors = 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # Several mutants have the same tests: these run once without a change.
        without: dict[tuple[str, ...], Future[Run]] = {}
        mutated: list[Future[Run]] = []
        for mutant in mutants:
            if mutant.tests not in without:
                without[mutant.tests] = pool.submit(run, mutant.tests)
            mutated.append(pool.submit(run, mutant.tests, mutant))
        for number, (mutant, running) in enumerate(zip(mutants, mutated, strict=True), 1):
            changed, plain = running.result(), without[mutant.tests].result()
            red = plain.code == 0 and changed.code == 1
            survivors += not red
            verdict = "red" if red else "SURVIVED" if plain.code == 0 else "NOT GREEN WITHOUT IT"
            lines = (
                f"{verdict:9} {mutant.name} ({number} of {len(mutants)})",
                f"          without: {plain.said}",
                f"          with:    {changed.said}",
            )
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
    return 1 if survivors else 0


@dataclass(frozen=True)
class Run:
    """One run of a mutant's tests: pytest's exit code (1: tests failed), its closing line, and what failed first."""

    code: int
    said: str


def run(tests: tuple[str, ...], mutant: Mutant | None = None) -> Run:
    """Tests on a copy of this checkout, with a mutant or as it is, up to the first that fails."""
    with tempfile.TemporaryDirectory(prefix="outboxq-mutant-") as directory:
        # The embedded server runs as another user, who reads its binaries where they are installed.
        copy = Path(directory)
        for name in COPIED:
            place = ROOT / name
            if place.is_dir():
                shutil.copytree(place, copy / name)
            else:
                shutil.copy(place, copy / name)
        if mutant is not None:
            apply(mutant, copy)
        begun = time.monotonic()
        # Less patience with a mutant, which may hang its tests.
        limits = ["--maxfail", "1", "--timeout", "300" if mutant is None else "120"]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", *limits, *tests]
        done = subprocess.run(
            command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False
        )
        return Run(done.returncode, f"{_said(done.stdout)} ({time.monotonic() - begun:.0f} s in all)")


def _said(output: str) -> str:
    """The closing line of a run, and the test that failed; the end of its output if there is none."""
    closing = [line for line in output.splitlines() if "passed" in line or "failed" in line]
    if not closing:
        return output[-500:]
    # With its reason: a test that ran into the time-out shows less than one whose assertion failed.
    failed = [line.rpartition("::")[2][:120] for line in output.splitlines() if line.startswith("FAILED ")]
    return "; ".join([re.sub(r" in [0-9.]+s.*", "", closing[-1].strip("= ")), *failed])


def apply(mutant: Mutant, root: Path) -> None:
    """Replace the text, which must stand there once."""
    place = root / mutant.file
    text = place.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its text stands {text.count(mutant.old)} times in {mutant.file}")
    place.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
