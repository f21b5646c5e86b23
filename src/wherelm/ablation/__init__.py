"""Run folders in; what is missing, and verdicts, out. Files alone: no torch."""
