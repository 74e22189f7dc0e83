"""A prepared data set: shards, manifest, verification, statistics."""
