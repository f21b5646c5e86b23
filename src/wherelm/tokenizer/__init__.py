"""Examples in; token ids, and whether each is learned, out."""
