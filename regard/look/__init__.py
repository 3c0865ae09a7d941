"""Looking inside: what a model attended to while it ran."""
