"""The reasons why jobs do not run: queries of the database, and the reasons found by each."""
