"""The handout on attention and the Transformer, section by section."""
