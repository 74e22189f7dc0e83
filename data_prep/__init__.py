"""Text in, Arrow token shards out. Pure functions over one input split each."""
