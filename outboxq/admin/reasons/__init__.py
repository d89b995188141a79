"""The reasons why jobs do not run: each module finds some of them in the database, for `admin.explain`."""
