"""The command line: a file for each group of commands, which calls the module of the same name in `outboxq.admin`.

Modules here import nothing heavy at the top, so that `--help` is quick; a command imports its needs when it runs.
"""
