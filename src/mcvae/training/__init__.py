"""Training on Lightning, run folders, and the evaluation of a run."""
