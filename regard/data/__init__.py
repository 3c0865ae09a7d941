"""From files to batches: tokenizers, text and images of any size, and what goes into a step."""
