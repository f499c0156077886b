"""Schedules of optimizer options: shapes, durations, and the registry (OPTIMIZER.SCHEDULES)."""
