"""Statistics of trials: the choice of hyperparameters, and the significance of differences."""
