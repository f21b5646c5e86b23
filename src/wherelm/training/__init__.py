"""A configuration in; a run folder out."""
