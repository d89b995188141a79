"""Step 5: vacuum settings of the table of jobs, and of the messages and effects that expire. Frozen.

A setting is made only if it is not set yet, so that an operator's values stay; the downgrade removes only outboxq's.

vacuum_index_cleanup: by default, vacuum skips the indexes while less than a fiftieth of the table's pages have dead
rows. After one large backlog that is nearly always so, and each claim walks over the dead entries. vacuum_truncate:
returning the end of the file takes an ACCESS EXCLUSIVE lock, for which claims and producers wait, and frees pages that
the next burst needs again. The autovacuum settings of `inbox` and `effect`: by default, a fifth of their rows would be
dead before vacuum runs, and each batch of deletions of expired rows would walk over the dead ones.
"""

_SETTINGS = """\
        VALUES
          (1, 'job', 'vacuum_index_cleanup', 'on'),
          (2, 'job', 'vacuum_truncate', 'off'),
          (3, 'inbox', 'autovacuum_vacuum_scale_factor', '0.02'),
          (4, 'inbox', 'autovacuum_vacuum_threshold', '5000'),
          (5, 'inbox', 'vacuum_index_cleanup', 'on'),
          (6, 'effect', 'autovacuum_vacuum_scale_factor', '0.02'),
          (7, 'effect', 'autovacuum_vacuum_threshold', '5000'),
          (8, 'effect', 'vacuum_index_cleanup', 'on')"""

# ALTER TABLE SET takes SHARE UPDATE EXCLUSIVE here, for which neither claims nor producers wait.
UP = f"""\
    DECLARE
      wanted record;
    BEGIN
      FOR wanted IN
        SELECT full_name, setting, value
        FROM (
{_SETTINGS}
        ) AS ours (number, name, setting, value)
          CROSS JOIN LATERAL (SELECT @schema_identifier_literal@ || '.' || name AS full_name) AS named
        WHERE NOT EXISTS (
          SELECT FROM pg_class CROSS JOIN unnest(reloptions) AS made
          WHERE pg_class.oid = to_regclass(full_name) AND split_part(made, '=', 1) = setting
        )
        ORDER BY number
      LOOP
        EXECUTE 'ALTER TABLE ' || wanted.full_name || ' SET (' || wanted.setting || ' = ' || wanted.value || ')';
      END LOOP;
    END;"""

DOWN = f"""\
    DECLARE
      wanted record;
    BEGIN
      FOR wanted IN
        SELECT full_name, setting
        FROM (
{_SETTINGS}
        ) AS ours (number, name, setting, value)
          CROSS JOIN LATERAL (SELECT @schema_identifier_literal@ || '.' || name AS full_name) AS named
        WHERE EXISTS (
          SELECT FROM pg_class CROSS JOIN unnest(reloptions) AS made
          WHERE pg_class.oid = to_regclass(full_name) AND made = setting || '=' || value
        )
        ORDER BY number
      LOOP
        EXECUTE 'ALTER TABLE ' || wanted.full_name || ' RESET (' || wanted.setting || ')';
      END LOOP;
    END;"""
