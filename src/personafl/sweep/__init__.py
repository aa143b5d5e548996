"""Search over recipe keys: many trials of a recipe, the best by validation data, never by test data."""
