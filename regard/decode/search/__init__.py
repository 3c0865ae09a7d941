"""What is looked for: searches and what they may ask for, as data and pure functions."""
