"""Files, folders, hub ids and tasks in; the examples of each split out."""
