"""Predictions against runs that other people measured and published."""

from planner.validate.run import Result, Summary, Validation, explain, validate

__all__ = ["Result", "Summary", "Validation", "explain", "validate"]
