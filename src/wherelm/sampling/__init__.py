"""Prompts and a decoder in; replies out."""
