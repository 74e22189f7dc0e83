"""A run: its recipe, its stages and its folder."""
