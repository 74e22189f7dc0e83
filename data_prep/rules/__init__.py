"""Rules for one document: cleaning, sentence splitting, filters."""
