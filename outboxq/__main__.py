"""The command line of outboxq: `outboxq`, or `python -m outboxq`."""

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec

from outboxq.relay.signals import end_in_order_until_begun

# The longest time for the interpreter's shutdown, the application's exit handlers included.
_END_SECONDS = 10.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and end with `SystemExit`.

    Args:
        arguments: The command and its options, in place of `sys.argv`. If given, the caller may catch the exception and
            go on; otherwise the process ends within 10 seconds.
    """
    if arguments is None and sys.argv[1:2] == ["relay"]:
        end_in_order_until_begun()
    try:
        _run(arguments)
    except SystemExit as ended:
        if arguments is None:
            _end_in_time(ended.code)
        raise


def _end_in_time(code: object) -> None:
    """End the process with this exit code after 10 seconds, if it has not ended by then.

    Python's exit waits for threads, such as those of `to_thread`, that handlers may have left running.
    """

    def end() -> None:
        time.sleep(_END_SECONDS)
        logging.getLogger("outboxq").warning("threads that handlers left behind are not waited for any longer")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else code is not None)

    threading.Thread(target=end, name="outboxq-end", daemon=True).start()


def _run(arguments: Sequence[str] | None) -> None:
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"Error: the command line needs {' and '.join(missing)}: pip install 'outboxq[cli]'\n")
        sys.exit(2)
    from outboxq.cli.errors import run_command

    sys.exit(run_command(sys.argv[1:] if arguments is None else list(arguments)))


if __name__ == "__main__":
    main()
