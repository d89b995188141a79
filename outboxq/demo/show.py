"""The display of the demo: lines and a progress bar while it runs, then the proof as a table, or as one JSON object."""

import json
import sys
from collections.abc import Mapping
from typing import Self

from outboxq.demo.proof import FIGURES, Proof
from outboxq.errors import ConfigError


class Show:
    """The display of a run of the demo, as a context manager around the run.

    This class is for scripts, and prints only a JSON object at the end.
    """

    def say(self, line: str) -> None:
        """Show a line about the present step of the run."""

    def progress(self, done: int, total: int) -> None:
        """Show that `done` of the `total` effects have been committed so far."""

    def finish(self, proof: Proof, facts: Mapping[str, object]) -> None:
        """Show the proof at the end, with other facts about the run."""
        sys.stdout.write(json.dumps(as_object(proof, facts)) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()


def open_show(*, as_json: bool) -> Show:
    """Return the display for scripts if `as_json`, otherwise the one for people.

    Raises:
        ConfigError: rich is not installed.
    """
    if as_json:
        return Show()
    try:
        return TerminalShow()
    except ImportError as error:
        raise ConfigError("the demo's display needs rich: pip install 'outboxq[demo]', or ask for --json") from error


class TerminalShow(Show):
    """Displays a run for people: lines and a progress bar on a terminal, only the lines in a file or a pipe."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(highlight=False)
        self._bar = Progress(
            TextColumn("effects applied"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("effects applied", total=None)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def progress(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def finish(self, proof: Proof, facts: Mapping[str, object]) -> None:
        from rich.table import Table

        self._bar.stop()
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("counted by SQL")
        table.add_column("", justify="right")
        table.add_column("from")
        for figure in FIGURES:
            value = proof.values[figure.name]
            style = ("green" if value == 0 else "bold red") if figure.must_be_zero else None
            table.add_row(figure.name, f"{value:,}", figure.counted_from, style=style)
        if proof.kill is not None:
            names = f"effects whose job {proof.kill.relay} ran when it was killed"
            table.add_row("taken over", f"{proof.taken_over} of {len(proof.kill.running)}", names)
        self._console.print(table)
        self.say("Effects by relay: " + ", ".join(f"{name} {count:,}" for name, count in proof.by_relay.items()))
        for difference in proof.differences():
            self.say(f"FAILED  {difference}")
        if proof.holds:
            self.say(f"Nothing was lost and nothing doubled, in {facts['seconds']} s.")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def as_object(proof: Proof, facts: Mapping[str, object]) -> dict[str, object]:
    """Return the proof as an object for JSON: a key for each figure, and the other facts about the run."""
    kill = proof.kill
    return {
        "ok": proof.holds,
        **{name.replace(" ", "_"): value for name, value in proof.values.items()},
        "taken_over": proof.taken_over,
        "killed": None
        if kill is None
        else {
            "relay": kill.relay,
            "pid": kill.pid,
            "signal": "SIGKILL",
            "running_jobs": len(kill.running),
            "effects_written": kill.written,
        },
        "effects_by_relay": dict(proof.by_relay),
        "differences": proof.differences(),
        **facts,
    }
