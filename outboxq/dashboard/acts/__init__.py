"""The actions of the dashboard: functions that change the database, and the forms that call them."""
