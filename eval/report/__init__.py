"""The reports of a run and of several runs, made from their files alone."""

FILES_OF_A_RUN = ("report.html", "report.md", "loss.png", "training.png", "loss-by-source.png")
"""The files of a run's report; the last ones only if there is something to draw in them."""
