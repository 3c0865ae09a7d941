"""Looking inside a model: attention weights, alignments, plots."""
