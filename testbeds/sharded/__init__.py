"""One training in every way to divide it over ranks."""
