"""Step 6: `add_job` for SQL producers limits the size of headers, as Python's `add_job` does. Frozen.

Every claim reads the headers of its jobs: a gigabyte of them would exhaust the relay's memory.
"""

from outboxq.migrations.step_02_functions import ADD_JOB

# Replaced and not created again, so that the rights on it stay.
_BEFORE = ADD_JOB.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)
_ARGS_BOUND = "      IF octet_length(add_job.args::text) > 262144 THEN\n"
_HEADERS_BOUND = """\
      IF octet_length(add_job.headers::text) > 65536 THEN
        RAISE EXCEPTION USING ERRCODE = 'program_limit_exceeded',
          MESSAGE = 'add_job takes headers of up to 64 KiB of JSON, got ' || octet_length(add_job.headers::text)
            || ' bytes';
      END IF;
"""

UP = _BEFORE.replace(_ARGS_BOUND, _HEADERS_BOUND + _ARGS_BOUND, 1)
DOWN = _BEFORE
