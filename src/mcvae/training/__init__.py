"""Train with Lightning; load, evaluate and apply the runs that result."""
