"""Run relays and producers for a while under kills, terminated connections and deadlocks, and see what grows.

    python -m tests.soak --minutes 30 --seed 1        a line of slopes for each process; ends with 1 if one grows

Linux only: it reads /proc. The server is one of its own, embedded or from the directory in `OUTBOXQ_PG_BIN`.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from tests.soak.run import SoakOptions, soak
from tests.soak.slopes import in_lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if something grows, or a job did not come to what it was to come to."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=str(__doc__).splitlines()[0])
    for field in dataclasses.fields(SoakOptions):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=field.type, default=field.default, help=f"[{field.default}]")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and no lines on the way")
    order = vars(parser.parse_args(arguments))
    as_json = order.pop("json")
    report = soak(SoakOptions(**order), (lambda _: None) if as_json else (lambda line: print(line, flush=True)))
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
        return 1 if report.problems else 0
    print("\n".join(in_lines(report.slopes)))
    figures = {name: value for name, value in dataclasses.asdict(report).items() if name not in ("slopes", "problems")}
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    print("\n".join(report.problems) or "nothing grows, and each job came to its end once")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
