"""For each bug of `plants.py` a batch that comes to something else with it, and to the same without."""

from tests.fuzz.program import Batch, around, batch, block, given, step, task

_SEES = (given("Account", 1), step("see", 0))

SHOWN: dict[str, Batch] = {
    "statements_keep_rows": batch(
        task(given("Account", 2), step("put", 0, 5)), task(step("update_core", "Account", 1, 7)), task(*_SEES)
    ),
    "deferred_statements_keep_rows": batch(
        task(given("Account", 2), step("put", 0, 5)), task(step("defer_update", "Account", 1, 7)), task(*_SEES)
    ),
    "other_classes_keep_rows": batch(
        task(given("Account", 1), step("put", 0, 5)),
        task(given("Account", 1), step("put", 0, 7)),
        task(given("SameAccount", 1), step("see", 0)),
    ),
    "changed_rows_stay": batch(
        task(given("Account", 2), step("see", 0)), task(step("put_unloaded", "Account", 1, 5)), task(*_SEES)
    ),
    "any_rows_are_loaded_ahead": batch(
        task(given("Account", 1), step("put", 0, 5)), task(given("Summed", 1), step("see", 0))
    ),
    "loads_are_not_heard": batch(task(around(step("hook_load", 7)), *_SEES)),
    "values_are_raw": batch(task(given("Guarded", 1), step("see", 0))),
    "lone_rows_are_not_counted": batch(task(step("put_unloaded", "Account", 4, 5))),
    "statements_overtake": batch(
        task(given("Account", 1), step("change", 0, 5)), task(step("update_core", "Account", 1, 7))
    ),
    "selects_overtake": batch(task(given("Account", 1), step("change", 0, 5)), task(step("value_of", "Account", 1))),
    "cursors_are_unseen": batch(
        task(given("Account", 1), step("change", 0, 5)), task(step("update_by_cursor", "Account", 1, 7))
    ),
    "changes_overtake_deferred": batch(
        task(step("put_unloaded", "Account", 1, 5)),
        task(step("defer_update", "Account", 2, 5)),
        task(step("put_unloaded", "Account", 2, 5)),
    ),
    "deferred_overtake_others": batch(
        task(step("defer_update", "Account", 1, 3)),
        task(step("defer_value", "Account", 1, 5)),
        task(step("defer_update", "Account", 1, 7)),
    ),
    "deferred_go_last": batch(task(step("defer_update", "Account", 1, 5)), task(step("put_unloaded", "Account", 1, 5))),
    "changes_of_one_row_are_regrouped": batch(
        task(step("put_unloaded", "Account", 1, 5)),
        task(step("put_unloaded", "Account", 1, 6), step("put_extra", 0, 1, 1)),
        task(step("put_unloaded", "Account", 1, 7)),
    ),
    "values_inside_are_ignored": batch(
        task(step("defer_expression", "Account", 1, 5)), task(step("defer_expression", "Account", 1, 6))
    ),
    "documents_wait_deferred": batch(task(step("defer_kept_document", 1, 5)), task(step("defer_kept_document", 2, 6))),
    "documents_wait_assigned": batch(
        task(given("Account", 1), step("put_kept_document", 0, 5)),
        task(given("Account", 2), step("put_kept_document", 0, 6)),
    ),
    "tables_run_no_code": batch(
        task(given("Till", 1), step("put", 0, 60)), task(given("Branch", 1), step("change", 0, 1))
    ),
    "tables_are_plain": batch(
        task(given("Ruled", 1), step("change", 0, 1)), task(given("Branch", 1), step("change", 0, 1))
    ),
    "columns_are_free": batch(
        task(given("Purse", 1), step("put_extra", 0, 2, 2)), task(given("Purse", 1), step("put_extra", 0, 2, 0))
    ),
    "mapper_listeners_are_ignored": batch(task(given("Heard", 1), step("change", 0, 1)), task(*_SEES)),
    "session_listeners_are_ignored": batch(
        task(given("Account", 2), step("hook", 1), step("change", 0, 1)), task(*_SEES)
    ),
    "expressions_are_lost": batch(task(given("Account", 2), step("express", 0, 5)), task(*_SEES)),
    "rows_are_not_counted": batch(task(step("put_unloaded", "Account", 4, 5)), task(*_SEES)),
    "arrays_hold_a_row_twice": batch(
        task(step("defer_update", "Account", 1, 3)), task(step("defer_update", "Account", 1, 5))
    ),
    "constraints_wait": batch(
        task(given("Purse", 1), step("put_extra", 0, 2, 2)), task(given("Purse", 1), step("put_extra", 0, 2, 0))
    ),
    "jobs_are_lost": batch(task(step("tell", 3)), task(step("tell", 4))),
    "jobs_are_turned_round": batch(task(step("tell", 3)), task(step("tell", 4))),
    "sessions_join_late": batch(
        task(given("Account", 2), step("see", 0)), task(given("Account", 1), step("hook_begin", 3), step("anything"))
    ),
    "rollbacks_pass": batch(task(*_SEES), task(step("note", "a"), step("end_transaction", "rollback", "context"))),
    "closed_sessions_wait": batch(
        task(given("Account", 2), step("see", 0)),
        task(
            given("Account", 1),
            step("defer_value", "Account", 1, 7),
            step("change", 0, 5),
            step("end_transaction", "close", "context"),
        ),
    ),
    "upserts_are_not_understood": batch(task(*_SEES), task(block("swallowed", step("upsert", "Account", 1, 5)))),
    "arounds_come_late": batch(
        task(given("Account", 2), step("change", 0, 3)), task(around(step("update_core", "Account", 1, 7)), *_SEES)
    ),
    "used_sessions_take_rows": batch(
        task(given("Account", 2), step("see", 0)), task(around(step("hook_load", 7)), *_SEES), task(*_SEES)
    ),
    "outcomes_of_arounds_are_done": batch(task(*_SEES), task(around(way="dead"), *_SEES)),
    "errors_are_swallowed": batch(task(*_SEES), task(around(way="swallow"), *_SEES, ending="error")),
}
