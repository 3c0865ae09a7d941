"""Other libraries' weights: the same numbers come out here."""
