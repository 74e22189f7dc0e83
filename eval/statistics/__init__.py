"""Statistics of trials: which settings are judged, and which differences are significant."""
