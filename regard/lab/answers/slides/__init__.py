"""The slides on self-attention and Transformers, part II, section by section."""
