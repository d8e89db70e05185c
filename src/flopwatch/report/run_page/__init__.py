"""The report of one training run: an HTML page, Markdown, JSON, and a short form for the terminal."""
