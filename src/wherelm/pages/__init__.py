"""Checkpoints and messages in; pages and pictures out."""
