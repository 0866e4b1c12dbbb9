"""What results look like: a table for the terminal, a page for the browser. Reads files, never trains."""
