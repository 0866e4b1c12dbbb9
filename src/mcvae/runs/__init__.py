"""What a run folder is: its configuration, records and storage. The only reader and writer; imports no torch."""
