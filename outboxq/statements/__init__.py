"""All SQL that runs outside migrations: a file per verb, a function per statement."""
