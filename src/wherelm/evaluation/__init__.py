"""A decoder and held-out token ids in; figures out."""
