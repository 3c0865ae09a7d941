"""The models: blocks, stacks, the Transformer, the Vision Transformer and a language model."""
