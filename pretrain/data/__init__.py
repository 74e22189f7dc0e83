"""From token shards to the batch of a step: sample indexes, the order of samples, and the arrays of a rank."""
