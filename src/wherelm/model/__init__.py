"""A `Batch` in; logits, and one loss, out."""
