"""Ways to compute attention. Each takes (query, key, value, mask, beta, bias, dropout), with

query (B, H, L, K), key (B, G, S, K), value (B, G, S, V) and a plain finite β, and gives
(B, H, L, V). `plan.py` picks one; all are tested against the formula in `attend.py`.
"""
