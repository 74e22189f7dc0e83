"""From the rows of trials to statements: which settings are judged, and which differences are real."""
