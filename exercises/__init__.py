"""Exercises for a course: README.md."""
