"""Tables, figures and the page. Reads what runs and experiments wrote; never trains."""
