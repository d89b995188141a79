"""`tests/support/leased_app.py` for a relay whose pace does not depend on the machine's. Named, never imported."""

from outboxq import Relay
from outboxq.relay.limits import RelayLimits
from tests.support.leased_app import jobs as jobs
from tests.support.limits import HELD

# Of all relays of the process that loads it, which takes the settings of users alone.
Relay._limits = RelayLimits(lease_mode=HELD)
