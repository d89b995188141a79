"""Step 4: the inbox of accepted messages, and the effects that are called once. Frozen.

Only rows with an `expires_at` are ever pruned. A check on `effect` refuses an `expires_at` for a call that may be in
progress, and for one whose outcome is unknown.
"""

UP = """\
    CREATE TABLE @schema@.inbox (
      consumer text NOT NULL,
      message_id text NOT NULL,
      fingerprint bytea,
      seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      expires_at timestamptz NOT NULL,
      PRIMARY KEY (consumer, message_id),
      CONSTRAINT inbox_consumer_bytes CHECK (octet_length(consumer) BETWEEN 1 AND 63),
      CONSTRAINT inbox_message_id_bytes CHECK (octet_length(message_id) BETWEEN 1 AND 512)
    );
    CREATE INDEX inbox_expires ON @schema@.inbox (expires_at);

    CREATE TABLE @schema@.effect (
      scope text NOT NULL,
      key text NOT NULL,
      fingerprint bytea,
      status text NOT NULL,
      in_doubt boolean NOT NULL DEFAULT false,
      provider_key uuid NOT NULL,
      lock_token uuid NOT NULL,
      locked_until timestamptz NOT NULL,
      attempts integer NOT NULL DEFAULT 1,
      result jsonb,
      error text,
      first_called_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      expires_at timestamptz,
      PRIMARY KEY (scope, key),
      CONSTRAINT effect_scope_bytes CHECK (octet_length(scope) BETWEEN 1 AND 255),
      CONSTRAINT effect_key_bytes CHECK (octet_length(key) BETWEEN 1 AND 512),
      CONSTRAINT effect_status CHECK (status IN ('started', 'done', 'failed', 'retryable', 'unknown')),
      CONSTRAINT effect_kept CHECK (
        expires_at IS NULL OR status IN ('done', 'failed') OR status = 'retryable' AND NOT in_doubt
      )
    );
    CREATE INDEX effect_expires ON @schema@.effect (expires_at) WHERE expires_at IS NOT NULL;
    CREATE INDEX effect_unknown ON @schema@.effect (changed_at) WHERE status = 'unknown';

    CREATE TABLE @schema@.deployment (
      singleton boolean NOT NULL PRIMARY KEY DEFAULT true,
      id uuid NOT NULL DEFAULT gen_random_uuid(),
      CONSTRAINT deployment_one_row CHECK (singleton)
    );
    INSERT INTO @schema@.deployment DEFAULT VALUES;"""

DOWN = """\
    DROP TABLE @schema@.deployment, @schema@.effect, @schema@.inbox;"""
