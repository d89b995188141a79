"""The command line of outboxq: a module for each group of commands. Most of them call functions of `outboxq.admin`.

Modules here import nothing heavy at the top, so that `--help` is quick; a command imports what it needs when it runs.
"""
