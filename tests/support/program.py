"""Runs the Python program in its argument, as `python -c` does, in a process that can be forked."""

import sys

if __name__ == "__main__":
    exec(compile(sys.argv.pop(1), "<argument>", "exec"), {"__name__": "__main__"})
