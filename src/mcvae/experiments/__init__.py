"""Every experiment of the paper: cells to run, records to keep. `mcvae reproduce` runs them."""
