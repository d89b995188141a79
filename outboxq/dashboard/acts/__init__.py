"""What each action of the dashboard does."""
