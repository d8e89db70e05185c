"""What a report says, as data, and how a terminal, Markdown, a page and a notebook show it."""
