"""The reports of a run and of several runs, made from their files alone."""

FILES_OF_A_RUN = ("report.html", "report.md", "loss.png", "training.png", "loss-by-source.png")
"""Files of a run's report. A picture without content is not written."""
