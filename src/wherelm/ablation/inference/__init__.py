"""Figures of seeds and examples in; intervals, levels and seeds needed out. Numbers alone."""
