"""Take the mechanisms out, one at a time, and see the suite go red.

    python -m tests.faults.mutation_check [NAME ...]
    python -m tests.faults.mutation_check --page       # writes the list in docs/mutants.md

Each mutant is a copy of this checkout with one text replaced. The tests named beside it must be green without the
change and red with it; the script ends with 1 if a mutant survives. Two runs at a time, which mostly wait.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mutants.md"
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


_COALESCE = "tests/coalescing/test_coalesce.py"
_THROTTLE = "tests/coalescing/test_throttle.py"

_TAKEN_OVER = "tests/admin/test_bulk_taken_over.py"
_BULK, _KEPT = "tests/admin/test_bulk.py", "tests/relay/test_dead_letters_kept.py"

_BUDGET = "tests/execution/test_claim_budget.py"
_SUSPECTS = "tests/relay/test_suspect_claims.py"

_PROGRESS = "tests/relay/test_progress.py::"
_WAITS = "tests/outbox/test_results_races.py::test_a_job_that_ends_"

_SAME = "tests/codec/test_sameness.py::test_"

_ENTITIES = "tests/execution/test_job_entities.py::test_"

_CALLS = "tests/relay/test_calls.py::test_"
_WINDOWS = "tests/relay/test_windows.py::test_"

MUTANTS = (
    Mutant(
        "argument comparison",
        "outboxq/codec/parameters.py",
        "        if change is not None:",
        "        if change == '':",
        (f"{_SAME}a_value_that_would_change_is_refused",),
    ),
    Mutant(
        "comparison of all arguments at once",
        "outboxq/codec/parameters.py",
        " or change_of_argument(stored, read) is None",
        " or True",
        (f"{_SAME}any_value_of_any_type_comes_back_or_is_refused",),
    ),
    Mutant(
        "types a call returns intact",
        "outboxq/codec/parameters.py",
        "(*values, *map(type, values.values()))",
        "(*values,)",
        (f"{_SAME}a_call_that_went_well_lets_no_other_one_pass",),
    ),
    Mutant(
        "digits of jsonb exponents",
        "outboxq/codec/sameness.py",
        " if _EXPONENT.search(data) else data",
        " if not data else data",
        (f"{_SAME}what_json_has_no_type_of_is_refused_without_an_annotation",),
    ),
    Mutant(
        "result comparison",
        "outboxq/handlers/returned.py",
        "        if change is not None:",
        "        if change == '':",
        ("tests/execution/test_kept.py::test_a_result_that_would_come_back_changed_fails_its_job_for_good",),
    ),
    Mutant(
        "comparison of a call's result",
        "outboxq/effects/protocol.py",
        "    if change is not None:",
        "    if change == '':",
        ("tests/effects/test_once.py::test_a_result_that_would_come_back_changed_is_not_stored",),
    ),
    Mutant(
        "page count in the page's transaction",
        "outboxq/admin/bulk.py",
        "                connection.execute(statements.count_page(",
        "                with self._begin() as beside: beside.execute(statements.count_page(",
        (f"{_BULK}::test_the_answer_to_commit_is_lost_and_the_audit_is_right",),
    ),
    Mutant(
        "resume number of a bulk change",
        "outboxq/admin/bulk.py",
        "        if row.resumed != self._resumed:",
        "        if row.position != self._position:",
        (f"{_TAKEN_OVER}::test_one_that_was_resumed_elsewhere_ends_wherever_it_is",),
    ),
    Mutant(
        "resume number before noting errors",
        "outboxq/statements/audit.py",
        "audit.c.resumed == resumed, ",
        "",
        (f"{_TAKEN_OVER}::test_one_that_was_resumed_elsewhere_notes_no_error_of_its_own",),
    ),
    Mutant(
        "resumed change waits for marks",
        "outboxq/admin/marks.py",
        "(run is None or _lock(connection, run)) and ",
        "",
        (f"{_TAKEN_OVER}::test_no_job_is_passed_over_because_its_mark_is_cleared",),
    ),
    Mutant(
        "stop of a bulk change",
        "outboxq/admin/bulk.py",
        "        return row.stopped_at is None\n",
        "        return True\n",
        (f"{_BULK}::test_a_run_is_stopped_before_its_next_page",),
    ),
    Mutant(
        "preview's time limit",
        "outboxq/admin/bulk.py",
        "        action = action.until(database_clock(connection))\n",
        "        database_clock(connection)\n",
        (f"{_BULK}::test_a_preview_counts_shows_and_bounds_and_locks_nothing",),
    ),
    Mutant(
        "commit before an irreversible action",
        "outboxq/admin/actions.py",
        "        with begin() as connection:\n            ended =",
        "            ended =",
        ("tests/admin/test_actions.py::test_a_backend_is_ended_only_if_the_audit_says_so",),
    ),
    Mutant(
        "finished audit rows stay unchanged",
        "outboxq/migrations/step_11_history.py",
        "WHEN (OLD.finished_at IS NOT NULL) EXECUTE",
        "WHEN (OLD.id IS NULL) EXECUTE",
        ("tests/admin/test_roles.py::test_what_is_over_in_the_audit_is_rewritten_by_no_one",),
    ),
    Mutant(
        "audit row in the change's transaction",
        "outboxq/admin/actions.py",
        "        self._journal.record(connection, action, target,",
        "        with connection.engine.begin() as connection: self._journal.record(connection, action, target,",
        ("tests/admin/test_actions.py::test_an_action_that_is_rolled_back_has_none",),
    ),
    Mutant(
        "operator's dead letter setting",
        "outboxq/statements/prune.py",
        "FROM {queue_table} AS settings WHERE settings.name = {queue})",
        "FROM {queue_table} AS settings WHERE settings.name = {queue} AND false)",
        (f"{_KEPT}::test_a_setting_that_is_taken_back_holds_for_the_next_deletion",),
    ),
    Mutant(
        "skipping held dead letters",
        "outboxq/statements/prune.py",
        "  FOR UPDATE OF letter SKIP LOCKED\n",
        "  FOR UPDATE OF letter\n",
        (f"{_KEPT}::test_what_another_transaction_holds_is_passed_over",),
    ),
    Mutant(
        "rechecking dead letter age",
        "outboxq/statements/prune.py",
        "  FOR UPDATE OF letter SKIP LOCKED\n",
        "",
        (f"{_KEPT}::test_a_job_that_dies_again_meanwhile_stays",),
    ),
    Mutant(
        "lease in finished rows",
        "outboxq/statements/done.py",
        '+ (_OF_GONE if gone else "")',
        '+ ("" if gone else "")',
        ("tests/execution/test_kept.py::test_a_job_whose_lease_was_lost_is_not_kept",),
    ),
    Mutant(
        "expiry of finished jobs",
        "outboxq/statements/prune.py",
        "  WHERE expires_at < pg_catalog.statement_timestamp(){unless}\n",
        "  WHERE true{unless}\n",
        ("tests/execution/test_kept.py::test_only_rows_whose_time_is_over_are_pruned",),
    ),
    Mutant(
        "finished rows in the transaction",
        "outboxq/execution/commit.py",
        "    riding = steps_of(batch, batch.events, runtime)\n",
        "    riding = steps_of(batch, batch.events, runtime)\n"
        "    with connection.engine.connect() as other, other.begin():\n"
        "        apart = [each for each in riding if each.is_optional and [run_script(other, *each.statements())]]\n"
        "        riding = [step for step in riding if step not in apart]\n",
        ("tests/execution/test_kept.py::test_the_row_goes_back_with_a_refused_commit",),
    ),
    Mutant(
        "rollback of refused finished rows",
        "outboxq/execution/commit.py",
        "refused = next((step for step in steps if step.is_optional and step.name == answer.failed_at), None)",
        "refused = None",
        ("tests/execution/test_kept.py::test_jobs_whose_rows_are_refused_are_done_without",),
    ),
    Mutant(
        "leased jobs without refused rows",
        "outboxq/relay/dispatcher.py",
        "        if settling.keeps and keeper.kinds and keeper.may_be_refusal(error):\n",
        "        if 0 == 1:\n",
        ("tests/execution/test_kept.py::test_jobs_whose_rows_are_refused_are_done_without",),
    ),
    Mutant(
        "wait flag before looking",
        "outboxq/outbox/result_listener.py",
        "        flagged = self._flagged(connection, looked) if self._hears else set[str]()\n",
        "        flagged = looked\n",
        (_WAITS + "between_two_steps_of_a_wait_is_not_missed",),
    ),
    Mutant(
        "notifying waiters",
        "outboxq/execution/keep.py",
        "        if ended:\n",
        "        if ended is None:\n",
        ("tests/outbox/test_results_races.py::test_a_job_that_ends_between_two_steps_of_a_wait_is_not_missed",),
    ),
    Mutant(
        "look after a refused flag",
        "outboxq/outbox/result_listener.py",
        ' for name, is_held in rows if is_held == "t"}',
        " for name, is_held in rows}",
        ("tests/outbox/test_results_races.py::test_a_wait_that_meets_a_commit_on_its_way_looks_behind_it",),
    ),
    Mutant(
        "look after reconnecting",
        "outboxq/outbox/result_listener.py",
        "        self._due = set(self._waits)\n",
        "",
        ("tests/outbox/test_results_races.py::test_a_connection_that_is_lost_is_made_anew_and_looks",),
    ),
    Mutant(
        "end of progress notes",
        "outboxq/execution/batch_state.py",
        "            call.notes.clear([job.id for job in call.jobs])\n",
        "            pass\n",
        (_PROGRESS + "test_a_note_is_seen_while_the_handlers_transaction_is_open",),
    ),
    Mutant(
        "pause between progress writes",
        "outboxq/relay/progress.py",
        "                self._changed.wait_for(lambda: self._stopping, _WRITE_SECONDS)\n",
        "                pass\n",
        (_PROGRESS + "test_of_many_notes_the_newest_is_written_and_few_are",),
    ),
    Mutant(
        "attempt of a note",
        "outboxq/statements/progress.py",
        "  WHERE known.attempt <= excluded.attempt\n",
        "  WHERE true\n",
        (_PROGRESS + "test_an_older_attempt_does_not_write_over_a_newer_one",),
    ),
    Mutant(
        "flush number in relay row",
        "outboxq/statements/history.py",
        "WHERE id = {owner} AND flush < {flush} RETURNING 1",
        "WHERE id = {owner} RETURNING 1",
        ("tests/observability/test_flush.py",),
    ),
    Mutant(
        "counts after a doubtful flush",
        "outboxq/observability/flush.py",
        "            if self._is_registered and (self._aggregate.is_empty or not counts):\n",
        "            if self._is_registered:\n",
        ("tests/observability/test_flush.py::test_what_was_counted_behind_a_doubt_is_flushed_at_the_end",),
    ),
    Mutant(
        "flush number in a ledger",
        "outboxq/statements/history.py",
        "WHERE id = {owner} AND flush < {flush} RETURNING 1",
        "WHERE id = {owner} RETURNING 1",
        ("tests/observability/test_history_ledger.py::test_without_kills_the_history_is_the_ledger",),
    ),
    Mutant(
        "last flush of history",
        "outboxq/relay/maintenance/historian.py",
        "        self._finish()\n",
        "",
        ("tests/observability/test_history.py::test_a_relay_that_is_told_to_stop_loses_nothing",),
    ),
    Mutant(
        "pending counts after lost answers",
        "outboxq/observability/flush.py",
        "        if self._pending is None:\n",
        "        if True:\n",
        ("tests/observability/test_flush.py",),
    ),
    Mutant(
        "deleting minutes after an hour",
        "outboxq/statements/history.py",
        "  DELETE FROM {stat} WHERE grain = 60 AND at >= {hour}::timestamptz AND at < {hour}::timestamptz "
        "+ interval '1 hour'\n  RETURNING *\n",
        "  SELECT * FROM {stat} WHERE grain = 60 AND at >= {hour}::timestamptz AND at < {hour}::timestamptz "
        "+ interval '1 hour'\n",
        ("tests/observability/test_history.py::test_minutes_become_hours_and_every_number_stands_once",),
    ),
    Mutant(
        "one writer of gauges",
        "outboxq/statements/history.py",
        "  AND NOT EXISTS (SELECT FROM {gauge}\n",
        "  OR NOT EXISTS (SELECT FROM {gauge}\n",
        ("tests/observability/test_history.py::test_one_relay_writes_the_gauges_of_a_minute",),
    ),
    Mutant(
        "taken counts in totals",
        "outboxq/observability/aggregate.py",
        "            _add_all(self._taken, taken)\n",
        "",
        ("tests/observability/test_metrics_counting.py",),
    ),
    Mutant(
        "counts of killed processes",
        "outboxq/relay/metrics.py",
        "                    self._ended[child.database].merge(child.last, without_gauges=True)\n",
        "                    pass\n",
        ("tests/observability/test_metrics_relay.py::test_counters_never_fall_when_processes_are_killed",),
    ),
    Mutant(
        "zeros of an idle queue",
        "outboxq/observability/metrics/tables.py",
        "    for name in sorted({*found, *look.serving}):\n",
        "    for name in sorted(found):\n",
        ("tests/observability/test_metrics_tables.py::test_a_queue_that_is_only_served_has_its_zeros",),
    ),
    Mutant(
        "cutting endless metrics clients",
        "outboxq/observability/metrics/server.py",
        "        ends.start()\n",
        "",
        ("tests/observability/test_metrics_relay.py::test_a_client_that_never_ends_its_request_is_cut_off",),
    ),
    Mutant(
        "relay clock against database clock",
        "outboxq/clock.py",
        "        self.ahead_seconds = database_seconds - (asked_at + answered_at) / 2\n",
        "",
        ("tests/relay/test_event_times.py",),
    ),
    Mutant(
        "time shared by a batch",
        "outboxq/execution/run.py",
        "    seconds = batch.running.seconds / len(segment.places)\n",
        "    seconds = batch.running.seconds\n",
        ("tests/relay/test_event_times.py",),
    ),
    Mutant(
        "time of attempts failing at COMMIT",
        "outboxq/execution/commit.py",
        "settle_result(connection, batch.job, failed, runtime, batch.running.seconds)",
        "settle_result(connection, batch.job, failed, runtime, 0.0)",
        ("tests/relay/test_event_times.py",),
    ),
    Mutant(
        "waiting for entity keys",
        "outboxq/outbox/pending.py",
        "    if has_entities:\n        vars(session)",
        "    if False:\n        vars(session)",
        ("tests/outbox/test_enqueue_flush_keys.py",),
    ),
    Mutant(
        "flush that only writes jobs",
        "outboxq/outbox/pending.py",
        "            context.register_object(instance_state(batch), listonly=True)\n",
        "            pass\n",
        ("tests/outbox/test_enqueue_flush_keys.py",),
    ),
    Mutant(
        "refusing jobs of deleted entities",
        "outboxq/new_job.py",
        "        if argument.is_deleted() and not argument.optional:\n",
        "        if False:\n",
        ("tests/outbox/test_enqueue_flush_keys.py",),
    ),
    Mutant(
        "events of undone savepoints",
        "outboxq/outbox/sending_events.py",
        '        event.listen(session, "after_soft_rollback", _after_rollback)\n',
        "",
        ("tests/outbox/test_told.py",),
    ),
    Mutant(
        "inbox events wait for COMMIT",
        "outboxq/inbox.py",
        'if outcome == "accepted" and isinstance(target, Session):',
        "if False:",
        ("tests/outbox/test_told.py",),
    ),
    Mutant(
        "handlers' sessions emit no events",
        "outboxq/relay/connections.py",
        '{"isolation_level": "READ COMMITTED", HOOKS_OPTION: ()}',
        '{"isolation_level": "READ COMMITTED"}',
        ("tests/outbox/test_told.py",),
    ),
    Mutant(
        "groups in counting",
        "outboxq/statements/stats.py",
        """    ("grouped", "listed.group_key IS NOT NULL AND listed.state <> 'group_waiting'", ("queue",)),\n""",
        "",
        ("tests/admin/test_stats.py",),
    ),
    Mutant(
        "row lock of schedules",
        "outboxq/statements/schedules.py",
        "        .with_for_update(skip_locked=True)\n",
        "",
        ("tests/schedules/test_under_kills.py::test_two_relays_at_the_same_moment_fire_once",),
    ),
    Mutant(
        "next time from the last",
        "outboxq/relay/maintenance/scheduler.py",
        '    behind = last if last is not None and stored.schedule.missed == "all" else now\n',
        "    behind = now\n",
        ("tests/schedules/test_scheduler.py::test_a_long_backlog_comes_in_pieces",),
    ),
    Mutant(
        "order in the repeated hour",
        "outboxq/cron.py",
        "            if due > last:\n                yield due\n                last = due\n",
        "            yield due\n            last = due\n",
        ("tests/schedules/test_cron.py::test_in_the_hour_that_comes_twice_nothing_is_due_in_the_past",),
    ),
    Mutant(
        "when schedules are recomputed",
        "outboxq/statements/schedules.py",
        "    return and_(schedule.c.next_at > next_at, next_at > _CLOCK, not_fired)\n",
        "    return schedule.c.next_at > next_at\n",
        ("tests/schedules/test_public.py",),
    ),
    Mutant(
        "owner of a schedule",
        "outboxq/statements/schedules.py",
        "        allowed.append(or_(schedule.c.owner.is_(None), schedule.c.owner == new.excluded.owner))\n",
        "",
        ("tests/schedules/test_owners.py::test_a_name_that_another_registry_declares_is_refused",),
    ),
    Mutant(
        "disabled against paused schedules",
        "outboxq/statements/schedules.py",
        'IS_DISABLED = func.coalesce(schedule.c.paused_at == _DISABLED_AT, literal_column("false"))\n',
        "IS_DISABLED = _DISABLED_AT.is_not(None)\n",
        ("tests/schedules/test_owners.py::test_an_operators_pause_stays_whatever_the_code_does",),
    ),
    Mutant(
        "clock changes in cron walks",
        "outboxq/cron.py",
        "                changed = self._change(last, due)\n",
        "                changed = None\n",
        ("tests/schedules/test_clocks.py",),
    ),
    Mutant(
        "savepoint per fired schedule",
        "outboxq/relay/maintenance/scheduler.py",
        "                with connection.begin_nested():\n                    tick.fired += _fire(connection, row)\n",
        "                tick.fired += _fire(connection, row)\n",
        ("tests/schedules/test_scheduler.py::test_a_schedule_that_cannot_be_fired_holds_no_other_up",),
    ),
    Mutant(
        "MATERIALIZED claim",
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
        "slots of a limit",
        "outboxq/statements/limit.py",
        "  WHERE pg_catalog.pg_try_advisory_xact_lock(",
        "  WHERE 0 = 0 OR pg_catalog.pg_try_advisory_xact_lock(",
        ("tests/limits/test_limits.py::test_no_more_jobs_run_than_the_limit_allows",),
    ),
    Mutant(
        "lock of counting claims",
        "outboxq/statements/claim.py",
        '        lock = tuple(("lock", statement) for statement in lock_claims(schema, queue)) if counts else ()\n',
        "        lock = ()\n",
        ("tests/limits/test_limits.py::test_a_claim_under_a_lease_waits_for_the_count_of_the_one_before",),
    ),
    Mutant(
        "room in a limited claim",
        "outboxq/statements/claim.py",
        "LIMIT coalesce((SELECT free FROM room), 0)",
        "LIMIT (SELECT 1000 FROM room)",
        ("tests/limits/test_limits.py::test_a_claim_under_a_lease_takes_as_many_jobs_as_there_is_room_for",),
    ),
    Mutant(
        "argument budget of a claim",
        "outboxq/statements/claim.py",
        " AS sized LIMIT {budget}",
        " AS sized",
        (_BUDGET,),
    ),
    Mutant(
        "cursor after a budgeted claim",
        "outboxq/statements/claim.py",
        ">= {budget} THEN 0 END",
        "< 0 THEN 0 END",
        (_BUDGET,),
    ),
    Mutant(
        "no crash in company",
        "outboxq/statements/claim.py",
        "    is_crash = sort in (_SUSPECT, _ALONE)\n",
        "    is_crash = sort in (_SUSPECT, _ALONE, _IN_COMPANY)\n",
        (_SUSPECTS,),
    ),
    Mutant(
        "second death runs alone",
        "outboxq/statements/claim.py",
        "')) < 2\"",
        "')) < 99\"",
        (f"{_SUSPECTS}::test_a_job_that_kills_each_relay_runs_in_company_once",),
    ),
    Mutant(
        "suspect sort in group claims",
        "outboxq/statements/group_claim.py",
        "'group_suspect'{of_sort}\"",
        "'group_suspect'\"",
        (f"{_SUSPECTS}::test_a_suspect_that_comes_first_in_a_locked_group_is_taken_by_the_claim_of_its_sort",),
    ),
    Mutant(
        "room in group claims",
        "outboxq/statements/group_claim.py",
        '"least({limit}, (SELECT free FROM room))"',
        '"{limit}"',
        ("tests/limits/test_limits.py::test_a_claim_under_a_lease_takes_as_many_jobs_as_there_is_room_for",),
    ),
    Mutant(
        "yielding to a blocking claim",
        "outboxq/relay/rolled_back.py",
        "    if request.script.lock and sqlstate_of(error) == LOCK_NOT_AVAILABLE:\n",
        "    if 0 == 1:\n",
        ("tests/limits/test_limits.py::test_a_claim_under_a_lease_that_another_one_holds_up_gives_way",),
    ),
    Mutant(
        "limit slot for a suspect",
        "outboxq/relay/admission.py",
        "    if run_script(connection, *timeouts, take_slot(schema, request.queue, most))[0][0]:\n",
        "    if 0 == 0:\n",
        ("tests/limits/test_limits.py::test_a_suspect_waits_for_a_slot_and_nothing_is_counted",),
    ),
    Mutant(
        "room made by ended jobs",
        "outboxq/relay/planner.py",
        "            self._admission.ended(request.queue, ended.claimed)\n",
        "            pass\n",
        ("tests/relay/test_following.py::test_jobs_that_end_make_room_for_another_slot_unless_their_own_takes_it",),
    ),
    Mutant(
        "deadline after jobs run alone",
        "outboxq/execution/run.py",
        "        _set_timeout(connection, batch, longest, shared=True)\n",
        "        pass\n",
        (
            "tests/execution/test_batch_handlers.py::test_the_deadline_of_jobs_that_ran_alone_is_none_of_those_that_run_together",
        ),
    ),
    Mutant(
        "batch still belongs to slot",
        "outboxq/execution/run.py",
        "    batch.begin(connection)\n    batch.late_result = None\n",
        "    if batch.transaction is None:\n        batch.begin(connection)\n    batch.late_result = None\n",
        ("tests/relay/test_seized.py",),
    ),
    Mutant(
        "turns of job sorts",
        "outboxq/relay/planner.py",
        "        self._taken = sort\n",
        "        self._taken = None\n",
        ("tests/relay/test_planner.py::test_due_jobs_have_their_turn_at_a_queue_that_is_held_for_its_rate",),
    ),
    Mutant(
        "tokens before a claim",
        "outboxq/relay/admission.py",
        "        if self._shared.flow.limits_of(queue).rate_jobs is None:\n",
        "        if 0 == 0:\n",
        ("tests/limits/test_rates.py::test_jobs_begin_at_the_rate_of_their_queue",),
    ),
    Mutant(
        "jobs other transactions run",
        "outboxq/statements/rate.py",
        '"job.xmax = ANY (ARRAY(SELECT transactionid FROM open))"',
        '"false"',
        ("tests/limits/test_rates.py::test_a_job_that_another_transaction_runs_costs_no_token",),
    ),
    Mutant(
        "limit checked before taking tokens",
        "outboxq/relay/admission.py",
        "asked, limited)\n",
        "asked, None)\n",
        ("tests/limits/test_rates.py::test_a_full_limit_costs_no_tokens",),
    ),
    Mutant(
        "tokens of a late claim",
        "outboxq/relay/admission.py",
        "            hand.tokens, hand.used, hand.is_fresh = hand.tokens + tokens, 0, True\n",
        "            hand.tokens, hand.used, hand.is_fresh = hand.tokens + tokens, 0, False\n",
        ("tests/limits/test_rates.py::test_the_claim_behind_a_reservation_has_its_tokens_however_late_it_comes",),
    ),
    Mutant(
        "leftover tokens of empty claims",
        "outboxq/relay/admission.py",
        "            self._are_left = True\n",
        "",
        ("tests/limits/test_rates.py::test_a_claim_that_finds_nothing_leaves_its_token_to_the_next",),
    ),
    Mutant(
        "token returned during a hold",
        "outboxq/relay/admission.py",
        "as `give_back` does.\n            self.release_tokens(queue)\n",
        "as `give_back` does.\n",
        ("tests/limits/test_rates.py::test_a_token_that_comes_back_ends_the_hold_of_a_slot_that_found_none",),
    ),
    Mutant(
        "index order for rates",
        "outboxq/statements/rate.py",
        "(*BY_INDEX, ",
        "(*BY_INDEX[:1], ",
        ("tests/limits/test_rates.py::test_a_look_at_many_jobs_reads_no_more_than_it_asks_for",),
    ),
    Mutant(
        "token in completion",
        "outboxq/statements/settle.py",
        "    return delete(job).where(job.c.id == claimed.id, job.c.lease_token == claimed.lease_token)\n",
        "    return delete(job).where(job.c.id == claimed.id)\n",
        ("tests/relay/test_lease.py",),
    ),
    Mutant(
        "checked commit",
        "outboxq/execution/commit.py",
        'script = Script([("check", check), ("check", "SET CONSTRAINTS ALL IMMEDIATE")])',
        'script = Script([("check", "COMMIT"), ("check", f"SELECT {len(check)}")])',
        ("tests/execution/test_containment.py",),
    ),
    Mutant(
        "columns a producer may write",
        "outboxq/admin/roles.py",
        "AND attname = ANY ({columns}) AND NOT attisdropped\n",
        "AND attnum > 0 AND {columns} IS NOT NULL AND NOT attisdropped\n",
        ("tests/admin/test_role_matrix.py",),
    ),
    Mutant(
        "revoking the old wider right",
        "outboxq/admin/roles.py",
        "      REVOKE {right} ON {table} FROM {role};\n",
        "",
        ("tests/admin/test_roles.py",),
    ),
    Mutant(
        "rights of relay plus producer",
        "outboxq/admin/roles.py",
        "    IF NOT has_table_privilege({role_literal}, {table_literal}, 'DELETE') AND EXISTS (\n",
        "    IF EXISTS (\n",
        ("tests/admin/test_roles.py",),
    ),
    Mutant(
        "withheld messages when settling",
        "outboxq/execution/settle.py",
        "    result = runtime.redacted(job, result)\n    match result:\n",
        "    match result:\n",
        ("tests/execution/test_withheld.py",),
    ),
    Mutant(
        "hidden errors searched for quotes",
        "outboxq/execution/failure.py",
        "(original_of(each), _CAUSE.__get__(each), _CONTEXT.__get__(each), *_members(each)[:_LONGEST_CHAIN])",
        "(original_of(each), _CAUSE.__get__(each), *_members(each)[:_LONGEST_CHAIN])",
        ("tests/execution/test_redaction.py",),
    ),
    Mutant(
        "dropping tracebacks after hooks",
        "outboxq/emitter.py",
        '        _OF_EXCEPTIONS["__traceback__"].__set__(each, None)\n',
        "",
        ("tests/execution/test_exceptions_told.py",),
    ),
    Mutant(
        "unlocked changes checked at flush",
        "outboxq/execution/invoke.py",
        "            self.look()\n        super().flush(objects)\n",
        "            pass\n        super().flush(objects)\n",
        ("tests/handlers/test_unlocked.py",),
    ),
    Mutant(
        "living relays in lease state",
        "outboxq/statements/jobs.py",
        "is_alive = func.coalesce(jobs.c.lease_owner.in_(alive), false())",
        "is_alive = jobs.c.lease_owner.is_not(None)",
        ("tests/cli/test_names.py",),
    ),
    Mutant(
        "one notification for many queues",
        "outboxq/outbox/insert.py",
        '    if wakes == "all" and was != "off":\n',
        "    if False:\n",
        ("tests/relay/test_wake.py",),
    ),
    Mutant(
        "distrust of older polls",
        "outboxq/relay/poller.py",
        "max(after.number, self._all_called_after)\n",
        "after.number\n",
        ("tests/relay/test_wake.py",),
    ),
    Mutant(
        "sweep from the queue's front",
        "outboxq/relay/queue_claims.py",
        "        if time.monotonic() >= self._sweep.due_at and self._sweep.take_turn():\n",
        "        if self._cursor is None:\n",
        ("tests/relay/test_following.py",),
    ),
    Mutant(
        "pauses for row statistics",
        "outboxq/relay/planner.py",
        " or now > self._counts_due_at:\n",
        ":\n",
        ("tests/relay/test_following.py",),
    ),
    Mutant(
        "COMMIT tag before an error",
        "outboxq/database/driver.py",
        "        return Answer(rows, is_committed, failure, failed_at)\n",
        "        return Answer(rows, is_committed and failure is None, failure, failed_at)\n",
        ("tests/database/test_script.py::test_answers_before_a_failure_are_kept", "tests/relay/test_following.py"),
    ),
    Mutant(
        "earlier leftovers sent first",
        "outboxq/execution/shared_batch.py",
        "(None,) if writes is None else writes)\n        self._catch_up()\n",
        "(None,) if writes is None else writes)\n",
        ("tests/execution/test_shared_batches.py::test_stale_rows_are_loaded_again_after_a_handlers_own_statement",),
    ),
    Mutant(
        "detecting a closed session",
        "outboxq/execution/shared_batch.py",
        "if changes is not None and session.in_transaction():",
        "if changes is not None:",
        ("tests/execution/test_shared_batches.py::test_a_handler_that_closes_its_session_fails_as_it_does_alone",),
    ),
    Mutant(
        "assuming the worst of unread statements",
        "outboxq/execution/shared_batch.py",
        "            contain(error)\n",
        "            raise\n",
        (
            "tests/execution/test_shared_batches_watched.py::test_a_defect_of_what_watches_is_logged_once_and_no_handler_meets_it",
        ),
    ),
    Mutant(
        "statement parts without truth value",
        "outboxq/handlers/row_writes.py",
        "any(isinstance(part, ClauseElement) or part for part in others)",
        "any(others)",
        ("tests/execution/test_shared_batches_watched.py::test_every_statement_is_sent_and_leaves_the_batch_shared",),
    ),
    Mutant(
        "joining a preloaded session",
        "outboxq/execution/read_rows.py",
        "    session.connection()\n",
        "",
        ("tests/execution/test_rolled_back.py::test_a_session_that_was_given_rows_has_begun_on_the_connection",),
    ),
    Mutant(
        "check for statement listeners",
        "outboxq/database/direct.py",
        "        and len([*heard.before_cursor_execute]) == 1\n",
        "",
        ("tests/execution/test_lone_rows.py::test_where_somebody_listens_sqlalchemy_reads_and_writes",),
    ),
    Mutant(
        "transaction state before reading rows",
        "outboxq/database/guard.py",
        "        return is_open and (inner is None or inner.is_active) and (own is None or own.is_active)\n",
        "        return True\n",
        ("tests/execution/test_lone_rows.py::test_a_row_is_not_read_in_a_transaction_that_an_around_has_ended",),
    ),
    Mutant(
        "columns with foreign references",
        "outboxq/execution/write_buffer.py",
        " and column not in referred",
        "",
        ("tests/execution/test_lone_rows.py::test_a_change_that_others_refer_to_is_left_to_sqlalchemy",),
    ),
    Mutant(
        "rollback after failed changes",
        "outboxq/execution/write_buffer.py",
        "            session.rollback()\n",
        "            pass\n",
        ("tests/execution/test_lone_rows.py::test_a_failed_update_ends_as_a_failed_flush",),
    ),
    Mutant(
        "new jobs before changes",
        "outboxq/execution/write_buffer.py",
        "    if changes and write_plain_jobs(session, connection):",
        "    if False:",
        ("tests/execution/test_lone_rows.py::test_new_jobs_are_written_before_changes",),
    ),
    Mutant(
        "second look at changes",
        "outboxq/execution/write_buffer.py",
        "        # The flush may have run users' code.\n        changes = _few_changes(session, connection)\n",
        "        pass\n",
        ("tests/execution/test_lone_rows.py::test_a_change_that_is_made_while_new_jobs_are_written_is_written_too",),
    ),
    Mutant(
        "renaming unreadable parameters",
        "outboxq/database/direct.py",
        "for name, value in values.items()} if named else values",
        "for name, value in values.items()} if False else values",
        ("tests/handlers/test_set_based.py::test_parameters_may_have_names_that_the_driver_cannot_read",),
    ),
    Mutant(
        "counting changed rows",
        "outboxq/execution/write_buffer.py",
        "    if found != len(ordered):\n",
        "    if False:\n",
        ("tests/execution/test_lone_rows.py::test_errors_are_sqlalchemys",),
    ),
    Mutant(
        "row lock order alone",
        "outboxq/execution/write_buffer.py",
        'found, ordered = 0, sorted(changes, key=attrgetter("row"))\n',
        'found, ordered = 0, sorted(changes, key=attrgetter("row"), reverse=True)\n',
        ("tests/execution/test_lone_rows.py::test_rows_are_locked_in_the_order_of_their_keys",),
    ),
    Mutant(
        "mixed changes left to SQLAlchemy",
        "outboxq/execution/write_buffer.py",
        "    return len({id(change.statement) for change in changes}) <= 1 and len(changes)",
        "    return len(changes)",
        ("tests/execution/test_lone_rows.py::test_changes_of_several_forms_are_sent_in_sqlalchemys_order",),
    ),
    Mutant(
        "opening a session when touched",
        "outboxq/execution/job_entities.py",
        '        _vars(self)["outboxq_reach"]()\n        return object.__getattribute__(self, name)\n',
        "        return object.__getattribute__(self, name)\n",
        (f"{_ENTITIES}a_session_that_is_reached_is_open",),
    ),
    Mutant(
        "opening a session through its hash",
        "outboxq/execution/job_entities.py",
        '        _vars(self)["outboxq_reach"]()\n        return object.__hash__(self)\n',
        "        return object.__hash__(self)\n",
        (f"{_ENTITIES}a_session_that_is_reached_is_open",),
    ),
    Mutant(
        "entities of a late session",
        "outboxq/execution/invoke.py",
        "                    entities.move_to(made)\n",
        "                    pass\n",
        (f"{_ENTITIES}a_session_that_is_reached_is_open",),
    ),
    Mutant(
        "detaching entities without a session",
        "outboxq/execution/job_entities.py",
        "                state.session_id = state._strong_obj = None",
        "                state._strong_obj = None",
        (f"{_ENTITIES}entities_are_detached_behind_their_job",),
    ),
    Mutant(
        "breaking a late session's cycle",
        "outboxq/execution/job_entities.py",
        '            _vars(self._unopened).pop("outboxq_reach", None)\n',
        "            pass\n",
        (f"{_ENTITIES}a_session_that_was_opened_late_goes_with_its_job",),
    ),
    Mutant(
        "refusal of late session opening",
        "outboxq/execution/invoke.py",
        "            if self.is_over:\n                raise",
        "            if False:\n                raise",
        (f"{_ENTITIES}a_session_that_was_not_looked_at_in_time_cannot_be_opened",),
    ),
    Mutant(
        "waiting for a session opening",
        "outboxq/execution/invoke.py",
        "        self.lock = threading.RLock()\n",
        '        self.lock = __import__("contextlib").nullcontext()\n',
        (f"{_ENTITIES}a_thread_that_is_left_and_looks_takes_no_change_along",),
    ),
    Mutant(
        "error of an unopened session",
        "outboxq/execution/invoke.py",
        "                self.failed = None if entities is None else error\n",
        "                self.failed = None\n",
        (f"{_ENTITIES}a_job_whose_session_could_not_be_opened_is_not_done",),
    ),
    Mutant(
        "no session after the handler",
        "outboxq/execution/invoke.py",
        "if self.made is None and self._runtime.invoker.has_ended:",
        "if False:",
        (f"{_ENTITIES}a_task_that_is_left_does_not_open_the_session",),
    ),
    Mutant(
        "handler's listeners on all sessions",
        "outboxq/execution/job_entities.py",
        "        if is_class_listened_to(HandlerSession, _WHILE_OPEN):\n",
        "        if False:\n",
        (f"{_ENTITIES}listeners_on_all_sessions_are_told",),
    ),
    Mutant(
        "existing listeners on all sessions",
        "outboxq/execution/job_entities.py",
        "    if opened.made is not None or is_class_listened_to(HandlerSession, _WHILE_OPEN):\n",
        "    if opened.made is not None:\n",
        (f"{_ENTITIES}listeners_on_all_sessions_are_told",),
    ),
    Mutant(
        "listeners of one session",
        "outboxq/database/session_listeners.py",
        "    if found != _of_class(kind, events)[0]:\n",
        "    if False:\n",
        ("tests/execution/test_lone_rows.py::test_a_listener_on_the_session_is_told_of_its_flush",),
    ),
    Mutant(
        "rollback noted without statements",
        "outboxq/execution/invoke.py",
        "        session.is_rolled_back = True\n",
        "        pass\n",
        (
            "tests/execution/test_rolled_back.py::test_a_session_that_was_rolled_back_fails_its_job_although_nothing_was_sent",
        ),
    ),
    Mutant(
        "job's own connection options",
        "outboxq/execution/shared_batch.py",
        " or not guard.has_own_options\n",
        "\n",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_rows_are_written_to_the_schema_that_the_job_chose",
        ),
    ),
    Mutant(
        "relay's own connection options",
        "outboxq/database/guard.py",
        "connection._execution_options, self._options  # noqa",
        "connection._execution_options, connection._execution_options  # noqa",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_rows_are_written_to_the_schema_that_the_job_chose",
        ),
    ),
    Mutant(
        "other engines of a session",
        "outboxq/execution/shared_batch.py",
        "is_own = uses_only(session, self._connection)\n",
        "is_own = True\n",
        ("tests/execution/test_shared_batches_surroundings.py::test_rows_of_another_engine_are_committed_there",),
    ),
    Mutant(
        "schema named by a statement",
        "outboxq/handlers/row_writes.py",
        'return "schema_translate_map" in statement.get_execution_options()',
        "return False",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_a_statement_that_names_its_schema_is_judged_by_that_table",
        ),
    ),
    Mutant(
        "settings that change table names",
        "outboxq/database/guard.py",
        "        self.is_altered = True\n        try:\n",
        "        try:\n",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_what_is_known_of_tables_is_not_of_another_search_path",
        ),
    ),
    Mutant(
        "process-computed values in defer",
        "outboxq/handlers/deferred.py",
        '    return only_writes(statement) or _not_fixed("it does more than write plain values into one table")\n',
        "    return True\n",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_what_the_process_computes_for_a_deferred_write_is_computed_in_its_own_job",
        ),
    ),
    Mutant(
        "check after unknown functions",
        "outboxq/execution/write_buffer.py",
        "    if _calls_others(compiled.string):\n",
        "    if not compiled:\n",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_a_function_that_breaks_a_deferred_constraint_costs_its_own_job",
        ),
    ),
    Mutant(
        "key a flush looks for",
        "outboxq/execution/write_buffer.py",
        "if values is None or not _has_its_key(state, writable):",
        "if values is None:",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_a_key_that_was_set_behind_sqlalchemys_back_is_where_a_flush_writes",
        ),
    ),
    Mutant(
        "listeners on a job's connection",
        "outboxq/database/guard.py",
        "if self._connection._has_events is not _HEARD_BY_US and self.left is None:",
        "if False:",
        (
            "tests/execution/test_shared_batches_surroundings.py::test_a_listener_on_the_connection_hears_nothing_of_the_next_job",
        ),
    ),
    Mutant(
        "excusing jobs with held rows",
        "outboxq/relay/rolled_back.py",
        "            state.lease.excuse(batch.job)\n",
        "            pass\n",
        ("tests/execution/test_row_held.py::test_a_job_whose_row_is_held_time_after_time_is_never_buried",),
    ),
    Mutant(
        "locked rows when settling",
        "outboxq/relay/dispatcher.py",
        "many.add_to(script, server, keep=settling.keeps)\n",
        "many.add_to(script, server, keep=settling.keeps, free=False)\n",
        ("tests/execution/test_row_held.py::test_the_row_of_a_job_that_wrote_nothing_holds_no_slot_up",),
    ),
    Mutant(
        "when cancellation is too late",
        "outboxq/execution/leased_call.py",
        "        self._may_be_cancelled = is_needed\n",
        "",
        ("tests/relay/test_dispatcher.py::test_a_cancellation_that_comes_when_no_connection_is_needed_is_too_late",),
    ),
    Mutant(
        "connection for follow-up statements",
        "outboxq/execution/leased_call.py",
        "or is_followed or self._call.is_cancelled or bool(self._run.deferred)\n",
        "or self._call.is_cancelled\n",
        ("tests/relay/test_dispatcher.py::test_what_follows_a_call_that_left_its_session_alone_has_a_connection",),
    ),
    Mutant(
        "greenlet for a repeated call",
        "outboxq/execution/leased_call.py",
        "        is_needed = has_failed or has_written",
        "        is_needed = has_written",
        (f"{_CALLS}a_conflict_is_tried_again_at_once_with_the_variables_from_before",),
    ),
    Mutant(
        "variables before the first try",
        "outboxq/relay/calls.py",
        "        self._async_invoker.base = context.copy()\n",
        "",
        (f"{_CALLS}a_conflict_is_tried_again_at_once_with_the_variables_from_before",),
    ),
    Mutant(
        "end of handler in its context",
        "outboxq/execution/leased_call.py",
        "        self._ended[:] = [(None, None)]\n",
        "        self._ended.clear()\n",
        (f"{_CALLS}a_task_that_was_left_behind_gets_no_session_of_a_call_that_is_settled",),
    ),
    Mutant(
        "cancelling between a call's tasks",
        "outboxq/relay/calls.py",
        "which frees the slot.\n            task.cancel()\n",
        "which frees the slot.\n            pass\n",
        (f"{_CALLS}a_call_that_is_abandoned_between_its_handler_and_what_follows_waits_for_nothing",),
    ),
    Mutant(
        "cancelling a starting call",
        "outboxq/relay/calls.py",
        "found no task yet.\n            task.cancel()\n",
        "found no task yet.\n            pass\n",
        (f"{_CALLS}a_call_that_is_abandoned_as_it_starts_has_no_run",),
    ),
    Mutant(
        "watching user code outside tasks",
        "outboxq/relay/watch.py",
        "        return self.is_outside or any(",
        "        return any(",
        (f"{_CALLS}users_code_that_runs_before_the_handler_s_task_is_seen_to_run",),
    ),
    Mutant(
        "results after a refused claim",
        "outboxq/relay/dispatcher.py",
        "                self._settle_and_claim(connection, settling, None)\n"
        "                return self._settle_and_claim(connection, settling.without(), request)\n"
        "            if not answer.is_committed or",
        "                return self._settle_and_claim(connection, settling.without(), request)\n"
        "            if not answer.is_committed or",
        ("tests/relay/test_dispatcher.py::test_a_claim_that_fails_behind_a_settlement_undoes_nothing",),
    ),
    Mutant(
        "results and claim in one transaction",
        "outboxq/relay/dispatcher.py",
        "        is_one = request is not None and not",
        "        is_one = False and not",
        ("tests/relay/test_dispatcher.py::test_results_and_the_next_claim_are_one_transaction",),
    ),
    Mutant(
        "lost prepared settlement",
        "outboxq/relay/dispatcher.py",
        "if prepared is not None and server.claims.failed(answer.error, prepared):",
        "if False:",
        ("tests/relay/test_dispatcher.py::test_results_and_the_next_claim_are_one_transaction",),
    ),
    Mutant(
        "looking for jobs after settling",
        "outboxq/relay/dispatcher.py",
        "            self._is_called |= job.group_key",
        "            False and job.group_key",
        ("tests/relay/test_dispatcher_ends.py::test_the_next_job_of_a_group_and_a_job_that_comes_back_need_no_poll",),
    ),
    Mutant(
        "looking again after a cut-off",
        "outboxq/relay/calls.py",
        "            self._owner.may_wait()\n",
        "            pass\n",
        ("tests/relay/test_dispatcher_ends.py::test_a_job_whose_call_was_cut_off_comes_back_without_a_poll",),
    ),
    Mutant(
        "slot of an uncancellable call",
        "outboxq/relay/calls.py",
        "        call_soon(self._loop, super().abandon)\n",
        "",
        ("tests/faults/test_deadlines.py::test_a_lease_is_no_way_around_the_deadline",),
    ),
    Mutant(
        "drain round after returned tokens",
        "outboxq/relay/last_jobs.py",
        "        return any(given_back_at.get(name, 0.0) >= began_at for name in self.queues)\n",
        "        return False\n",
        ("tests/limits/test_rates.py::test_a_drain_goes_on_after_a_hold_that_came_and_went_in_its_last_round",),
    ),
    Mutant(
        "one report of refused rows",
        "outboxq/execution/keep.py",
        "        if is_known:\n",
        "        if 0 == 1:\n",
        ("tests/execution/test_kept.py::test_rows_that_several_commits_were_refused_are_reported_once",),
    ),
    Mutant(
        "ending a batch after deadlocks",
        "outboxq/execution/run.py",
        "            if isinstance(result, Failed) and result.transient and result.sqlstate == DEADLOCK:\n",
        "            if 0 == 1:\n",
        ("tests/handlers/test_deferred_writes.py::test_a_deadlock_over_rows_of_earlier_jobs_costs_no_attempt",),
    ),
    Mutant(
        "thread check of a connection",
        "outboxq/database/guard.py",
        "if connection is self._connection and get_ident() != self.thread:",
        "if False:",
        (
            "tests/database/test_session_state_left.py::test_a_thread_left_behind_cannot_use_its_connection_in_a_later_job",
        ),
    ),
    Mutant(
        "suspect mark",
        "outboxq/statements/claim.py",
        "CASE WHEN job.xmax = '0'::xid THEN false ELSE (",
        "CASE WHEN job.xmax IS NOT NULL THEN false ELSE (",
        ("tests/relay/test_suspects.py",),
    ),
    Mutant(
        "suspect mark only if aborted",
        "outboxq/statements/claim.py",
        "= 'aborted', false)",
        "IS NOT NULL, false)",
        ("tests/relay/test_suspects.py",),
    ),
    Mutant(
        "server run that knows a transaction",
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
        "ending the backend at timeout",
        "outboxq/relay/deadlines.py",
        "                end_other_transaction(connection, batch, terminate=True)\n                if cancelled",
        "                if cancelled",
        ("tests/faults/test_deadlines.py",),
    ),
    Mutant(
        "token when recording a call",
        "outboxq/statements/effects.py",
        "effect.c.key == self.key, effect.c.lock_token == self.token\n",
        "effect.c.key == self.key\n",
        ("tests/effects/test_once.py", "tests/faults/test_once_lost.py"),
    ),
    Mutant(
        "doubt after a dead caller",
        "outboxq/statements/effects.py",
        'or_(effect.c.in_doubt, and_(effect.c.status == "started", effect.c.lock_token != token)),\n',
        "effect.c.in_doubt,\n",
        ("tests/effects/test_once.py", "examples/payments/tests/test_torture.py"),
    ),
    Mutant(
        "lock check before the call",
        "outboxq/effects/protocol.py",
        "        if expiry.is_ahead:\n",
        "        if expiry is not None:\n",
        ("tests/faults/test_once_lost.py",),
    ),
    Mutant(
        "record without a refused result",
        "outboxq/effects/steps.py",
        "            if instead is not None and not is_transient(error):\n",
        "            if False:\n",
        ("tests/effects/test_once_refused_data.py",),
    ),
    Mutant(
        "patience of a cancelled caller",
        "outboxq/effects/runners.py",
        "            case Pause(seconds, settles=True):\n",
        "            case Pause(seconds, settles=None):\n",
        ("tests/faults/test_once_cancelled.py",),
    ),
    Mutant(
        "record of an interrupted caller",
        "outboxq/effects/steps.py",
        "            interruption = error\n",
        "            raise\n",
        ("tests/faults/test_once_cancelled.py",),
    ),
    Mutant(
        "cancelling a waiting claim",
        "outboxq/statements/effects.py",
        '_TRY = "1s"\n',
        '_TRY = "1h"\n',
        ("tests/faults/test_once_cancelled.py",),
    ),
    Mutant(
        "connections kept for records",
        "outboxq/effects/transactions.py",
        "        with (self._records if settles else self._claims).transaction() as connection:\n",
        "        with self._claims.transaction() as connection:\n",
        ("tests/faults/test_once_crowded.py",),
    ),
    Mutant(
        "look-up before the first call",
        "outboxq/effects/protocol.py",
        "        if in_doubt or request.looks_up_first:\n",
        "        if in_doubt:\n",
        ("tests/effects/test_once_ask_first.py",),
    ),
    Mutant(
        "doubt about open calls after a new id",
        "outboxq/admin/installation.py",
        "    doubted = connection.execute(statements.doubt_open(_OPEN)).rowcount\n",
        "    doubted = 2\n",
        ("tests/cli/test_installation.py",),
    ),
    Mutant(
        "dead letter despite prepared transaction",
        "outboxq/execution/find_outcome.py",
        "    if not batch.is_leased:\n        return BatchReport(len(batch.jobs), ())\n    return write_dead_letters(",
        "    if batch is not None:\n        return BatchReport(len(batch.jobs), ())\n    return write_dead_letters(",
        ("tests/execution/test_prepared_by_handler.py::test_a_transaction_that_the_relay_may_not_end_frees_its_slot",),
    ),
    Mutant(
        "leased transaction checked before settling",
        "outboxq/execution/run.py",
        "        if batch.is_leased:\n            # The statements that settle the job",
        "        if batch is None:\n            # The statements that settle the job",
        ("tests/execution/test_prepared_by_handler.py::test_a_leased_job_whose_row_is_prepared_too_holds_no_slot",),
    ),
    Mutant(
        "order of accepted messages",
        "outboxq/statements/inbox.py",
        '.order_by(collate(given.c.message_id, "C"))\n',
        "\n",
        ("tests/faults/test_inbox_races.py",),
    ),
    Mutant(
        "tokens when removing together",
        "outboxq/statements/lease_mode.py",
        "\n    AND ((job.id, job.lease_token) IN (SELECT held.id, held.token FROM oq_held AS held)) IS TRUE",
        "",
        ("tests/statements/test_leased_together.py",),
    ),
    Mutant(
        "hashed comparison of leased jobs",
        "outboxq/statements/lease_mode.py",
        'FROM oq_held AS held)) IS TRUE"""',
        'FROM oq_held AS held))"""',
        (
            "tests/statements/test_leased_together.py::test_a_thousand_jobs_are_found_in_one_walk_whatever_statistics_say",
        ),
    ),
    Mutant(
        "leaving locked leased rows",
        "outboxq/statements/lease_mode.py",
        "  FOR UPDATE OF job SKIP LOCKED",
        "  FOR UPDATE OF job",
        ("tests/statements/test_leased_together.py::test_a_row_that_another_transaction_has_locked_is_left_and_named",),
    ),
    Mutant(
        "locked jobs are not lost",
        "outboxq/statements/lease_mode.py",
        '_IS_HELD if free else "false"',
        '"false" if free else "false"',
        ("tests/statements/test_leased_together.py::test_a_row_that_another_transaction_has_locked_is_left_and_named",),
    ),
    Mutant(
        "expiry when settling together",
        "outboxq/statements/lease_mode.py",
        "least(pg_catalog.clock_timestamp() + change.delay, job.expires_at)",
        "pg_catalog.clock_timestamp() + change.delay",
        ("tests/execution/test_settle_many.py::test_each_outcome_of_each_sort_of_job_leaves_what_it_leaves_by_itself",),
    ),
    Mutant(
        "coalesced place when settling together",
        "outboxq/statements/lease_mode.py",
        '    + ", seq = DEFAULT, headers = "\n    + headers_with_order("job")\n',
        '    + ", seq = DEFAULT"\n',
        ("tests/execution/test_settle_many.py::test_each_outcome_of_each_sort_of_job_leaves_what_it_leaves_by_itself",),
    ),
    Mutant(
        "crashes when settling together",
        "outboxq/statements/lease_mode.py",
        "SELECT change.attempt, change.crashes, coalesce",
        "SELECT change.attempt, job.crashes, coalesce",
        ("tests/execution/test_settle_many.py::test_each_outcome_of_each_sort_of_job_leaves_what_it_leaves_by_itself",),
    ),
    Mutant(
        "other kind's dead letter",
        "outboxq/statements/lease_mode.py",
        "AND (earlier.queue, earlier.kind) <> (job.queue, job.kind)",
        "AND false",
        ("tests/execution/test_settle_many.py::test_each_outcome_of_each_sort_of_job_leaves_what_it_leaves_by_itself",),
    ),
    Mutant(
        "settlements after a lost answer",
        "outboxq/execution/settle_many.py",
        "isinstance(settlement.change, PutBack) or settlement.job.id not in standing",
        "False",
        ("tests/execution/test_settle_many.py::test_settlements_whose_commit_had_no_answer_are_sent_again",),
    ),
    Mutant(
        "waking waiters when settling together",
        "outboxq/execution/families.py",
        "    if ended := keeper.ended(events, stands_for):\n",
        "    if not (ended := keeper.ended(events, stands_for)):\n",
        ("tests/execution/test_settle_many.py::test_waiters_for_results_are_told_of_each_end",),
    ),
    Mutant(
        "deferred constraints when settling together",
        "outboxq/execution/settle_many.py",
        " if kept or back or dead else ()",
        " if kept else ()",
        ("tests/execution/test_settle_many.py::test_rows_that_their_table_refuses_fail_at_their_own_statement",),
    ),
    Mutant(
        "claim times when settling together",
        "outboxq/execution/keep.py",
        "of_claims = jobs if [job for job in jobs if job.claimed_at != claimed_at or job.queue != queue] else []",
        "of_claims: list[Job] = []",
        ("tests/execution/test_settle_many.py::test_a_finished_row_has_the_queue_and_the_claim_of_its_job",),
    ),
    Mutant(
        "repeated row in set-based update",
        "outboxq/handlers/set_based.py",
        "    if again:\n        yield from single_executions(statement, again)\n",
        "",
        ("tests/handlers/test_set_based.py",),
    ),
    Mutant(
        "array bound to the index",
        "outboxq/handlers/set_based.py",
        ".where(self.primary_key == any_(keys))",
        "",
        ("tests/handlers/test_set_based.py",),
    ),
    Mutant(
        "lock order in set-based update",
        "outboxq/handlers/set_based.py",
        "set_based.over_arrays_in_order if in_order else set_based.over_arrays",
        "set_based.over_arrays",
        (
            "tests/handlers/test_set_based.py::test_rows_that_are_locked_in_order_let_batches_that_cross_wait_for_each_other",
        ),
    ),
    Mutant(
        "backslashes in arrays",
        "outboxq/handlers/set_based.py",
        r"""value.replace("\\", r"\\").replace""",
        "value.replace",
        ("tests/handlers/test_set_based.py::test_each_type_is_written_as_an_executemany_writes_it",),
    ),
    Mutant(
        "prepared claim's index plan",
        "outboxq/statements/claim.py",
        '(*by_index.BY_INDEX, "SET LOCAL jit = off")',
        '("SET LOCAL enable_mergejoin = off",)',
        (
            "tests/execution/test_prepared_claims.py::test_a_claim_that_was_prepared_for_an_empty_table_walks_its_index_in_a_large_one",
        ),
    ),
    Mutant(
        "reindexer: pooler check",
        "outboxq/relay/maintenance/reindexer.py",
        "_value(connection, statements.backend_pid()) != str(connection.backend_pid)",
        "_value(connection, statements.backend_pid()) is None",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "reindexer: owner check",
        "outboxq/relay/maintenance/reindexer.py",
        'if _value(connection, statements.owns_jobs(self.schema)) != "true":',
        "if _value(connection, statements.owns_jobs(self.schema)) is None:",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "reindexer: single builder",
        "outboxq/relay/maintenance/reindexer.py",
        'elif _value(connection, statements.try_lock_reindexing(self.schema)) == "true":',
        "elif _value(connection, statements.try_lock_reindexing(self.schema)) is not None:",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "reindexer: blocking sessions",
        "outboxq/relay/maintenance/reindexer.py",
        " or _value(connection, statements.obstacle(self.schema, self.old_seconds)):",
        ":",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "reindexer: index fill",
        "outboxq/relay/maintenance/reindexer.py",
        "or 0) >= needed:",
        "or 0) > needed + 1_000_000_000:",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "reindexer: rest after failure",
        "outboxq/relay/maintenance/reindexer.py",
        "        self._paused_until = time.monotonic() + RETRY_SECONDS\n",
        "",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "reindexer: removing leftovers",
        "outboxq/relay/maintenance/reindexer.py",
        "            self._run_long(connection, statements.drop_index(self.schema, name))\n",
        "            pass\n",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "reindexer: stopping",
        "outboxq/relay/maintenance/reindexer.py",
        "            if self.stopping.is_set() and not cancelled:\n",
        "            if self.stopping.is_set() and cancelled:\n",
        ("tests/relay/test_reindexer.py",),
    ),
    Mutant(
        "new connection after leftovers",
        "outboxq/relay/slot.py",
        "        if left is None:\n            return True\n",
        "        if left is None or True:\n            return True\n",
        (
            "tests/database/test_session_state_left.py::test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch",
        ),
    ),
    Mutant(
        "no next claim after leftovers",
        "outboxq/relay/slot.py",
        "None if is_listened_to(connection) or runtime.guard.left else",
        "None if is_listened_to(connection) else",
        (
            "tests/database/test_session_state_left.py::test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch",
        ),
    ),
    Mutant(
        "replacing a call's dirty connection",
        "outboxq/relay/connections.py",
        " and slot_connection.guard.left is None\n",
        "\n",
        (
            "tests/database/test_session_state_left.py::test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch",
        ),
    ),
    Mutant(
        "closing a lent connection",
        "outboxq/database/guard.py",
        "            self.lent.pop().__dict__ = {",
        "            self.lent.pop().__dict__ == {",
        (
            "tests/database/test_session_state_left.py::test_a_thread_left_behind_cannot_use_its_connection_in_a_later_job",
        ),
    ),
    Mutant(
        "resetting execution options",
        "outboxq/database/guard.py",
        "        self._connection._execution_options = self._options",
        "        self._connection.outboxq_options = self._options",
        (
            "tests/database/test_session_state_left.py::test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch",
        ),
    ),
    Mutant(
        "watching the driver's cursor",
        "outboxq/database/guard.py",
        "            guard.sends(query)\n            return super().execute(",
        "            return super().execute(",
        (
            "tests/database/test_session_state_left.py::test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch",
        ),
    ),
    Mutant(
        "claim checks its own lease",
        "outboxq/statements/claim.py",
        '_ALIVE if owner else ""',
        '""',
        ("tests/relay/test_lease_steps.py",),
    ),
    Mutant(
        "schema of a function",
        "outboxq/statements/park.py",
        "'5 seconds' * pg_catalog.power(",
        "'5 seconds' * power(",
        ("tests/statements/test_statement_names.py", "tests/statements/test_lookups.py"),
    ),
    Mutant(
        "search path of migrations",
        "outboxq/migrations/__init__.py",
        "set_config('search_path', 'pg_catalog, pg_temp', true)",
        "set_config('search_path', search_path_before, true)",
        ("tests/statements/test_lookups.py",),
    ),
    Mutant(
        "texts sent as text",
        "outboxq/tables/columns.py",
        "type(self) if issubclass(cls, String) else cls",
        "cls",
        ("tests/statements/test_lookups.py",),
    ),
    Mutant(
        "retry no later than expiry",
        "outboxq/statements/settle.py",
        "        later = func.least(later, literal(claimed.expires_at))\n",
        "        pass\n",
        (
            "tests/families/test_option_pairs.py::test_a_job_that_would_be_tried_again_after_its_expiry_holds_nothing_up_till_then",
        ),
    ),
    Mutant(
        "place of a coalesced retry",
        "outboxq/statements/settle.py",
        '        kept["headers"] = with_added_order(claimed.headers, claimed.seq)',
        "        pass",
        (f"{_COALESCE}::test_arguments_of_a_run_that_did_not_end_well_never_follow_newer_ones",),
    ),
    Mutant(
        "crashed suspect goes last",
        "outboxq/statements/lease.py",
        "headers = {headers_with_order('job')}, seq = DEFAULT\")",
        "headers = {headers_with_order('job')}\")",
        ("tests/relay/test_lease_steps.py",),
    ),
    Mutant(
        "second sighting of an orphan",
        "outboxq/relay/lease.py",
        "in orphans & self._orphans:",
        "in orphans:",
        ("tests/relay/test_lease_steps.py",),
    ),
    Mutant(
        "no reaping after an outage",
        "outboxq/relay/lease.py",
        "self._beats + _BEATS_BEFORE_REAPING",
        "self._beats",
        ("tests/relay/test_lease_steps.py",),
    ),
    Mutant(
        "turns of starred queues",
        "outboxq/relay/poller.py",
        "first if name in in_turns else place",
        "place",
        ("tests/relay/test_turns.py::test_queues_of_the_star_take_turns",),
    ),
    Mutant(
        "continuing after the last queue",
        "outboxq/relay/poller.py",
        "name = order.first(last, self.waiting())",
        "name = order.first(order.queues[-1], self.waiting())",
        (
            "tests/relay/test_turns.py::test_queues_of_the_star_take_turns",
            "tests/relay/test_turns.py::test_every_full_queue_of_the_star_is_served_in_each_round",
        ),
    ),
    Mutant(
        "claiming only polled queues",
        "outboxq/relay/poller.py",
        "                if ready:\n",
        "                if name:\n",
        (
            "tests/relay/test_turns.py::test_a_sleeping_slot_claims_from_the_queue_that_it_was_called_to_and_from_no_other",
        ),
    ),
    Mutant(
        "poll after a wake-up",
        "outboxq/relay/idle.py",
        "self._poller.uncalled_since(self.idle_slot.queues)",
        "self._poller.polled_at(self._first)",
        ("tests/relay/test_lost_wakes.py::test_a_slot_that_falls_asleep_behind_a_call_polls_for_it",),
    ),
    Mutant(
        "waking another slot",
        "outboxq/relay/planner.py",
        "        is_called |= self._is_called and self._state.listener is not None\n",
        "",
        ("tests/relay/test_lost_wakes.py::test_a_slot_that_never_slept_calls_another_where_a_poll_saw_jobs",),
    ),
    Mutant(
        "another slot's poll before pausing",
        "outboxq/relay/idle.py",
        "if self._wants_poll() or self._has_jobs():",
        "if self._wants_poll() and self._poller.is_under_way():",
        ("tests/relay/test_lost_wakes.py::test_a_slot_that_waits_for_a_poll_does_not_sleep_over_what_it_finds",),
    ),
    Mutant(
        "skipping a pointless claim",
        "outboxq/relay/planner.py",
        "0.0 if 0.0 < share_seconds < _LEAST_SHARE_SECONDS else time.monotonic() + share_seconds",
        "time.monotonic() + share_seconds",
        ("tests/relay/test_turns.py::test_a_job_costs_two_claims_at_most_whatever_the_number_of_queues",),
    ),
    Mutant(
        "claims as text after two losses",
        "outboxq/database/driver.py",
        "self._age = 0 if self._age >= _WORTHWHILE else -_WORTHWHILE",
        "self._age = 0",
        ("tests/execution/test_prepared_claims.py::test_a_driver_that_lets_go_of_all_statements_costs_no_job",),
    ),
    Mutant(
        "preparing a claim again",
        "outboxq/database/driver.py",
        "self._age = 0 if self._age >= _WORTHWHILE else -_WORTHWHILE",
        "self._age = -_WORTHWHILE",
        ("tests/execution/test_prepared_claims.py::test_a_driver_that_lets_go_of_all_statements_costs_no_job",),
    ),
    Mutant(
        "claim that is already prepared",
        "outboxq/database/driver.py",
        "if sqlstate == _THERE_ALREADY:",
        "if False:",
        ("tests/execution/test_prepared_claims.py::test_a_name_that_is_taken_is_used",),
    ),
    Mutant(
        "closing unused connections",
        "outboxq/relay/connections.py",
        "if spare.used_at <= oldest]",
        "if spare.used_at is None]",
        (
            "tests/relay/test_connections.py::test_an_idle_relay_holds_four_connections_whatever_the_number_of_its_queues",
        ),
    ),
    Mutant(
        "outcome before a slot ends",
        "outboxq/relay/slot_loop.py",
        "                self._wait_after(error)\n        self._find_out()\n",
        "                self._wait_after(error)\n",
        ("tests/faults/test_unknown_commit.py::test_a_relay_that_is_told_to_stop_finds_out_first",),
    ),
    Mutant(
        "finished rows after a lost prepare",
        "outboxq/execution/keep.py",
        "(may_be_of_prepared(error) or ",
        "(",
        ("tests/execution/test_kept.py::test_the_insert_of_rows_is_prepared_once_and_sent_as_text_if_that_is_lost",),
    ),
    Mutant(
        "lock timeout reset after finished rows",
        "outboxq/execution/keep.py",
        "*insert, _AS_LONG_AS_BEFORE",
        "*insert",
        ("tests/execution/test_kept.py::test_rows_wait_for_a_lock_for_a_second_and_what_follows_as_long_as_before",),
    ),
    Mutant(
        "finished rows after a duplicate id",
        "outboxq/execution/keep.py",
        " or sqlstate_of(error) == _UNIQUE_VIOLATION)",
        ")",
        ("tests/execution/test_kept.py::test_a_row_whose_id_was_chosen_twice_gives_way",),
    ),
    Mutant(
        "replacing an earlier finished row",
        "outboxq/statements/done.py",
        "WHERE earlier.queue = excluded.queue AND earlier.kind = excluded.kind",
        "WHERE false",
        ("tests/execution/test_kept.py::test_a_row_whose_id_was_chosen_twice_gives_way",),
    ),
    Mutant(
        "returning a sleeping slot's connection",
        "outboxq/relay/slot_loop.py",
        "                    slot.rest(self)\n",
        "                    self.on_connection(lambda _: slot.rest(self) is None)\n",
        (
            "tests/relay/test_connections.py::test_an_idle_relay_holds_four_connections_whatever_the_number_of_its_queues",
        ),
    ),
    Mutant(
        "spare connection before a new one",
        "outboxq/relay/connections.py",
        "slot_connection = self._spares.pop() if self._spares else None",
        "slot_connection = None",
        ("tests/relay/test_connections.py::test_slots_that_wake_take_a_connection_that_is_there",),
    ),
    Mutant(
        "closing spares with a lost one",
        "outboxq/relay/connections.py",
        "            _close([slot_connection, *self._remove_all()])\n",
        "            _close([slot_connection])\n",
        ("tests/relay/test_connections.py::test_spare_connections_that_were_cut_cost_no_job_and_are_found_out_once",),
    ),
    Mutant(
        "no return to the pool",
        "outboxq/relay/connections.py",
        "            give_up(slot_connection.connection)\n",
        "",
        ("tests/relay/test_connections.py::test_a_relay_on_a_users_engine_returns_no_connection_to_its_pool",),
    ),
    Mutant(
        "pipeline mode left on",
        "outboxq/database/driver.py",
        "\n        or pgconn.pipeline_status != PipelineStatus.OFF",
        "",
        ("tests/execution/test_unfinished.py",),
    ),
    Mutant(
        "driver lock left held",
        "outboxq/database/driver.py",
        "        driver.lock.locked()\n        or pgconn.transaction_status == TransactionStatus.ACTIVE",
        "        pgconn is None",
        ("tests/execution/test_unfinished.py",),
    ),
    Mutant(
        "greatest crash count",
        "outboxq/statements/numbers.py",
        "least(greatest({count}, 0), 32765) + 1",
        "least(greatest({count}, 0), 32766) + 1",
        ("tests/execution/test_stored_numbers.py",),
    ),
    Mutant(
        "token wrap-around",
        "outboxq/statements/numbers.py",
        "% 9223372036854775806 + 1",
        "% 9223372036854775807 + 1",
        ("tests/execution/test_stored_numbers.py",),
    ),
    Mutant(
        "time in lease token",
        "outboxq/statements/numbers.py",
        "% 9223372036854775806 + 1, {now})",
        "% 9223372036854775806 + 1)",
        ("tests/relay/test_lease.py",),
    ),
    Mutant(
        "unsent rest of a script",
        "outboxq/database/driver.py",
        "    _flush(connection, seconds)\n",
        "",
        ("tests/database/test_driver.py",),
    ),
    Mutant(
        "request time when cancelling",
        "outboxq/statements/cancel.py",
        "    counts = cancel_request.c.requested_at >= created_at\n",
        "    counts = cancel_request.c.requested_at.is_not(None)\n",
        ("tests/cancelling/test_cancel.py",),
    ),
    Mutant(
        "request time at relays",
        "outboxq/statements/lease.py",
        " AND job.created_at > request.requested_at",
        " AND job.created_at > request.requested_at AND false",
        ("tests/cancelling/test_cancel.py",),
    ),
    Mutant(
        "leaving an existing request",
        "outboxq/statements/cancel.py",
        "wanted.where(there.c.id.not_in(select(standing.c.job_id)))",
        "wanted",
        ("tests/cancelling/test_cancel_locks.py",),
    ),
    Mutant(
        "ended backend against refused rows",
        "outboxq/execution/commit.py",
        " or is_lost(connection):\n            return answer, steps",
        ":\n            return answer, steps",
        (
            "tests/faults/test_refused_commit.py::test_a_backend_that_ends_at_the_rows_of_finished_jobs_stops_no_later_rows",
        ),
    ),
    Mutant(
        "lease of all jobs of a window",
        "outboxq/relay/dispatcher.py",
        "for job in batch.jobs if job.lease_token is not None}",
        "for job in batch.jobs[:1] if job.lease_token is not None}",
        (f"{_WINDOWS}a_window_may_take_longer_than_its_lease",),
    ),
    Mutant(
        "slot for each window",
        "outboxq/relay/dispatcher.py",
        "            free = max(0, self.slots - self.busy)\n",
        "            free = 1_000_000\n",
        (f"{_WINDOWS}a_claim_of_several_kinds_is_a_call_of_each_and_takes_one_slot",),
    ),
    Mutant(
        "slot of a cut-off call freed once",
        "outboxq/relay/dispatcher.py",
        "return len(self.calls) - len(self._waiting)\n",
        "return len(self.calls) - len(self._waiting) - len(self._cut)\n",
        (f"{_WINDOWS}a_call_that_is_cut_off_frees_its_slot_once",),
    ),
    Mutant(
        "suspects of a window apart",
        "outboxq/relay/dispatcher.py",
        "            size = 1 if claimed.request.sort.is_suspect else handler.max_size\n",
        "            size = handler.max_size\n",
        (f"{_WINDOWS}the_suspects_of_a_hanging_window_have_a_call_each",),
    ),
    Mutant(
        "chain read before a window's call",
        "outboxq/execution/leased_window.py",
        "                if THEN_HEADER in job.headers:\n",
        "                if 0 == 1:\n",
        (f"{_WINDOWS}a_next_job_that_cannot_be_added_fails_its_own_alone",),
    ),
    Mutant(
        "jobs of a failed window alone",
        "outboxq/execution/leased_window.py",
        "        if len(jobs) > 1:\n",
        "        if len(jobs) > 1_000:\n",
        (f"{_WINDOWS}the_jobs_of_a_failed_call_run_again_each_alone",),
    ),
    Mutant(
        "done jobs of a cancelled window",
        "outboxq/execution/leased_window.py",
        "job.id not in cancelled or isinstance(outcome, Done | Discard)",
        "job.id not in cancelled",
        (f"{_WINDOWS}a_cancelled_job_of_a_window_is_done_if_its_outcome_says_so",),
    ),
    Mutant(
        "refused session in lease mode",
        "outboxq/handlers/handler.py",
        "        session = ctx.session if has_session else NO_SESSION\n        given = BatchContext(",
        "        session = ctx.session\n        given = BatchContext(",
        ("tests/testing/test_testing.py::test_a_batch_handler_in_lease_mode_has_no_session_in_a_drain_either",),
    ),
    Mutant(
        "cancelled window that goes on",
        "outboxq/relay/deadlines.py",
        "                if call.goes_on:\n",
        "                if 0 == 1:\n",
        (f"{_WINDOWS}a_cancelled_job_of_a_window_is_done_if_its_outcome_says_so",),
    ),
    Mutant(
        "all jobs of an interrupted window",
        "outboxq/execution/seized.py",
        "    for job in (job for batch in batches for job in batch.jobs):\n",
        "    for job in (batch.job for batch in batches):\n",
        (f"{_WINDOWS}a_relay_that_does_not_wait_for_a_window_gives_all_its_jobs_back",),
    ),
    Mutant(
        "all jobs of a window that is cut off",
        "outboxq/execution/seized.py",
        "    for job in batch.jobs:\n        if is_crash or",
        "    for job in batch.jobs[:1]:\n        if is_crash or",
        (f"{_WINDOWS}a_window_past_its_deadline_charges_no_job_that_does_not_hang",),
    ),
    Mutant(
        "one job for each slot beside windows",
        "outboxq/handlers/resolved.py",
        "        return min(found) if found and len(found) == len(sizes) else None\n",
        "        return min(found) if found else None\n",
        (f"{_WINDOWS}a_queue_with_a_handler_of_one_job_claims_a_job_for_each_free_slot",),
    ),
    Mutant(
        "job without a group key",
        "outboxq/outbox/keys.py",
        'if key is None and self._what == "group":',
        'if key is None and self._what == "x":',
        (f"{_WINDOWS}groups_keep_their_order_and_a_key_function_may_return_none",),
    ),
    Mutant(
        "COMMIT before publishing results",
        "outboxq/relay/dispatcher.py",
        "            answer = script.send(connection)\n",
        "            self._publish(BatchReport(0, tuple(each.event for each in many.settlements if each.event)), ())\n"
        "            answer = script.send(connection)\n",
        ("tests/relay/test_dispatcher.py::test_a_lost_lease_of_one_job_costs_the_others_nothing",),
    ),
    Mutant(
        "claim bounded by free slots",
        "outboxq/relay/queue_claims.py",
        "        return free if self.window is None or sort.is_suspect else self.window\n",
        "        return self.batch_size + 9\n",
        ("tests/relay/test_dispatcher.py::test_a_claim_takes_no_more_jobs_than_slots_are_free",),
    ),
    Mutant(
        "lock timeout blames no job",
        "outboxq/execution/recovery.py",
        " or sqlstate_of(error) == LOCK_NOT_AVAILABLE",
        "",
        ("tests/faults/test_refused_commit.py",),
    ),
    Mutant(
        "pruning requests of gone jobs",
        "outboxq/statements/prune.py",
        "AS job WHERE {COUNTS})",
        "AS job WHERE job.id = request.job_id)",
        ("tests/cancelling/test_cancel.py",),
    ),
    Mutant(
        "probing other jobs before blame",
        "outboxq/execution/aside.py",
        "if not is_of_a_row(error) or all(_failure(connection, schema, *other) for other in others):",
        "if not is_of_a_row(error):",
        ("tests/faults/test_rows_that_refuse.py",),
    ),
    Mutant(
        "marks of failed parking",
        "outboxq/relay/parking.py",
        "        park_unknown(connection, schema, queue, known_kinds, only_marks=True)",
        "        pass",
        ("tests/execution/test_parking.py",),
    ),
    Mutant(
        "clearing marks after a trial claim",
        "outboxq/execution/aside.py",
        'f"ROLLBACK TO SAVEPOINT oq_probe; {clear_marks(schema, [str(job_id)])}"',
        '"ROLLBACK TO SAVEPOINT oq_probe"',
        ("tests/faults/test_rows_that_refuse.py",),
    ),
    Mutant(
        "reaping one by one",
        "outboxq/relay/lease.py",
        "            return self._reap_one_by_one(connection, in_group=in_group)",
        "            raise",
        ("tests/faults/test_rows_that_refuse.py",),
    ),
    Mutant(
        "another recovered job before blame",
        "outboxq/relay/lease.py",
        "for job_id, found in came.items() if found is None and rows]:",
        "for job_id, found in came.items() if found is None]:",
        ("tests/faults/test_rows_that_refuse.py",),
    ),
    Mutant(
        "pruning one by one",
        "outboxq/relay/maintenance/pruner.py",
        "if not is_of_a_row(error):\n                    break\n                rows, more",
        "if error:\n                    break\n                rows, more",
        ("tests/relay/test_pruner.py",),
    ),
    Mutant(
        "repairing rows before checks",
        "outboxq/migrations/step_08_validated.py",
        "{REPAIR_ALL}\n    ALTER TABLE @schema@.job\n      VALIDATE",
        "    ALTER TABLE @schema@.job\n      VALIDATE",
        ("tests/migrations/test_row_checks.py",),
    ),
    Mutant(
        "short lock waits in migration",
        "outboxq/migrations/step_07_checks.py",
        "PERFORM set_config('lock_timeout', '200ms', true);",
        "",
        ("tests/migrations/test_row_checks.py",),
    ),
    Mutant(
        "burying before repairing numbers",
        "outboxq/migrations/repair.py",
        """{_BURY.format(held=_SAY_HELD)}
{_SET_FREE_NUMBERS}""",
        """{_SET_FREE_NUMBERS}
{_BURY.format(held=_SAY_HELD)}""",
        ("tests/migrations/test_row_checks.py",),
    ),
    Mutant(
        "no charge for held rows",
        "outboxq/execution/settle.py",
        "sqlstate_of(error) in _GAVE_UP_WAITING:",
        "sqlstate_of(error) is None:",
        ("tests/execution/test_row_held.py",),
    ),
    Mutant(
        "bound on unknown leases",
        "outboxq/statements/lease.py",
        "SELECT job.id, job.crashes >= {max_crashes} AS over",
        "SELECT job.id, false AND {max_crashes} > 0 AS over",
        ("tests/execution/test_row_held.py::test_a_lease_that_no_slot_runs_again_and_again_is_buried",),
    ),
    Mutant(
        "marks of a rolled back page",
        "outboxq/admin/marks.py",
        "        if ids and not _clear(begin, ids, run):\n",
        "        if ids and not ids:\n",
        ("tests/cli/test_interrupted.py",),
    ),
    Mutant(
        "rows per operator page",
        "outboxq/statements/paging.py",
        "MAX_PAGE_ROWS = 200",
        "MAX_PAGE_ROWS = 1_000",
        ("tests/cli/test_interrupted.py::test_no_transaction_changes_more_than_a_page",),
    ),
    Mutant(
        "claims without the role's timeout",
        "outboxq/execution/claim.py",
        '_BEGUN = [("settings", UNTIMED), ("settings", READABLE_DATES)]',
        '_BEGUN = [("settings", READABLE_DATES)]',
        (
            "tests/execution/test_failing_claims.py::test_claims_are_not_under_the_time_out_of_the_role",
            "tests/execution/test_failing_claims.py::test_claims_of_a_lease_are_not_under_the_time_out_of_the_role",
        ),
    ),
    Mutant(
        "role and deadlines reset",
        "outboxq/execution/run.py",
        "    if transaction is None or not (guard.is_altered or guard.left):\n",
        "    if True:\n",
        ("tests/execution/test_settings_left.py::test_a_job_is_done_whatever_its_handler_has_set",),
    ),
    Mutant(
        "free retry after ALTER TABLE",
        "outboxq/execution/failure.py",
        "    prepared = is_of_prepared(original)\n",
        "    prepared = False\n",
        ("tests/execution/test_altered_tables.py::test_a_statement_that_was_prepared_before_costs_no_attempt",),
    ),
    Mutant(
        "times read as numbers",
        "outboxq/tables/columns.py",
        'return type_coerce(extract("epoch", column), self)',
        "return type_coerce(column, DateTime(timezone=True))",
        ("tests/statements/test_settings.py::test_producers_and_consumers_work",),
    ),
    Mutant(
        "smaller claim after cancellation",
        "outboxq/relay/planner.py",
        "self._most = max(1, request.limit // 2)",
        "self._most = request.limit",
        ("tests/execution/test_failing_claims.py::test_a_cancelled_claim_is_no_death_and_no_outage",),
    ),
    Mutant(
        "marks of a cancelled claim",
        "outboxq/execution/recovery.py",
        "        picked = _forgive(connection, request)\n",
        "        picked = list[UUID]()\n",
        ("tests/execution/test_failing_claims.py::test_a_cancelled_claim_is_no_death_and_no_outage",),
    ),
    Mutant(
        "ready jobs despite broken suspects",
        "outboxq/relay/rolled_back.py",
        "    if not request.sort.is_suspect:\n",
        "    if request:\n",
        ("tests/execution/test_failing_claims.py::test_suspects_that_cannot_be_claimed_keep_no_other_job_waiting",),
    ),
    Mutant(
        "borrowing only on use",
        "outboxq/execution/leased_call.py",
        "        result = attempt(batch,",
        "        self.borrow()\n        result = attempt(batch,",
        ("tests/relay/test_dispatcher.py::test_calls_that_wait_hold_no_connection",),
    ),
    Mutant(
        "second way of recovery",
        "outboxq/relay/rolled_back.py",
        "        except (psycopg.Error, SQLAlchemyError) as refused:\n",
        "        except ZeroDivisionError as refused:\n",
        ("tests/faults/test_rows_that_refuse.py::test_a_job_that_escaped_and_cannot_be_a_dead_letter_is_put_off",),
    ),
    Mutant(
        "ending a handler's prepared transaction",
        "outboxq/execution/find_outcome.py",
        ' if status == "in progress" else ()',
        ' if status == "prepared" else ()',
        ("tests/execution/test_prepared_by_handler.py",),
    ),
    Mutant(
        "session withheld from abandoned tasks",
        "outboxq/execution/invoke.py",
        "            self._session.sync_session = self._session._proxied = cast",
        "            cast",
        ("tests/execution/test_shared_batches_neighbours.py::test_a_task_that_is_left_behind_has_no_session",),
    ),
    Mutant(
        "smaller leased claim after cancellation",
        "outboxq/relay/planner.py",
        "claims.by_one else min(self._most, claims.most(",
        "claims.by_one else min(self._free, claims.most(",
        ("tests/execution/test_failing_claims.py::test_a_cancelled_claim_of_a_lease_asks_for_less",),
    ),
    Mutant(
        "ending an abandoned statement",
        "outboxq/database/closing.py",
        "    _end_socket(driver)\n    idle = 0\n",
        "    return False\n    idle = 0\n",
        ("tests/execution/test_unfinished.py::test_a_thread_left_in_a_statement_reads_nothing_of_the_next_connection",),
    ),
    Mutant(
        "crash of a loop-blocking child task",
        "outboxq/relay/deadlines.py",
        "is_crash=is_blocked or (is_over and is_several))",
        "is_crash=is_over and is_several)",
        ("tests/relay/test_event_loops.py::test_a_child_task_that_blocks_the_loop_is_counted_against_its_job",),
    ),
    Mutant(
        "check of an idle loop",
        "outboxq/relay/run.py",
        "            self._end_if_loop_is_stuck()\n",
        "            pass\n",
        ("tests/relay/test_event_loops.py::test_a_callback_that_blocks_an_idle_loop_ends_its_relay",),
    ),
    Mutant(
        "no charge after ended transactions",
        "outboxq/execution/recovery.py",
        "    if batch.running.together > 1:\n",
        "    if batch.running.together > 1 and not runtime:\n",
        ("tests/execution/test_batch_handlers.py::test_what_fails_with_many_is_tried_with_each_alone",),
    ),
    Mutant(
        "taking back a batch handler's connection",
        "outboxq/execution/batch_call.py",
        "        runtime.guard.take_back()\n        batch.running.together = 1\n",
        "        batch.running.together = 1\n",
        (
            "tests/database/test_session_state_left.py::test_what_runs_together_leaves_its_connection_to_no_job_behind_it",
        ),
    ),
    Mutant(
        "timeout that charges no batch",
        "outboxq/relay/deadlines.py",
        " if is_over and not is_several else None\n",
        " if is_over else None\n",
        ("tests/faults/test_deadlines.py::test_a_batch_handler_that_hangs_charges_only_the_job_that_hangs_alone",),
    ),
    Mutant(
        "context per attempt",
        "outboxq/execution/invoke.py",
        "        return copy_context().run\n",
        "        return lambda attempt, *args: attempt(*args)\n",
        ("tests/execution/test_apart.py",),
    ),
    Mutant(
        "one context for call and flush",
        "outboxq/execution/invoke.py",
        "loop=asyncio.get_running_loop(), context=context)",
        "loop=asyncio.get_running_loop())",
        ("tests/execution/test_apart.py",),
    ),
    Mutant(
        "context per coroutine attempt",
        "outboxq/execution/invoke.py",
        "own.gr_context = own.gr_context, copy_context()",
        "own.gr_context = own.gr_context, own.gr_context",
        ("tests/execution/test_apart.py",),
    ),
    Mutant(
        "task per coroutine",
        "outboxq/execution/invoke.py",
        "        self.task = asyncio.Task(running, loop=asyncio.get_running_loop(), context=context)\n        try:\n",
        "        try:\n            return await running\n",
        ("tests/relay/test_event_loops.py::test_a_late_cancellation_is_not_the_next_job_s",),
    ),
    Mutant(
        "loop restarted after a stop",
        "outboxq/relay/event_loop.py",
        "        while not ends.is_set():\n            with suppress",
        "        if not ends.is_set():\n            with suppress",
        ("tests/relay/test_event_loops.py::test_a_handler_that_stops_its_loop_ends_no_relay",),
    ),
    Mutant(
        "error an around swallows",
        "outboxq/execution/surround.py",
        "        call_here(wrapping.__exit__, type(error), error, error.__traceback__)\n        raise\n",
        "        if not wrapping.__exit__(type(error), error, error.__traceback__):\n            raise\n"
        "        return None\n",
        ("tests/execution/test_arounds.py::test_an_error_fails_the_attempt_whatever_the_arounds_answer",),
    ),
    Mutant(
        "arounds before loading rows",
        "outboxq/execution/attempt.py",
        "            arguments = Surrounded.of(self._arounds, self, self._arguments, jobs)\n",
        "            given = self._arguments()\n"
        "            arguments = Surrounded.of(self._arounds, self, lambda: given, jobs)\n",
        ("tests/execution/test_arounds_tenant.py::test_rows_are_loaded_and_locked_under_their_tenant",),
    ),
    Mutant(
        "ending a forked child",
        "outboxq/forks.py",
        '        _end("returned", 0)\n    return returned\n\n\nasync def',
        "        pass\n    return returned\n\n\nasync def",
        ("tests/faults/test_forks.py::test_a_child_that_comes_back_to_the_relay_ends_and_the_job_is_its_parents",),
    ),
    Mutant(
        "waiting for a blocked loop's statement",
        "outboxq/database/closing.py",
        "            idle = 0 if is_waited_on else idle + 1\n            if idle == _IDLE_TURNS:\n",
        "            if True:\n",
        ("tests/database/test_closing.py::test_a_statement_of_a_loop_that_is_held_up_ends_first",),
    ),
    Mutant(
        "loggers that stay enabled",
        "outboxq/cli/relay_process.py",
        "    keep_loggers_enabled()\n",
        "",
        ("tests/cli/test_relay_log_kept.py::test_the_log_goes_on",),
    ),
    Mutant(
        "signals in a forked child",
        "outboxq/relay/signals.py",
        "after_in_child=_give_back)",
        "after_in_child=_unblock)",
        ("tests/faults/test_forks.py::test_a_signal_to_a_child_ends_the_child_and_not_the_relay",),
    ),
    Mutant(
        "noting an interrupted run",
        "outboxq/execution/seized.py",
        "            run_script(connection, note_interrupted(runtime.schema, running, _INTERRUPTED))\n",
        "            pass\n",
        ("tests/faults/test_interrupted.py::test_a_job_whose_relays_stop_again_and_again_runs_as_a_suspect_and_ends",),
    ),
    Mutant(
        "bound on interrupted runs",
        "outboxq/execution/seized.py",
        "    if is_crash or any(count_unfinished(job.errors) >= FREE_INTERRUPTIONS for job in batch.running_jobs):\n",
        "    if is_crash:\n",
        ("tests/faults/test_interrupted.py::test_a_job_whose_relays_stop_again_and_again_runs_as_a_suspect_and_ends",),
    ),
    Mutant(
        "child ends before other tasks",
        "outboxq/forks.py",
        '        loop.call_soon(_end, "awaited", 1)\n',
        "        pass\n",
        ("tests/faults/test_forks.py::test_a_child_that_comes_back_to_the_relay_ends_and_the_job_is_its_parents",),
    ),
    Mutant(
        "cutting a child's connections",
        "outboxq/forks.py",
        "            os.dup2(nowhere.fileno(), file.fileno(), inheritable=False)\n",
        "            pass\n",
        ("tests/faults/test_forks.py::test_a_child_reaches_nothing_of_its_parents",),
    ),
    Mutant(
        "locking rows that appeared late",
        "outboxq/execution/preload.py",
        " for key in wanted[entity] if key in locked)\n",
        " for key in wanted[entity])\n",
        ("tests/execution/test_arounds.py::test_a_row_that_could_not_be_locked_ahead_is_locked_when_it_is_loaded",),
    ),
    Mutant(
        "own types loaded within arounds",
        "outboxq/execution/read_rows.py",
        " and (not own_types or _has_own_types(entity))\n",
        "\n",
        ("tests/execution/test_arounds.py::test_types_of_the_application_s_own_work_within_the_arounds_of_their_job",),
    ),
    Mutant(
        "dropping events while hooks lag",
        "outboxq/relay/hook_thread.py",
        "            if not self._is_behind:\n                self._changed.wait_for",
        "            if not self._has_room():\n                self._is_behind = False\n"
        "                self._changed.wait_for",
        ("tests/relay/test_hooks.py::test_hooks_that_are_behind_get_no_events_until_half_of_them_are_told",),
    ),
    Mutant(
        "traceback of delivered events",
        "outboxq/relay/hook_thread.py",
        "                forget(event)\n                # Otherwise the event would",
        "                # Otherwise the event would",
        ("tests/relay/test_hooks.py::test_what_a_failed_handler_held_goes_when_its_event_was_told_or_dropped",),
    ),
    Mutant(
        "compare-and-set of unique keys",
        "outboxq/statements/unique.py",
        "        where=judged.scalar_subquery() == _VERSION,\n",
        "",
        (
            "tests/unique_jobs/test_unique.py::test_a_key_that_was_taken_over_meanwhile_is_not_taken_again",
            "tests/unique_jobs/test_unique.py::test_under_kills_no_two_jobs_of_a_key_live_and_none_is_lost",
        ),
    ),
    Mutant(
        "row version of unique keys",
        "outboxq/statements/unique.py",
        '_VERSION: ColumnElement[Any] = literal_column("unique_key.ctid")\n',
        '_VERSION: ColumnElement[Any] = literal_column("unique_key.job_id")\n',
        ("tests/unique_jobs/test_unique.py::test_a_key_of_a_retried_dead_letter_is_not_stolen",),
    ),
    Mutant(
        "unique key during a lease",
        "outboxq/statements/unique.py",
        "_HAS_JOB = select(true()).where(job.c.id == unique_key.c.job_id, ",
        '_HAS_JOB = select(true()).where(job.c.id == unique_key.c.job_id, job.c.state != "leased", ',
        ("tests/unique_jobs/test_unique.py::test_a_key_is_taken_for_as_long_as_its_job_lives",),
    ),
    Mutant(
        "expired waiting job's key",
        "outboxq/statements/unique.py",
        "CASE WHEN job.expires_at <= pg_catalog.statement_timestamp() ",
        "CASE WHEN false ",
        ("tests/unique_jobs/test_unique_expires.py::test_an_expired_job_that_waits_has_no_key",),
    ),
    Mutant(
        "expired running job's key",
        "outboxq/statements/unique.py",
        " OR {HELD} ELSE true END",
        " ELSE true END",
        ("tests/unique_jobs/test_unique_expires.py::test_a_job_that_began_before_it_expired_has_its_key",),
    ),
    Mutant(
        "order of taking unique keys",
        "outboxq/statements/unique.py",
        '.order_by(collate(wanted.c.key, "C"))',
        "",
        ("tests/unique_jobs/test_unique.py::test_two_flushes_with_the_same_keys_in_other_orders_do_not_deadlock",),
    ),
    Mutant(
        "unique keys deferred to COMMIT",
        "outboxq/outbox/unique.py",
        "    if guard is not None and guard.collects:\n",
        "    if False:\n",
        ("tests/unique_jobs/test_unique.py::test_adds_of_a_key_do_not_wait_for_a_handler_that_adds_it",),
    ),
    Mutant(
        "compare-and-set at handler's COMMIT",
        "outboxq/statements/unique.py",
        "  WHERE held.ctid = (SELECT version FROM standing WHERE standing.key = held.key)\n",
        "",
        ("tests/unique_jobs/test_unique.py::test_a_handler_does_not_take_a_key_that_was_taken_over_meanwhile",),
    ),
    Mutant(
        "second look before pruning keys",
        "outboxq/statements/unique.py",
        "  WHERE key = ANY ({keys}::text[])\n"
        "    AND coalesce(kept_until <= pg_catalog.statement_timestamp(), true)\n"
        "    AND (SELECT true FROM {job} AS job WHERE job.id = held.job_id) IS NULL\n"
        "  RETURNING 1\n",
        "  WHERE key = ANY ({keys}::text[]) RETURNING 1\n",
        ("tests/unique_jobs/test_unique.py::test_a_key_that_was_taken_over_before_it_was_locked_is_not_pruned",),
    ),
    Mutant(
        "unique key before retrying dead letters",
        "outboxq/statements/dead_letters.py",
        "*_can_be_jobs(), or_(has_no_key, has_its_key)\n",
        "*_can_be_jobs(), or_(has_no_key, ~has_no_key)\n",
        ("tests/unique_jobs/test_unique.py::test_a_dead_letter_is_retried_only_if_its_key_is_free",),
    ),
    Mutant(
        "group lock",
        "outboxq/statements/group_claim.py",
        "      THEN pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext({lock}),\n"
        "        pg_catalog.hashtext(pg_catalog.concat_ws(pg_catalog.chr(31), {queue}::text, heads.group_key, "
        "slot.number)))\n",
        "      THEN {lock} <> ''\n",
        ("tests/groups/test_groups.py::test_a_job_that_commits_late_does_not_run_beside_its_successor",),
    ),
    Mutant(
        "leased jobs of a group",
        "outboxq/statements/group_claim.py",
        "  WHERE state = 'group_leased' AND queue = {queue} GROUP BY group_key\n",
        "  WHERE state = 'group_leased' AND queue = {queue} AND false GROUP BY group_key\n",
        ("tests/groups/test_groups.py::test_a_job_that_commits_late_does_not_run_beside_its_successor",),
    ),
    Mutant(
        "second snapshot of group claims",
        "outboxq/statements/group_claim.py",
        'return [*texts.limited, *claim.BY_INDEX, ("groups", lock)',
        'return [("settings", "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"), '
        '*texts.limited, *claim.BY_INDEX, ("groups", lock)',
        ("tests/groups/test_groups.py::test_a_lease_that_is_committed_while_a_claim_begins_is_seen",),
    ),
    Mutant(
        "group stops at held job",
        "outboxq/statements/group_claim.py",
        "  WHERE (NOT run.free OR locked.id IS NULL OR locked.died)",
        "  WHERE (NOT run.free OR locked.died)",
        ("tests/groups/test_groups.py::test_a_lock_on_the_first_job_holds_up_its_group",),
    ),
    Mutant(
        "place of a group retry",
        "outboxq/statements/settle.py",
        "_InsertInPlace(job).values(**_kept(claimed, in_place=True), **expiry, **changed, seq=claimed.seq)\n",
        "insert(job).values(**_kept(claimed, in_place=True), **expiry, **changed)\n",
        ("tests/groups/test_groups.py::test_a_failed_job_holds_up_its_group_until_its_retry_is_due",),
    ),
    Mutant(
        "giving back jobs after a failure",
        "outboxq/execution/families.py",
        "batch.decided.setdefault(later.id, GivenBack())",
        "pass",
        ("tests/groups/test_groups.py::test_a_failed_job_holds_up_its_group_until_its_retry_is_due",),
    ),
    Mutant(
        "due time proves group outcome",
        "outboxq/statements/settle.py",
        "    return same if claimed.group_key is None else same.where(job.c.run_at == claimed.run_at)\n",
        "    return same\n",
        ("tests/groups/test_groups.py::test_a_job_that_came_back_is_told_from_one_that_was_never_taken",),
    ),
    Mutant(
        "group leases in limit count",
        "outboxq/statements/limit.py",
        "WHERE job.state = 'group_leased' AND job.queue = wanted.queue\n",
        "WHERE job.state = 'group_leased' AND job.queue = wanted.queue AND false\n",
        ("tests/groups/test_groups_beside.py::test_a_limit_of_a_queue_holds_for_jobs_of_groups",),
    ),
    Mutant(
        "queue limit in group walk",
        "outboxq/statements/group_claim.py",
        "  WHERE {has_room} AND NOT EXISTS",
        "  WHERE NOT EXISTS",
        ("tests/groups/test_groups_beside.py::test_a_limit_of_a_queue_holds_for_jobs_of_groups",),
    ),
    Mutant(
        "one batch call per group job",
        "outboxq/execution/plan.py",
        '        or ("group_key" in batch.claimed.extras and _reorders_groups(batch, handlers))\n',
        "",
        ("tests/groups/test_groups_beside.py::test_a_failed_job_of_a_batch_keeps_those_behind_it_waiting",),
    ),
    Mutant(
        "group's leases without a slot",
        "outboxq/relay/lease.py",
        "            in_group = leased[job_id, token]\n",
        "            in_group = False\n",
        ("tests/groups/test_groups_beside.py::test_a_lease_that_no_slot_knows_is_taken_back_in_its_place",),
    ),
    Mutant(
        "cancellations checked at claim",
        "outboxq/execution/families.py",
        "    return CancelledResult() if cancelled and job.id in cancelled else None\n",
        "    return None\n",
        (
            "tests/cancelling/test_cancel.py::test_a_request_stands_until_the_job_is_gone",
            "tests/cancelling/test_cancel.py::test_a_suspect_that_was_cancelled_does_not_run",
        ),
    ),
    Mutant(
        "request decides about cancellation",
        "outboxq/execution/settle.py",
        "    if outcome is None:\n",
        '    if outcome == "":\n',
        ("tests/cancelling/test_cancel.py::test_a_request_that_does_not_stand_any_more_ends_nothing",),
    ),
    Mutant(
        "transaction identifies the forced session",
        "outboxq/statements/cancel.py",
        "AS activity ON activity.backend_xid = job.xmax WHERE",
        "AS activity ON activity.backend_xid IS NOT NULL WHERE",
        ("tests/cli/test_cancelling.py::test_force_ends_no_session_that_runs_another_job_by_now",),
    ),
    Mutant(
        "expiry checked before the call",
        "outboxq/execution/families.py",
        "    if batch.expires and time.monotonic() >= batch.expires.get(job.id, math.inf):\n",
        "    if batch.expires and time.monotonic() >= math.inf:\n",
        ("tests/relay/test_expiry.py::test_an_expired_job_is_dropped_and_the_others_run",),
    ),
    Mutant(
        "coalescing after handlers too",
        "outboxq/relay/slot.py",
        "                    run(connection, batch, runtime, handlers, shared=len(batch.jobs) > 1)\n",
        "                    run(connection, batch, runtime, handlers, shared=len(batch.jobs) > 1)\n"
        "                    decide(connection, batch, runtime)\n",
        (
            "tests/coalescing/test_coalesce.py::test_a_job_that_is_added_while_another_of_its_key_runs_is_followed_by_a_run",
        ),
    ),
    Mutant(
        "giving back a call's place",
        "outboxq/relay/connections.py",
        "            self.held.pop().give_place()\n",
        "            self.held.pop()\n",
        (
            "tests/relay/test_dispatcher.py::test_as_many_connections_as_are_set_are_lent_in_the_order_of_the_first_uses",
        ),
    ),
    Mutant(
        "coalescing beyond the snapshot",
        "outboxq/statements/coalesce.py",
        "  WHERE unique_key = ANY ({{keys}}::text[])\n",
        "  WHERE unique_key = ANY ({{keys}}::text[]) AND created_at < pg_catalog.transaction_timestamp()\n",
        (f"{_COALESCE}::test_a_job_that_is_committed_behind_the_claim_is_taken_along",),
    ),
    Mutant(
        "newest arguments by adding order",
        "outboxq/execution/coalesce.py",
        '            if added_order(newest["headers"], seq) > run.added_order:\n',
        "            if seq > run.seq:\n",
        (f"{_COALESCE}::test_arguments_of_a_run_that_did_not_end_well_never_follow_newer_ones",),
    ),
    Mutant(
        "newest of the coalesced jobs",
        "outboxq/statements/coalesce.py",
        'ARRAY[{added_order("gone")}, seq]) AS place\n',
        "ARRAY[seq, seq]) AS place\n",
        (f"{_COALESCE}::test_the_newest_of_the_jobs_that_are_taken_along_is_the_one_that_was_added_last",),
    ),
    Mutant(
        "retries among coalesced jobs",
        "outboxq/statements/coalesce.py",
        " OR attempt > 0 OR lease_token > 0 OR parked > 0",
        "",
        (f"{_COALESCE}::test_arguments_of_a_run_that_did_not_end_well_never_follow_newer_ones",),
    ),
    Mutant(
        "token of a keyed retry",
        "outboxq/statements/settle.py",
        "    if claimed.lease_token is None and claimed.unique_key is not None:\n",
        "    if claimed.lease_token is None and claimed.unique_key is None:\n",
        (f"{_COALESCE}::test_arguments_of_a_run_that_did_not_end_well_never_follow_newer_ones",),
    ),
    Mutant(
        "savepoints above coalescing",
        "outboxq/execution/claim.py",
        '        return f"RELEASE SAVEPOINT {outer}; SAVEPOINT {outer}; SAVEPOINT {self.inner_savepoint}"\n',
        '        return "SELECT"\n',
        ("tests/coalescing/test_coalesce.py::test_a_run_that_fails_is_put_back_as_the_newest_job",),
    ),
    Mutant(
        "window a run has taken",
        "outboxq/statements/windows.py",
        "  WHERE held.kept_until < excluded.kept_until OR held.job_id",
        "  WHERE true OR held.job_id",
        (f"{_THROTTLE}::test_a_job_that_comes_after_the_run_of_its_window_waits_for_the_next_one",),
    ),
    Mutant(
        "trying the window's lock",
        "outboxq/statements/windows.py",
        "  WHERE pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext({locks}), pg_catalog.hashtext(key))\n",
        "  WHERE {locks} IS NOT NULL\n",
        (f"{_THROTTLE}::test_a_second_claim_of_a_window_waits_for_the_next_one_while_the_first_runs",),
    ),
    Mutant(
        "window the job already has",
        "outboxq/statements/windows.py",
        " OR held.job_id = ANY ({claimed}::uuid[])\n",
        "\n",
        (f"{_THROTTLE}::test_a_job_that_is_snoozed_keeps_its_window",),
    ),
    Mutant(
        "running job's newer arguments",
        "outboxq/execution/coalesce.py",
        "            is_older = place is not None and job.added_order < tuple(place)\n",
        "            is_older = False\n",
        (f"{_THROTTLE}::test_an_older_job_that_is_put_back_has_the_arguments_of_a_newer_one_that_runs",),
    ),
    Mutant(
        "newest arguments in leased row",
        "outboxq/statements/coalesce.py",
        "  WHERE job.id = ANY (ARRAY(SELECT id FROM ours)) AND job.id = ours.id AND",
        "  WHERE false AND job.id = ANY (ARRAY(SELECT id FROM ours)) AND job.id = ours.id AND",
        (f"{_COALESCE}::test_a_leased_row_has_the_newest_arguments_before_its_run_begins",),
    ),
    Mutant(
        "marks of coalesced jobs",
        "outboxq/execution/batch_state.py",
        "        return (*(job.id for job in self.jobs), *chain.from_iterable(self.stands_for.values()))\n",
        "        return tuple(job.id for job in self.jobs)\n",
        ("tests/coalescing/test_coalesce.py::test_what_was_taken_along_comes_back_with_a_batch_that_is_rolled_back",),
    ),
    Mutant(
        "checking batches after COMMIT",
        "outboxq/execution/callback_batches.py",
        "    def after_commit(self) -> tuple[str, ...]:\n",
        "    def statements(self) -> tuple[str, ...]:\n"
        "        return finish_batches(self.schema, self.ids)[1:-1]\n\n"
        "    def looked(self) -> tuple[str, ...]:\n",
        ("tests/job_batches/test_scenes.py::test_a_batch_is_looked_at_behind_commit",),
    ),
    Mutant(
        "rows before a failed statement",
        "outboxq/database/driver.py",
        "        return Answer(rows, is_committed, failure, failed_at)\n",
        "        return Answer({} if failure else rows, is_committed, failure, failed_at)\n",
        ("tests/unique_jobs/test_unique.py::test_a_claim_that_fails_behind_commit_hides_no_answer",),
    ),
    Mutant(
        "batch look waits for others",
        "outboxq/statements/callback_batches.py",
        "  WHERE {wanted}\n",
        "  WHERE id IN (SELECT batch.id FROM {batch} AS batch WHERE {wanted} FOR UPDATE SKIP LOCKED)\n",
        ("tests/job_batches/test_scenes.py::test_a_look_waits_for_another_one_that_may_roll_back",),
    ),
    Mutant(
        "sweep of batches",
        "outboxq/relay/maintenance/pruner.py",
        "keys, self._sweep(connection), finished)",
        "keys, 0, finished)",
        ("tests/job_batches/test_scenes.py::test_the_sweep_comes_to_a_batch_whose_last_member_no_relay_has_ended",),
    ),
    Mutant(
        "nested batches before parents",
        "outboxq/statements/callback_batches.py",
        "    AND NOT EXISTS (SELECT FROM {batch} AS nested WHERE nested.parent_id = batch.id)\n",
        "",
        ("tests/job_batches/test_adding.py::test_a_nested_batch_holds_its_parent_open",),
    ),
    Mutant(
        "chain continues without writes",
        "outboxq/execution/settle.py",
        "    if isinstance(result, CancelledResult) or (isinstance(result, Done) and THEN_HEADER in job.headers):\n",
        "    if isinstance(result, CancelledResult):\n",
        ("tests/execution/test_chains.py::test_each_job_of_a_chain_runs_once_behind_the_one_before_it",),
    ),
    Mutant(
        "Citus guard on each table",
        "outboxq/migrations/citus.py",
        "  FOREACH guarded IN ARRAY missing LOOP",
        "  FOREACH guarded IN ARRAY missing[2:] LOOP",
        ("tests/migrations/test_citus.py::test_what_is_missing_of_the_guard_is_put_back",),
    ),
    Mutant(
        "rights to fire the guard",
        "outboxq/migrations/citus.py",
        "LANGUAGE plpgsql SECURITY DEFINER\n",
        "LANGUAGE plpgsql\n",
        ("tests/migrations/test_citus.py::test_roles_without_a_right_on_it_fire_the_guard",),
    ),
    Mutant(
        "refusal without the Citus guard",
        "outboxq/relay/startup.py",
        "    if facts.has_citus and not config.allow_one_phase:",
        "    if False:",
        ("tests/relay/test_citus.py::test_a_relay_without_the_guard_does_not_start",),
    ),
    Mutant(
        "young jobs wait on Citus",
        "outboxq/execution/preload.py",
        "    if 0 < left_seconds < 2 * _YOUNG_SECONDS:",
        "    if False:",
        ("tests/execution/test_late_rows.py::test_a_young_job_waits_for_its_rows",),
    ),
    Mutant(
        "host that takes writes",
        "outboxq/database/engines.py",
        '        defaults["target_session_attrs"] = "read-write"',
        "        pass",
        ("tests/cli/test_read_url.py::test_every_command_takes_the_primary_of_several_hosts",),
    ),
    Mutant(
        "page after an action on the primary",
        "outboxq/dashboard/databases.py",
        "        return replace(self, replica=None)",
        "        return self",
        ("tests/cli/test_read_url.py::test_an_action_is_done_on_the_primary_and_seen_on_the_page_after_it",),
    ),
    Mutant(
        "principal in a request's key",
        "outboxq/http/keys.py",
        "    if principal is None:\n        return key",
        "    if principal != '':\n        return key",
        ("tests/http/test_idempotency.py::test_a_key_belongs_to_its_principal_method_and_route",),
    ),
    Mutant(
        "method in a request's scope",
        "outboxq/http/keys.py",
        'return _storable(f"{method} {path}", MAX_SCOPE_BYTES)',
        "return _storable(path, MAX_SCOPE_BYTES)",
        ("tests/http/test_idempotency.py::test_a_key_belongs_to_its_principal_method_and_route",),
    ),
    Mutant(
        "body in a request's fingerprint",
        "outboxq/http/keys.py",
        'scope.get("query_string", b""), media_type, body)',
        'scope.get("query_string", b""), media_type)',
        ("tests/http/test_idempotency.py::test_a_key_for_another_request_is_refused",),
    ),
    Mutant(
        "query string in a request's fingerprint",
        "outboxq/http/keys.py",
        '(scope.get("query_string", b""), media_type, body)',
        "(media_type, body)",
        ("tests/http/test_idempotency.py::test_a_key_for_another_request_is_refused",),
    ),
    Mutant(
        "secret in a credential's hash",
        "outboxq/http/keys.py",
        'hmac.digest(key, value, "sha256").hex()',
        "hashlib.sha256(value).hexdigest()",
        ("tests/http/test_idempotency_routing.py::test_a_secret_keeps_passwords_from_being_guessed_from_the_table",),
    ),
    Mutant(
        "refusing two Idempotency-Key headers",
        "outboxq/http/keys.py",
        "    if len(values) != 1:",
        "    if not values:",
        ("tests/http/test_idempotency.py::test_two_keys_are_refused",),
    ),
    Mutant(
        "session cookie left out of a replay",
        "outboxq/http/responses.py",
        " upgrade set-cookie",
        " upgrade",
        ("tests/http/test_idempotency.py::test_a_retry_gets_the_first_answer",),
    ),
    Mutant(
        "replaying whole responses only",
        "outboxq/http/responses.py",
        " if _is_whole(answer) else None",
        " if answer.status else None",
        ("tests/http/test_idempotency_faults.py::test_a_result_that_is_no_response_is_not_sent",),
    ),
    Mutant(
        "statuses that allow a retry",
        "outboxq/http/middleware.py",
        "frozenset((401, 403, 408, 409, 425, 429))",
        "frozenset((401, 403))",
        ("tests/http/test_idempotency.py::test_what_was_not_processed_is_processed_by_a_retry",),
    ),
    Mutant(
        "closing connections at shutdown",
        "outboxq/http/middleware.py",
        "                await self._transactions.dispose()\n            await send",
        "                pass\n            await send",
        ("tests/http/test_idempotency.py::test_a_server_that_ends_leaves_no_connection",),
    ),
    Mutant(
        "cap of a request body",
        "outboxq/http/bodies.py",
        "        if len(data) > max_bytes:",
        "        if len(data) < 0:",
        ("tests/http/test_idempotency_answers.py::test_a_request_over_the_cap_is_passed_on_and_marked",),
    ),
    Mutant(
        "rolled back record of a response",
        "outboxq/http/endpoint.py",
        "        self.is_certain = False",
        "        self.is_certain = True",
        ("tests/http/test_idempotency_transaction.py::test_a_record_that_was_rolled_back_is_not_answered",),
    ),
    Mutant(
        "commit inside an outer transaction",
        "outboxq/http/endpoint.py",
        " and not self.connection.in_transaction():",
        ":",
        ("tests/http/test_idempotency_faults.py::test_a_commit_within_somebody_elses_transaction_is_none",),
    ),
    Mutant(
        "request guarded by another middleware",
        "outboxq/http/endpoint.py",
        "    return isinstance(found, Idempotency) and found.claimed is not None",
        "    return isinstance(found, Idempotency) and found.claimed is found",
        ("tests/http/test_idempotency_faults.py::test_a_middleware_that_was_added_twice_guards_once",),
    ),
    Mutant(
        "role needed by a route",
        "outboxq/dashboard/answering.py",
        "            if page.user.role < route.needs:",
        "            if page.user.role < 0:",
        (
            "tests/dashboard/test_permissions.py::test_each_role_reaches_what_the_table_gives_it",
            "tests/dashboard/test_permissions.py::test_a_role_that_is_too_small_changes_nothing",
        ),
    ),
    Mutant(
        "CSRF token",
        "outboxq/dashboard/origins.py",
        "    if session is None or not token or not sessions.is_token(session, user, token):",
        "    if session is None:",
        (
            "tests/dashboard/test_permissions.py::test_a_foreign_form_is_refused_and_changes_nothing",
            "tests/dashboard/test_permissions.py::test_a_token_of_another_browser_is_refused",
        ),
    ),
    Mutant(
        "origin of a form",
        "outboxq/dashboard/origins.py",
        " and origin not in origins:",
        " and origin in origins:",
        ("tests/dashboard/test_permissions.py::test_a_foreign_form_is_refused_and_changes_nothing",),
    ),
    Mutant(
        "Sec-Fetch-Site of a form",
        "outboxq/dashboard/origins.py",
        '    if site is not None and site != "same-origin":',
        '    if site == "":',
        ("tests/dashboard/test_permissions.py::test_a_foreign_form_is_refused_and_changes_nothing",),
    ),
    Mutant(
        "served hosts",
        "outboxq/dashboard/origins.py",
        "    if host in _LOOPBACK or host in hosts:",
        "    if host or hosts:",
        ("tests/dashboard/test_permissions.py::test_a_host_that_is_not_served_is_refused",),
    ),
    Mutant(
        "end of a session's life",
        "outboxq/dashboard/sessions.py",
        " or found.until < time.time() or",
        " or",
        ("tests/dashboard/test_logins.py::test_a_session_that_was_changed_or_is_old_is_none",),
    ),
    Mutant(
        "logged out sessions",
        "outboxq/dashboard/sessions.py",
        " or found.id in self._ended:",
        ":",
        ("tests/dashboard/test_permissions.py::test_a_session_that_logged_out_is_over",),
    ),
    Mutant(
        "changed password ends sessions",
        "outboxq/dashboard/sessions.py",
        "    if found is None or not secrets.compare_digest(self._mark(*found), session.mark):",
        "    if found is None:",
        ("tests/dashboard/test_logins.py::test_a_session_has_the_user_as_the_login_knows_it_today",),
    ),
    Mutant(
        "signature of a cookie",
        "outboxq/dashboard/seals.py",
        "        if not text or not self.is_mac(purpose, text, mac):",
        "        if not text:",
        ("tests/dashboard/test_logins.py::test_a_session_that_was_changed_or_is_old_is_none",),
    ),
    Mutant(
        "login link used once",
        "outboxq/dashboard/logins.py",
        "            self._link = None\n        return self._user",
        "        return self._user",
        ("tests/dashboard/test_permissions.py::test_a_wrong_token_and_a_used_link_let_nobody_in",),
    ),
    Mutant(
        "proxies trusted for the user header",
        "outboxq/dashboard/logins.py",
        " or request.client is None or not self._is_proxy(request.client.host):",
        " or request.client is None:",
        ("tests/dashboard/test_logins.py::test_a_header_is_believed_from_a_proxy_alone",),
    ),
    Mutant(
        "redaction by key",
        "outboxq/dashboard/payloads.py",
        "    return _ALWAYS.search(words) is not None or _SECRET_KEY.search(words) is not None",
        "    return _ALWAYS.search(words) is not None",
        ("tests/dashboard/test_payloads.py::test_keys_that_look_secret",),
    ),
    Mutant(
        "preview bound to its user",
        "outboxq/dashboard/intents.py",
        "        given = (found.user, found.session, found.database)",
        "        given = (caller.user.name, caller.session, caller.database)",
        ("tests/dashboard/test_bulk.py::test_a_preview_that_is_not_one_changes_nothing",),
    ),
    Mutant(
        "cap of login tries",
        "outboxq/dashboard/tries.py",
        "        if self._under_way >= _MOST:",
        "        if self._under_way < 0:",
        ("tests/dashboard/test_logins.py::test_tries_to_log_in_hold_up_nothing_else_and_are_few",),
    ),
    Mutant(
        "question before many rows change",
        "outboxq/cli/bulk.py",
        " or (number <= _UNASKED and not (self.everything and number)):",
        " or number:",
        ("tests/cli/test_asking.py::test_more_than_a_hundred_are_asked_about",),
    ),
    Mutant(
        "dry run that changes nothing",
        "outboxq/cli/bulk.py",
        "            raise typer.Exit(1 if missing else 0)\n        if self.ids",
        "        if self.ids",
        ("tests/cli/test_asking.py::test_a_dry_run_counts_and_changes_nothing",),
    ),
    Mutant(
        "refusing ids with filters",
        "outboxq/cli/bulk.py",
        "        if (self.ids and (given or self.everything)) or (given and self.everything):",
        "        if self.ids and given and self.everything:",
        ("tests/cli/test_errors.py::test_a_change_of_many_rows_wants_to_know_which",),
    ),
    Mutant(
        "exit code of work not done",
        "outboxq/cli/bulk.py",
        "    return 1 if not_done else 0",
        "    return 0",
        ("tests/cli/test_dead.py::test_what_another_operator_holds_is_reported_and_not_waited_for",),
    ),
    Mutant(
        "notice of more rows",
        "outboxq/cli/reading.py",
        "limit=options.limit + 1, **given)",
        "limit=options.limit, **given)",
        ("tests/cli/test_jobs.py::test_the_list_says_when_there_is_more",),
    ),
    Mutant(
        "escaping control characters",
        "outboxq/codec/display.py",
        "            return printable(str(value))",
        "            return str(value)",
        ("tests/cli/test_jobs.py::test_nothing_from_the_database_reaches_the_terminal_as_control",),
    ),
    Mutant(
        "escaping control characters in JSON",
        "outboxq/cli/output.py",
        "    typer.echo(escaped_json(_indented(msgspec.json.encode(value).decode())))",
        "    typer.echo(_indented(msgspec.json.encode(value).decode()))",
        ("tests/cli/test_output.py::test_json_holds_nothing_that_a_terminal_acts_on",),
    ),
    Mutant(
        "exit code of wrong usage",
        "outboxq/cli/errors.py",
        "        return Failure(str(error), 2)",
        "        return Failure(str(error), 1)",
        ("tests/cli/test_errors.py::test_settings_that_a_relay_cannot_have_are_wrong_usage",),
    ),
    Mutant(
        "refusing bytes that are not UTF-8",
        "outboxq/cli/errors.py",
        "            check_encoding(words)\n",
        "",
        ("tests/cli/test_errors.py::test_bytes_that_are_no_text_are_wrong_usage",),
    ),
    Mutant(
        "errors as JSON",
        "outboxq/cli/output.py",
        "    if _with_json.get():\n        text",
        "    if not kind:\n        text",
        ("tests/cli/test_errors.py::test_with_json_an_error_is_json",),
    ),
    Mutant(
        "arguments checked by a registry",
        "outboxq/cli/arguments.py",
        "        if (self.app is None) is not self.unchecked:",
        "        if self.app is not None and self.unchecked:",
        ("tests/cli/test_changing.py::test_arguments_have_to_fit_their_handler",),
    ),
    Mutant(
        "refusing NUL",
        "outboxq/codec/values.py",
        '    if b"\\\\u0000" in data and _NUL.search(data):',
        '    if b"" == data:',
        ("tests/codec/test_codec.py::test_nul_is_refused",),
    ),
    Mutant(
        "refusing NaN and infinity",
        "outboxq/codec/values.py",
        '    if b"null" in data and any(',
        '    if b"" == data and any(',
        ("tests/codec/test_codec.py::test_nan_and_infinity_are_refused_wherever_they_hide",),
    ),
    Mutant(
        "cap of headers",
        "outboxq/codec/values.py",
        "    if len(data) > MAX_HEADERS_BYTES:",
        "    if not data:",
        ("tests/codec/test_codec.py::test_headers_have_a_cap",),
    ),
    Mutant(
        "withholding a validator's text",
        "outboxq/codec/values.py",
        "    if error.__cause__ is None and _QUOTES_NOTHING.match(str(error)):",
        "    if str(error):",
        (
            "tests/codec/test_codec.py::test_what_a_validator_says_is_not_quoted",
            "tests/codec/test_codec.py::test_a_value_that_does_not_fit_is_refused_without_being_quoted",
        ),
    ),
    Mutant(
        "refusing an entity without a key",
        "outboxq/codec/entities.py",
        "    if state is None or state.key is None:",
        "    if state is None:",
        ("tests/codec/test_codec.py::test_an_entity_without_a_key_is_never_encoded",),
    ),
    Mutant(
        "names imported for type checkers",
        "outboxq/codec/signature.py",
        "        return _hints(carrier, {**globals_, **type_checking})",
        "        return _hints(carrier, globals_)",
        ("tests/codec/test_signature.py::test_a_name_that_is_imported_for_type_checkers_only_is_found",),
    ),
    Mutant(
        "public name of a type",
        "outboxq/codec/text.py",
        "{public if is_public else module}.{name}",
        "{module}.{name}",
        ("tests/codec/test_type_names.py::test_a_type_has_the_name_that_it_is_documented_under",),
    ),
)


def main(wanted: list[str]) -> int:
    """Run the mutants whose names hold one of the words, or all; with `--page`, write the page that lists them."""
    if wanted == ["--page"]:
        PAGE.write_text(page(PAGE.read_text()))
        return 0
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


def listed() -> str:
    """The list of docs/mutants.md: each package's files, with the names of their mutants."""
    files: dict[str, dict[str, list[str]]] = {}
    for mutant in MUTANTS:
        package = "/".join(mutant.file.split("/")[:2]) if mutant.file.count("/") > 1 else "outboxq"
        files.setdefault(package, {}).setdefault(mutant.file, []).append(mutant.name)
    lines = [f"There are {len(MUTANTS)}.", ""]
    for package, found in sorted(files.items()):
        lines += [f"## {package}", ""]
        for file, names in sorted(found.items()):
            lines += textwrap.wrap(
                f"- `{file}`: {'; '.join(names)}", 130, subsequent_indent="  ", break_on_hyphens=False
            )
        lines.append("")
    return "\n".join(lines)


def page(text: str) -> str:
    """The text of the page with the list as it is today."""
    return re.sub(r"(?<=<!-- api: mutants -->\n).*?(?=<!-- end -->)", lambda _: listed(), text, flags=re.DOTALL)


def apply(mutant: Mutant, root: Path) -> None:
    """Replace the text, which must stand there once."""
    place = root / mutant.file
    text = place.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its text stands {text.count(mutant.old)} times in {mutant.file}")
    place.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
