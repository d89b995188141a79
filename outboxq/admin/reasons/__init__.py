"""Why jobs do not run: the looks at the database, and what each of them says."""
