"""Gradients and the progress of training in; new weights out."""
