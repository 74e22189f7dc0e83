"""The reports of a run and of several runs, made from their files alone."""
