"""Step 15: columns for the owner whose code declares a schedule, and for the time since when it no longer does. Frozen.

Relays of the previous version read and write schedules as before; a disabled schedule is also paused, which they
respect. Heartbeats read the table: it is changed under a lock that does not delay them.

Roles that may look up a job's id, such as producers of unique jobs, may now also see if the job has expired and if it
runs: the code of this step reads both. A downgrade leaves these harmless rights in place.
"""

from outboxq.migrations.step_07_checks import LOCK
from outboxq.migrations.step_13_ranges import FIRST, LAST

_LOCK = LOCK.replace(".job", ".schedule")

_GRANT = """\
    DECLARE
      role_name text;
    BEGIN
      FOR role_name IN
        SELECT DISTINCT CASE acl.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM pg_attribute, aclexplode(attacl) AS acl
        WHERE attrelid = to_regclass(@schema_identifier_literal@ || '.job') AND attname = 'id'
          AND acl.privilege_type = 'SELECT'
      LOOP
        EXECUTE 'GRANT SELECT (state, expires_at, xmax) ON ' || @schema_identifier_literal@ || '.job TO ' || role_name;
      END LOOP;
    END;
"""

UP = f"""\
{_GRANT}{_LOCK}
    ALTER TABLE @schema@.schedule
      -- The registry that declares it; NULL if operators made it, or code of before this step.
      ADD COLUMN owner text,
      -- When its owner's code was first seen without it. It is disabled while `paused_at` is this very time.
      ADD COLUMN disabled_at timestamptz,
      ADD CONSTRAINT schedule_owner_bytes CHECK (octet_length(owner) BETWEEN 1 AND 255),
      ADD CONSTRAINT schedule_disabled_ranges CHECK (disabled_at BETWEEN {FIRST} AND {LAST});"""

DOWN = f"""\
{_LOCK}
    ALTER TABLE @schema@.schedule DROP COLUMN owner, DROP COLUMN disabled_at;"""
