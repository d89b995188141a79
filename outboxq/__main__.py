"""`outboxq` and `python -m outboxq`."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends with `SystemExit`.

    Args:
        arguments: Instead of the process's own.
    """
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.exit(f"Error: the command line needs {' and '.join(missing)}: install outboxq[cli]")
    from outboxq.cli.app import app
    from outboxq.cli.failures import check_encoding, explain

    try:
        check_encoding(sys.argv[1:] if arguments is None else arguments)
        app(arguments, prog_name="outboxq")
    except Exception as error:
        failure = explain(error)
        if failure is None:
            raise
        sys.stderr.write(f"Error: {failure.message}\n")
        sys.exit(failure.exit_code)


if __name__ == "__main__":
    main()
