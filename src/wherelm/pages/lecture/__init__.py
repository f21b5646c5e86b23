"""The lecture "Attention and Position", claim by claim."""
