"""Recorded and public traces: record what happened, replay it, tell it as text, draw it."""
