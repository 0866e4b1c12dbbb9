"""What results look like: tables of runs."""
