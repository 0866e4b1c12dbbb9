"""The paper's experiments and our own, and sweeps. `mcvae reproduce` and `mcvae sweep` run them."""
