"""Models of other libraries as bridges and latent variable models, and results for others. Each needs its own extra."""
