"""`python -m outboxq.testing`: a relay process for tests, which obeys the order on its standard input."""

from outboxq.testing.relay_process import main

main()
