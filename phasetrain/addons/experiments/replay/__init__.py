"""Run one past update again, or examine one that was not finite."""
