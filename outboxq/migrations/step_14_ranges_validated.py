"""Step 14: repairs the rows that break the checks of step 13, and validates the checks for all rows. Frozen.

Times and numbers are set to the nearest valid ones; a callback that cannot become a job becomes a dead letter, which
can be shown and discarded; history with impossible times is deleted, and so are relays' rows with arrays of two
dimensions. The step reads each table once, while jobs run: no other work waits, if step 13 was committed before.
"""

from outboxq.migrations.step_13_ranges import ADD, CALLBACK, CHECKS, DROP, FIRST, LAST, LOCK_ALL, MOST, TIMES

# Their times are in their keys, and their numbers are sums: nearer values would be wrong, or belong to other rows.
_DELETED = ("stat", "gauge")


def _breaks(table: str) -> str:
    conditions = [condition for name, condition in CHECKS[table].items() if name != "batch_callback_job"]
    return " OR ".join(f"NOT ({condition})" for condition in conditions)


def _nearest(column: str) -> str:
    # greatest() of NULL and a time returns the time.
    return f"CASE WHEN {column} IS NOT NULL THEN least(greatest({column}, {FIRST}), {LAST}) END"


def _repair(table: str) -> str:
    if table in _DELETED:
        return f"    DELETE FROM @schema@.{table} WHERE {_breaks(table)};"
    values = [f"{column} = {_nearest(column)}" for column in TIMES.get(table, ())]
    if table == "rate":
        values.append("tat = clock_timestamp()")
    if table == "relay_status":
        values += [f"{names} = array_remove({names}, NULL)" for names in ("queues", "kinds", "free")]
    if table == "done_job":
        values.append(f"seconds = CASE WHEN seconds = 'NaN' THEN 0 ELSE least(greatest(seconds, -{MOST}), {MOST}) END")
    return f"    UPDATE @schema@.{table} SET {', '.join(values)} WHERE {_breaks(table)};"


# Its trigger refuses changes of actions that have ended.
_REPAIR_AUDIT = f"""\
    IF EXISTS (SELECT FROM @schema@.audit WHERE {_breaks("audit")}) THEN
      ALTER TABLE @schema@.audit DISABLE TRIGGER keep_audit;
  {_repair("audit")}
      ALTER TABLE @schema@.audit ENABLE TRIGGER keep_audit;
    END IF;"""

# A failing cast raises an error instead of returning false: so each row is tried by itself.
_BURY = f"""\
    DECLARE
      candidate uuid;
      has_text boolean;
      fits boolean;
    BEGIN
      FOR candidate IN SELECT id FROM @schema@.batch LOOP
        BEGIN
          has_text := false;
          fits := false;
          PERFORM octet_length(callback::text) FROM @schema@.batch WHERE id = candidate;
          has_text := true;
          fits := EXISTS (SELECT FROM @schema@.batch WHERE id = candidate AND {CALLBACK});
        EXCEPTION WHEN program_limit_exceeded OR out_of_memory OR data_exception OR internal_error THEN
          NULL;
        END;
        CONTINUE WHEN fits;
        WITH gone AS (
          DELETE FROM @schema@.batch WHERE id = candidate RETURNING *
        )
        INSERT INTO @schema@.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason,
          created_at, batch_id)
        SELECT CASE WHEN EXISTS (SELECT FROM @schema@.dead_job WHERE dead_job.id = gone.id)
            THEN gen_random_uuid() ELSE gone.id END,
          CASE WHEN octet_length(callback ->> 'queue') BETWEEN 1 AND 63 THEN callback ->> 'queue' ELSE 'default' END,
          CASE WHEN octet_length(callback ->> 'kind') BETWEEN 1 AND 63 THEN callback ->> 'kind' ELSE 'unknown' END,
          CASE WHEN has_text AND jsonb_typeof(callback -> 'args') = 'object' THEN callback -> 'args' ELSE '{{}}' END,
          '{{}}', 0, 0, 0, '[]', 'the callback of its batch cannot become a job',
          {_nearest("created_at")}, parent_id
        FROM gone;
      END LOOP;
    END;"""

# Nothing can be removed from an array of two dimensions; a living relay writes its row again.
_FORGET = """\
    DELETE FROM @schema@.relay_status
    WHERE array_ndims(queues) > 1 OR array_ndims(kinds) > 1 OR array_ndims(free) > 1;"""

_REPAIRS = "\n".join(_REPAIR_AUDIT if table == "audit" else _repair(table) for table in CHECKS)
_VALIDATE = "\n".join(
    f"    ALTER TABLE @schema@.{table} " + ", ".join(f"VALIDATE CONSTRAINT {name}" for name in checks) + ";"
    for table, checks in CHECKS.items()
)

UP = f"""\
{_BURY}
{_FORGET}
{_REPAIRS}
{_VALIDATE}"""
DOWN = f"{LOCK_ALL}\n{DROP}\n{ADD}"
