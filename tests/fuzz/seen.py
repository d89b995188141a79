"""Batches that once came to something else than their jobs alone, each the smallest that did."""

from tests.fuzz.program import Batch, batch, block, given, step, task

# What writes a row without the session's knowing of it, and what it is called.
OWN_SQL = (
    "update_core", "update_by_text", "update_by_connection", "update_by_bind", "update_by_driver", "update_by_cursor",
    "call_function", "call_by_text", "write_in_cte", "update_returning", "bulk_update", "defer_update", "defer_text",
    "defer_expression", "defer_value",
)  # fmt: skip

SEEN: dict[str, Batch] = {
    "a lazy load in a coroutine, which fails at the buffered changes of the jobs before it": batch(
        *(task(given("Account", 1), step("change", 0, 1)) for _ in range(6)),
        task(given("Account", 1), step("attach", "Account", 2), step("change", 0, 1), step("change", 1, 1)),
        flavour="async",
    ),
    "a deferred update, a row that is got after a select, the same row as an entity": batch(
        task(step("defer_update", "Account", 1, 7)),
        task(step("anything"), step("get_one", "Account", 1), step("change", 0, 3)),
        task(given("Account", 1), step("change", 0, 5)),
    ),
    "rows that a handler adds without autoflush": batch(
        task(given("Account", 1), step("change", 0, 5)),
        task(block("no_autoflush", step("note", "a"), step("notes"))),
    ),
    "rows that a handler adds with autoflush off": batch(
        task(given("Account", 1), step("change", 0, 5)),
        task(step("autoflush_off"), step("note", "a"), step("notes"), step("count_of", "Account")),
    ),
    "an attribute that is changed behind SQLAlchemy's back": batch(
        task(given("Account", 1), step("change_unseen", 0, 5)),
        task(given("Account", 1), step("change", 0, 3)),
    ),
    "a document that is changed in place": batch(
        task(given("Account", 1), step("change_in_place", 0, 5)),
        task(given("Account", 1), step("change", 0, 3)),
    ),
    "a CHECK that only the first of two changes breaks": batch(
        task(given("Purse", 1), step("put", 0, -1)),
        task(given("Purse", 1), step("put", 0, 5)),
    ),
    "a unique constraint that only the first of two changes breaks": batch(
        task(given("Purse", 1), step("put_extra", 0, 1, 1)),
        task(given("Purse", 1), step("put_extra", 0, 1, 2)),
    ),
    "a deferred constraint that only the first of two changes breaks": batch(
        task(given("Purse", 1), step("put_extra", 0, 2, 2)),
        task(given("Purse", 1), step("put_extra", 0, 2, 0)),
    ),
    "a trigger that changes a row of another table": batch(
        task(given("Till", 1), step("put", 0, 60)),
        task(given("Branch", 1), step("change", 0, 1)),
    ),
    "a trigger that changes its own row": batch(
        task(given("Stamped", 1), step("change", 0, 1)),
        task(given("Stamped", 1), step("change", 0, 1)),
    ),
    "a rule that changes a row of another table": batch(
        task(given("Ruled", 1), step("change", 0, 1)),
        task(given("Branch", 1), step("change", 0, 1)),
    ),
    "a listener that changes a row of another table": batch(
        task(given("Heard", 1), step("change", 0, 1)),
        task(given("Branch", 1), step("change", 0, 1)),
    ),
    "a generated column": batch(
        task(given("Figured", 1), step("change", 0, 1)),
        task(given("Figured", 1), step("see", 0)),
    ),
    "an attribute that is read from other rows": batch(
        task(given("Account", 1), step("change", 0, 1)),
        task(given("Summed", 1), step("see", 0)),
    ),
    "a row that is loaded along with another": batch(
        task(given("Account", 1), step("change", 0, 1)),
        task(given("Ticket", 1), step("read_related", 0), step("change", 1, 1)),
    ),
    "two classes for one row": batch(
        task(given("Account", 1), step("change", 0, 1)),
        task(given("SameAccount", 1), step("change", 0, 1)),
    ),
    "two classes for one row in one job": batch(
        *(
            task(given("Account", key), given("SameAccount", key), step("put", 0, key), step("put", 1, key + 3))
            for key in (1, 2, 3) * 2
        ),
    ),
    "a row that is changed without being loaded, and is not there": batch(
        task(step("attach", "Branch", 4), step("put", 0, 6)),
        task(given("Branch", 2), step("put", 0, 6)),
    ),
    "a document that is assigned, and changed by the next handler": batch(
        task(given("Account", 1), step("put_kept_document", 0, 5)),
        task(given("Account", 2), step("put_kept_document", 0, 6)),
    ),
    "a document that is deferred, and changed by the next handler": batch(
        task(step("defer_kept_document", 1, 5)),
        task(step("defer_kept_document", 2, 6)),
    ),
    "a document in a deferred statement, changed by the next handler": batch(
        task(step("defer_with_kept_document", 1, 5)),
        task(step("defer_with_kept_document", 2, 6)),
    ),
    "a table and a view of it": batch(
        task(given("Account", 1), step("change", 0, 1)),
        task(given("AccountView", 1), step("change", 0, 1)),
    ),
    "a row that the database deletes with another": batch(
        task(given("Account", 1), step("delete", 0)),
        task(given("Leaf", 1, optional=True), step("put", 0, 5)),
    ),
    "a collection that another job adds to": batch(
        task(given("Parent", 1), step("add_child", 0, 1, 5)),
        task(given("Parent", 1), step("change_children", 0, 3)),
    ),
    "a row whose key changes": batch(
        task(given("Account", 1), step("put_key", 0, 1)),
        task(given("Account", 1, optional=True), step("put", 0, 5)),
    ),
    "values that the database rounds and pads": batch(
        task(given("Account", 1), step("put_extra", 0, 0, 0), step("put_extra", 0, 2, 0)),
        task(given("Account", 1), step("see", 0), step("change", 0, 3)),
    ),
    "an expression, then an object": batch(
        task(given("Account", 1), step("express", 0, 5)),
        task(given("Account", 1), step("change", 0, 3)),
    ),
    "a session that is used after it was rolled back": batch(
        task(given("Account", 1), step("change", 0, 1)),
        task(given("Account", 1), step("change", 0, 1), step("rollback"), step("note", "a"), step("flush")),
    ),
    "a session that is used after it was rolled back, and its error swallowed": batch(
        task(given("Account", 1), step("change", 0, 1)),
        task(given("Account", 1), step("put_back", 0)),
        task(given("Account", 1), step("change", 0, 1)),
        task(
            given("Account", 1),
            step("change", 0, 1),
            step("change", 0, 1),
            step("rollback"),
            block("swallowed", step("note", "a"), step("notes")),
        ),
    ),
    "an upsert whose error would be swallowed": batch(
        task(given("Account", 1), step("change", 0, 1)),
        task(block("swallowed", step("upsert", "Account", 1, 5))),
        task(given("Account", 1), step("change", 0, 1)),
    ),
    "a transaction that is rolled back by itself": batch(
        task(given("Account", 2), step("change", 0, 1)),
        task(given("Account", 1), step("change", 0, 1), step("end_transaction", "rollback", "context")),
    ),
    "a deferred write behind a change and the end of its transaction": batch(
        task(given("Account", 2), step("change", 0, 1)),
        task(
            given("Account", 1),
            step("defer_value", "Account", 1, 7),
            step("change", 0, 5),
            step("end_transaction", "close", "context"),
        ),
    ),
    "a job that was added before its transaction was closed": batch(
        task(given("Account", 2), step("change", 0, 1)),
        task(
            given("Account", 1),
            step("tell", 1),
            step("end_transaction", "close", "row"),
            step("change", 0, 5),
        ),
    ),
    "a row that is locked after it was changed": batch(
        task(given("Account", 1), step("change", 0, 5)),
        task(given("Account", 1), step("get_locked", "Account", 1), step("change", 0, 3)),
    ),
    **{
        f"a row that {name} changes before it is got": batch(
            task(given("Account", 1), step("change", 0, 5)),
            task(step(name, "Account", 1, 7), step("get_one", "Account", 1), step("change", 0, 3)),
            task(given("Account", 1), step("change", 0, 2)),
        )
        for name in OWN_SQL
    },
}
