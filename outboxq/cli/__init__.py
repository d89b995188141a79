"""The command line: a file per noun, thin over the modules of the same names in `outboxq.admin`.

Modules here import nothing heavy at the top, so that `--help` is quick; a command imports what it needs when it runs.
"""
