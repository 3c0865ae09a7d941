"""How a step of decoding is computed."""
