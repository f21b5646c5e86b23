"""Token ids in; padded or packed `Batch`es, and the count of what they hold, out."""
