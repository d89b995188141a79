"""The actions of the dashboard."""
